"""The claims that the tables and the grid search test: the explicit step, penalties, replay and hyper-parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from mooring_lab.model.metrics import SCORE_TOLERANCE
from mooring_lab.model.results import Result
from mooring_lab.study.protocol import Choice
from mooring_paper.claims.claim import Claim, claim_on_count, describe_conditions, list_names
from mooring_paper.claims.method_pairs import Evidence, MethodPair, MethodRows, PairGroup, decide_pairs
from mooring_paper.context.scale import EXPLICIT, PAPER, REGULARIZERS, REPLAY, Condition, Regime, Scale
from mooring_paper.figures.cka import deep_cka
from mooring_paper.published.published_numbers import Setting, published_setting
from mooring_paper.tables.grid_search import best_settings

SearchResults = Mapping[Condition, Sequence[Choice]]

EXPLICIT_PAIRS = tuple(zip(EXPLICIT, REGULARIZERS, strict=True))
"""Each explicit step and the penalty with the same importance."""

ACCURACY_TOLERANCE = 2.0
"""Points of accuracy within which one form is competitive with another."""

PAPER_LARGEST_GAIN = 23
"""The paper's "up to 23 %"."""

GOOD_SETTING_TOLERANCE = 5.0
"""Points of accuracy below its best within which a setting of a method is good."""

LR_STEP = 0.6
"""A bit more than a step of the learning rates, which are about half a decade apart, in log10."""

STRENGTH_STEP = 1.1
"""A bit more than a step of the strengths, which are a decade apart, in log10."""


def at_both_settings(ours: Sequence[Claim], papers: Sequence[Claim]) -> list[Claim]:
    """Return the claims at our settings, each with its number and verdict at the paper's settings."""
    return [
        replace(claim, at_paper_settings=f"{other.ours}: {other.verdict}" if any(other.seeds) else "")
        for claim, other in zip(ours, papers, strict=True)
    ]


def table_claims(evidence: Evidence, main: MethodRows, second: MethodRows) -> list[Claim]:
    """Return the claims on the tables.

    Args:
        evidence: makes pairs of rows.
        main: rows of the main table.
        second: rows of the second network.
    """
    scale = evidence.context.scale
    explicit, on_second = (evidence.pairs(rows, EXPLICIT_PAIRS) for rows in (main, second))
    abstract, text = "{} in its abstract, over all of its pairs", "6.2 in its text, over all of its pairs"
    tested = _explicit_against_penalty(explicit, f"with {scale.network}", abstract.format(6.2), abstract.format(4.5))
    tested += [_largest_gain(explicit, scale), *_every_pair_gains(explicit)]
    for regime in scale.regimes if len(scale.regimes) > 1 else ():
        in_regime = explicit.where("regime", regime)
        papers = text if regime == scale.regimes[0] else ""
        tested += _explicit_against_penalty(in_regime, f"in {regime.name}", papers)
    for data in scale.streams if len(scale.streams) > 1 else ():
        on_data = explicit.where("data", data)
        tested += _explicit_against_penalty(on_data, f"on {data}")
    tested += _long_streams(explicit)
    deep_layers = explicit.mean(
        "The explicit step preserves the representations of deep layers better than its penalty.",
        "CKA to the model after the first task, over the deeper half of the layers, explicit step minus penalty",
        deep_cka,
        spec="+.4f",
    )
    tested += [deep_layers, *_against_replay(evidence, main), *_against_simple(evidence, main)]
    tested += _explicit_against_penalty(on_second, f"with the second network, {scale.second_network}")
    return [*tested, _plain_against_ewc(evidence.pairs(second, [("plain", "ewc")]), scale)]


def _explicit_against_penalty(pairs: PairGroup, where: str, accuracy: str = "", forgetting: str = "") -> list[Claim]:
    """Compare the explicit step with the penalty of the same importance, and with the gains in the paper's text."""
    return [
        pairs.mean(
            f"The explicit step is more accurate than its penalty {where}.",
            "accuracy, explicit step minus the penalty with the same importance",
            "accuracy",
            papers=accuracy,
        ),
        pairs.swapped.mean(
            f"The explicit step forgets less than its penalty {where}.",
            "forgetting, penalty minus the explicit step with the same importance",
            "forgetting",
            papers=forgetting,
        ),
    ]


def character_claims(evidence: Evidence, rows: MethodRows, balanced: MethodRows) -> list[Claim]:
    """Return the paper's claims on unbalanced classes and long sequences, on data that it does not have.

    Args:
        evidence: makes pairs of rows.
        rows: of data sets with this character.
        balanced: of data sets with balanced classes.
    """
    explicit, others = (evidence.pairs(group, EXPLICIT_PAIRS) for group in (rows, balanced))
    data = list_names([condition.data for condition in rows])
    more = explicit.mean(
        f"The explicit step gains more on {data} than with balanced classes.",
        "accuracy, explicit step minus penalty",
        "accuracy",
        minus=others.pairs,
    )
    tested = [*_explicit_against_penalty(explicit, f"on {data}"), *([more] if others.pairs else [])]
    return [*tested, *_against_replay(evidence, rows), *_against_simple(evidence, rows)]


def _largest_gain(pairs: PairGroup, scale: Scale) -> Claim:
    regime = scale.regimes[0]
    papers = _papers_largest(scale.network, regime, EXPLICIT_PAIRS)
    tables = f", {papers.papers('accuracy'):+.2f} by its tables for {papers}" if papers is not None else ""
    return pairs.where("regime", regime).in_any(
        f"The explicit step gains up to {PAPER_LARGEST_GAIN} points of accuracy in {regime.name}.",
        "the explicit step is more accurate than its penalty",
        "accuracy",
        low=PAPER_LARGEST_GAIN,
        papers_pair=papers,
        papers=f"{PAPER_LARGEST_GAIN} in its text{tables}",
    )


def _papers_largest(network: str, regime: Regime, names: Sequence[tuple[str, str]]) -> MethodPair | None:
    """Return the pair with the largest difference in accuracy in the paper's tables; None if it has none."""
    pairs = [MethodPair(Condition(network, regime, data), both, None) for data in PAPER.streams for both in names]
    known = [(value, pair) for pair in pairs if (value := pair.papers("accuracy")) is not None]
    return max(known, key=lambda value_and_pair: value_and_pair[0])[1] if known else None


def _every_pair_gains(pairs: PairGroup) -> list[Claim]:
    """Test whether the explicit step is better in every pair, and not only on average."""
    return [
        pairs.in_each(
            "The explicit step is consistently more accurate than its penalty.",
            "the explicit step is more accurate than its penalty",
            "accuracy",
        ),
        pairs.swapped.in_each(
            "The explicit step is consistently less forgetful than its penalty.",
            "the explicit step forgets less than its penalty",
            "forgetting",
        ),
    ]


def _long_streams(pairs: PairGroup) -> list[Claim]:
    """Compare CIFAR-100, with balanced classes and long tasks, with the other data sets."""
    cifar = pairs.where("data", "cifar100")
    others = pairs.where("data", *({pair.condition.data for pair in pairs.pairs} - {"cifar100"}))
    measure = "accuracy, explicit step minus penalty"
    claims = []
    if cifar.pairs:
        statement = "On cifar100, penalties are competitive with the explicit step."
        claims.append(cifar.mean(statement, measure, "accuracy", low=-math.inf, high=ACCURACY_TOLERANCE))
    if cifar.pairs and others.pairs:
        statement = "The explicit step gains most with unbalanced classes and long streams."
        claims.append(others.mean(statement, measure, "accuracy", minus=cifar.pairs))
    return claims


def _against_replay(evidence: Evidence, rows: MethodRows) -> list[Claim]:
    """Compare the explicit step with replay, which stores old data."""
    pairs = evidence.pairs(rows, product(REPLAY, EXPLICIT))
    between = f"each of {list_names(REPLAY)} minus each explicit step"
    return [
        pairs.mean("The explicit step forgets less than replay.", f"forgetting, {between}", "forgetting"),
        pairs.mean("Replay is more accurate than the explicit step.", f"accuracy, {between}", "accuracy"),
    ]


def fresh_replay_claim(evidence: Evidence, rows: MethodRows) -> Claim:
    """Compare replay with fresh heads, as the authors' code has them, with the explicit step at the paper's settings.

    Args:
        evidence: makes pairs of rows.
        rows: of replay with fresh heads, and of the explicit step, which inherits its heads.
    """
    pairs = evidence.pairs(rows, product(REPLAY, EXPLICIT))
    claim = pairs.mean(
        "Replay with fresh heads is more accurate than the explicit step.",
        f"accuracy at the paper's settings, each of {list_names(REPLAY)} with fresh heads minus each explicit step",
        "accuracy",
    )
    columns = {condition: [pair for pair in pairs.pairs if pair.condition == condition] for condition in rows}
    gains = {c: decide_pairs(group, "accuracy", pairs.looks).decision.difference for c, group in columns.items()}
    parts = [f"{gain.mean:+.2f} on {c.data} in {c.regime.name}" for c, gain in gains.items() if gain is not None]
    return replace(claim, ours="; ".join([claim.ours, ", ".join(parts)]), wanted=())


def _against_simple(evidence: Evidence, rows: MethodRows) -> list[Claim]:
    """Compare penalties with plain fine-tuning, and popular definitions of importance with trivial ones."""
    plain = evidence.pairs(rows, product(["plain"], REGULARIZERS))
    simple = evidence.pairs(rows, product(REGULARIZERS, ["uniform", "random"]))
    popular = f"each of {list_names(REGULARIZERS)}"
    return [
        plain.mean(
            "Penalties forget less than plain fine-tuning.",
            f"forgetting, plain minus {popular}",
            "forgetting",
        ),
        simple.mean(
            "Uniform or random importance forgets less than the popular definitions.",
            f"forgetting, {popular} minus each of uniform and random",
            "forgetting",
        ),
        simple.swapped.mean(
            "Uniform or random importance is more accurate than the popular definitions.",
            f"accuracy, each of uniform and random minus {popular}",
            "accuracy",
        ),
        simple.swapped.mean(
            "Uniform or random importance preserves the representations of deep layers better than the popular "
            "definitions.",
            f"CKA of the deeper half of the layers, each of uniform and random minus {popular}",
            deep_cka,
            spec="+.4f",
        ),
    ]


def _plain_against_ewc(pairs: PairGroup, scale: Scale) -> Claim:
    """Test the paper's remark that the search leads to a small learning rate for plain fine-tuning."""
    known = [value for pair in pairs.pairs if (value := pair.papers("accuracy")) is not None]
    return pairs.in_any(
        f"With {scale.second_network}, plain fine-tuning can be more accurate than EWC.",
        "plain is more accurate than ewc",
        "accuracy",
        papers_pair=_papers_largest(scale.second_network, scale.regimes[0], [("plain", "ewc")]),
        papers=f"in {sum(value > 0 for value in known)} of the same {len(known)} by its tables" if known else "",
    )


def search_claims(grids: SearchResults) -> list[Claim]:
    """Return the claims on the grid search."""
    return [_explicit_is_stable(grids), _bound_is_safe(grids), _sensitivity(grids), *_same_settings(grids)]


def _grid_runs(results: SearchResults, methods: Sequence[str]) -> list[Result]:
    """Return the runs at learning rates at which plain fine-tuning finished: the rate alone is not the cause."""
    runs = []
    for choices in results.values():
        grid = {choice.method: [run for row in choice.grid for run in row.results] for choice in choices}
        lrs = {run.spec.lr for run in grid.get("plain", []) if run.status == "finished"}
        runs += [run for method in methods for run in grid.get(method, []) if run.spec.lr in lrs]
    return runs


def _stable_claim(statement: str, definition: str, runs: Sequence[Result]) -> Claim:
    return claim_on_count(statement, definition, sum(run.status != "unstable" for run in runs), len(runs))


def _explicit_is_stable(results: SearchResults) -> Claim:
    return _stable_claim(
        "The explicit step has no strength to tune and is always stable.",
        "every explicit step is stable on the searched tasks, at every learning rate of the grid at which plain "
        f"fine-tuning is ({describe_conditions(list(results))})",
        _grid_runs(results, EXPLICIT),
    )


def _bound_is_safe(results: SearchResults) -> Claim:
    """Test the paper's advice to reject settings outside 0 < lr * strength * importance < 1."""
    return _stable_claim(
        "Settings that keep lr * strength * importance in (0, 1) after the first task are stable.",
        f"every setting of {list_names(REGULARIZERS)} that the bound does not reject is stable on the searched tasks, "
        f"at learning rates at which plain fine-tuning is ({describe_conditions(list(results))})",
        [run for run in _grid_runs(results, REGULARIZERS) if run.status != "rejected"],
    )


def _sensitivity(results: SearchResults) -> Claim:
    penalties, explicit = (_good_settings(results, methods) for methods in (REGULARIZERS, EXPLICIT))
    penalty_share, explicit_share = (good / total if total else math.nan for good, total in (penalties, explicit))
    known = math.isfinite(penalty_share) and math.isfinite(explicit_share)
    return Claim(
        "Penalties are more sensitive to their hyper-parameters than the explicit step.",
        "a smaller share of their settings, at learning rates at which plain is stable, has an accuracy on the "
        f"searched tasks within {GOOD_SETTING_TOLERANCE:g} points of the best of the same method; rejected and "
        f"unstable settings have not ({describe_conditions(list(results))})",
        f"{penalties[0]} of {penalties[1]} against {explicit[0]} of {explicit[1]}",
        "",
        "not decided" if not known else "holds" if penalty_share < explicit_share else "does not hold",
    )


def _good_settings(results: SearchResults, methods: Sequence[str]) -> tuple[int, int]:
    """Return how many settings are close to the best of their method, and how many were tried."""
    good = total = 0
    for condition, choices in results.items():
        for method in methods:
            runs = _grid_runs({condition: choices}, (method,))
            accuracies = [run.metrics["accuracy"] for run in runs if run.status == "finished"]
            threshold = max(accuracies, default=math.nan) - GOOD_SETTING_TOLERANCE - SCORE_TOLERANCE
            good += sum(accuracy >= threshold for accuracy in accuracies)
            total += len(runs)
    return good, total


def _same_settings(results: SearchResults) -> list[Claim]:
    """Compare our settings with the paper's; strengths separately, because methods without one are easier to match."""
    pairs = [
        (ours, theirs)
        for condition, choices in results.items()
        for method, ours in best_settings(choices).items()
        if (theirs := published_setting(*condition.where, method)) is not None
    ]
    with_strength = [(a, b) for a, b in pairs if a.strength is not None and b.strength is not None]
    where, half = f"({describe_conditions(list(results))})", "in at least half of the cells"
    return [
        claim_on_count(
            "A grid search finds the paper's learning rates.",
            f"{half} the learning rate is at most one step of the grid from the paper's {where}",
            sum(_is_close_lr(*pair) for pair in pairs),
            len(pairs),
            share=0.5,
            details=f", {sum(a.lr == b.lr for a, b in pairs)} of them exactly",
        ),
        claim_on_count(
            "A grid search finds the paper's strengths.",
            f"{half} with a strength, both it and the learning rate are at most one step of the grid from the paper's "
            f"{where}",
            sum(_is_close(*pair) for pair in with_strength),
            len(with_strength),
            share=0.5,
            details=f", {sum(a == b for a, b in with_strength)} of them exactly",
        ),
    ]


def _is_close_lr(ours: Setting, theirs: Setting) -> bool:
    return abs(math.log10(ours.lr / theirs.lr)) < LR_STEP


def _is_close(ours: Setting, theirs: Setting) -> bool:
    ratio = (ours.strength or math.nan) / (theirs.strength or math.nan)
    return _is_close_lr(ours, theirs) and abs(math.log10(ratio)) < STRENGTH_STEP
