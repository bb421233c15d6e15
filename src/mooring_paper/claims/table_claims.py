"""The claims that the tables and the grid search test: the explicit step, penalties, replay and hyper-parameters."""

import math
from collections.abc import Mapping, Sequence

from mooring_lab.model.metrics import SCORE_TOLERANCE
from mooring_lab.model.results import Result
from mooring_lab.model.summary import Row
from mooring_lab.study.protocol import Choice
from mooring_paper.claims.claim import Claim, claim_on_count, describe_conditions, list_names
from mooring_paper.claims.method_pairs import (
    MethodPair,
    claim_on_every_pair,
    claim_on_mean,
    claim_on_some_pair,
    describe_gain,
)
from mooring_paper.claims.sequential_verdict import LookSchedule
from mooring_paper.context.scale import EXPLICIT, PAPER, REGULARIZERS, REPLAY, Condition, Regime, Scale
from mooring_paper.figures.cka import deep_cka
from mooring_paper.published.published_numbers import Setting, published_setting
from mooring_paper.tables.grid_search import best_settings

TableRows = Mapping[Condition, Sequence[Row]]
SearchResults = Mapping[Condition, Sequence[Choice]]

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


def table_claims(
    scale: Scale, looks: LookSchedule, main: TableRows, second: TableRows, at_paper_settings: TableRows
) -> list[Claim]:
    """Return the claims on the tables.

    Args:
        scale: the data sets and regimes.
        looks: the numbers of seeds.
        main: rows of the main table, at our settings.
        second: rows of the second network.
        at_paper_settings: rows of the main table at the paper's settings.
    """
    explicit = _pairs(main, EXPLICIT, REGULARIZERS)
    own = _pairs(at_paper_settings, EXPLICIT, REGULARIZERS)
    text = "{} in its abstract, over all of its pairs"
    tested = _explicit_against_penalty(explicit, looks, f"with {scale.network}", text.format(6.2), text.format(4.5))
    tested += [_largest_gain(explicit, own, looks, scale), *_every_pair_gains(explicit, looks)]
    regimes = list(dict.fromkeys(pair.condition.regime for pair in explicit))
    for regime in regimes if len(regimes) > 1 else ():
        in_regime = [pair for pair in explicit if pair.condition.regime == regime]
        text = "6.2 in its text, over all of its pairs" if regime == scale.regimes[0] else ""
        tested += _explicit_against_penalty(in_regime, looks, f"in {regime.name}", text)
    for data in scale.streams if len(scale.streams) > 1 else ():
        on_data = [pair for pair in explicit if pair.condition.data == data]
        tested += _explicit_against_penalty(on_data, looks, f"on {data}")
    tested += [*_long_streams(explicit, looks), _preserves_deep_layers(explicit, looks)]
    tested += [*_against_replay(main, looks), *_simple(main, looks)]
    second_pairs = _pairs(second, EXPLICIT, REGULARIZERS)
    tested += _explicit_against_penalty(second_pairs, looks, f"with the second network, {scale.second_network}")
    return [*tested, _plain_against_ewc(second, looks, scale)]


def _pairs(rows: TableRows, first: Sequence[str], second: Sequence[str]) -> list[MethodPair]:
    """Return pairs of a first and a second method, by condition."""
    pairs = []
    for condition, table in rows.items():
        by_name = {row.setting.method: row for row in table}
        for names in zip(first, second, strict=True):
            a, b = map(by_name.get, names)
            pairs.append(MethodPair(condition, names, None if a is None or b is None else (a, b)))
    return pairs


def _all_pairs(rows: TableRows, first: Sequence[str], second: Sequence[str]) -> list[MethodPair]:
    """Return pairs of every first with every second method."""
    return _pairs(rows, [a for a in first for _ in second], [*second] * len(first))


def _swap(pairs: Sequence[MethodPair]) -> list[MethodPair]:
    return [pair.swapped for pair in pairs]


def _explicit_against_penalty(
    pairs: Sequence[MethodPair], looks: LookSchedule, where: str, accuracy: str = "", forgetting: str = ""
) -> list[Claim]:
    """Compare the explicit step with the penalty of the same importance, and with the gains in the paper's text."""
    return [
        claim_on_mean(
            f"The explicit step is more accurate than its penalty {where}.",
            "mean difference in accuracy, explicit step minus the penalty with the same importance",
            pairs,
            "accuracy",
            looks,
            papers=accuracy,
        ),
        claim_on_mean(
            f"The explicit step forgets less than its penalty {where}.",
            "mean difference in forgetting, penalty minus the explicit step with the same importance",
            _swap(pairs),
            "forgetting",
            looks,
            papers=forgetting,
        ),
    ]


def _largest_gain(
    pairs: Sequence[MethodPair], at_paper_settings: Sequence[MethodPair], looks: LookSchedule, scale: Scale
) -> Claim:
    regime = scale.regimes[0]
    first = [pair for pair in pairs if pair.condition.regime == regime]
    papers = _papers_largest(scale.network, regime, EXPLICIT, REGULARIZERS)
    own = [pair for pair in at_paper_settings if papers is not None and _is_same(pair, papers)]
    gap = "".join(f"at the paper's own settings, {pair} gains {describe_gain(pair, looks)}" for pair in own)
    tables = f", {papers.papers('accuracy'):+.2f} by its tables for {papers}" if papers is not None else ""
    return claim_on_some_pair(
        f"The explicit step gains up to {PAPER_LARGEST_GAIN} points of accuracy in {regime.name}.",
        "the explicit step is more accurate than its penalty",
        first,
        "accuracy",
        looks,
        low=PAPER_LARGEST_GAIN,
        untrained=_untrained(papers, first),
        papers=f"{PAPER_LARGEST_GAIN} in its text{tables}",
        details=gap,
    )


def _papers_largest(network: str, regime: Regime, first: Sequence[str], second: Sequence[str]) -> MethodPair | None:
    """Return the pair with the largest difference in accuracy in the paper's tables; None if it has none."""
    pairs = _pairs({Condition(network, regime, data): [] for data in PAPER.streams}, first, second)
    known = [(value, pair) for pair in pairs if (value := pair.papers("accuracy")) is not None]
    return max(known, key=lambda value_and_pair: value_and_pair[0])[1] if known else None


def _is_same(pair: MethodPair, other: MethodPair) -> bool:
    return (pair.condition, pair.methods) == (other.condition, other.methods)


def _untrained(papers: MethodPair | None, pairs: Sequence[MethodPair]) -> MethodPair | None:
    """Return the paper's pair if it is not among ours."""
    return None if papers is None or any(_is_same(pair, papers) for pair in pairs) else papers


def _every_pair_gains(pairs: Sequence[MethodPair], looks: LookSchedule) -> list[Claim]:
    """Test whether the explicit step is better in every pair, and not only on average."""
    return [
        claim_on_every_pair(
            "The explicit step is consistently more accurate than its penalty.",
            "the explicit step is more accurate than its penalty",
            pairs,
            "accuracy",
            looks,
        ),
        claim_on_every_pair(
            "The explicit step is consistently less forgetful than its penalty.",
            "the explicit step forgets less than its penalty",
            _swap(pairs),
            "forgetting",
            looks,
        ),
    ]


def _long_streams(pairs: Sequence[MethodPair], looks: LookSchedule) -> list[Claim]:
    """Compare CIFAR-100, with balanced classes and long tasks, with the other data sets."""
    cifar = [pair for pair in pairs if pair.condition.data == "cifar100"]
    others = [pair for pair in pairs if pair.condition.data != "cifar100"]
    if not cifar:
        return []
    competitive = claim_on_mean(
        "On cifar100, penalties are competitive with the explicit step.",
        "mean difference in accuracy, explicit step minus penalty",
        cifar,
        "accuracy",
        looks,
        low=-math.inf,
        high=ACCURACY_TOLERANCE,
    )
    if not others:
        return [competitive]
    gains_most = claim_on_mean(
        "The explicit step gains most with unbalanced classes and long streams.",
        "mean difference in accuracy, explicit step minus penalty",
        others,
        "accuracy",
        looks,
        minus=cifar,
    )
    return [competitive, gains_most]


def _preserves_deep_layers(pairs: Sequence[MethodPair], looks: LookSchedule) -> Claim:
    return claim_on_mean(
        "The explicit step preserves the representations of deep layers better than its penalty.",
        "mean difference in CKA to the model after the first task, over the deeper half of the layers, explicit step "
        "minus penalty",
        pairs,
        deep_cka,
        looks,
        spec="+.4f",
    )


def _against_replay(rows: TableRows, looks: LookSchedule) -> list[Claim]:
    """Compare the explicit step with replay, which stores old data."""
    pairs = _all_pairs(rows, REPLAY, EXPLICIT)
    between = f"each of {list_names(REPLAY)} minus each explicit step"
    return [
        claim_on_mean(
            "The explicit step forgets less than replay.",
            f"mean difference in forgetting, {between}",
            pairs,
            "forgetting",
            looks,
        ),
        claim_on_mean(
            "Replay is more accurate than the explicit step.",
            f"mean difference in accuracy, {between}",
            pairs,
            "accuracy",
            looks,
        ),
    ]


def _simple(rows: TableRows, looks: LookSchedule) -> list[Claim]:
    """Compare penalties with plain fine-tuning, and popular definitions of importance with trivial ones."""
    pairs = _all_pairs(rows, REGULARIZERS, ("uniform", "random"))
    popular = f"each of {list_names(REGULARIZERS)}"
    return [
        claim_on_mean(
            "Penalties forget less than plain fine-tuning.",
            f"mean difference in forgetting, plain minus {popular}",
            _all_pairs(rows, ("plain",), REGULARIZERS),
            "forgetting",
            looks,
        ),
        claim_on_mean(
            "Uniform or random importance forgets less than the popular definitions.",
            f"mean difference in forgetting, {popular} minus each of uniform and random",
            pairs,
            "forgetting",
            looks,
        ),
        claim_on_mean(
            "Uniform or random importance is more accurate than the popular definitions.",
            f"mean difference in accuracy, each of uniform and random minus {popular}",
            _swap(pairs),
            "accuracy",
            looks,
        ),
    ]


def _plain_against_ewc(rows: TableRows, looks: LookSchedule, scale: Scale) -> Claim:
    """Test the paper's remark that the search leads to a small learning rate for plain fine-tuning."""
    pairs = _pairs(rows, ("plain",), ("ewc",))
    known = [value for pair in pairs if (value := pair.papers("accuracy")) is not None]
    papers = _papers_largest(scale.second_network, scale.regimes[0], ("plain",), ("ewc",))
    return claim_on_some_pair(
        f"With {scale.second_network}, plain fine-tuning can be more accurate than EWC.",
        "plain is more accurate than ewc",
        pairs,
        "accuracy",
        looks,
        untrained=_untrained(papers, pairs),
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
    stable = sum(run.status != "unstable" for run in runs)
    return claim_on_count(statement, definition, stable, len(runs))


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
    pairs = []
    for condition, choices in results.items():
        for method, ours in best_settings(choices).items():
            theirs = published_setting(*condition.where, method)
            if theirs is not None:
                pairs.append((ours, theirs))
    with_strength = [(a, b) for a, b in pairs if a.strength is not None and b.strength is not None]
    return [
        claim_on_count(
            "A grid search finds the paper's learning rates.",
            "in at least half of the cells the learning rate is at most one step of the grid from the paper's "
            f"({describe_conditions(list(results))})",
            sum(_is_close_lr(*pair) for pair in pairs),
            len(pairs),
            share=0.5,
            details=f", {sum(a.lr == b.lr for a, b in pairs)} of them exactly",
        ),
        claim_on_count(
            "A grid search finds the paper's strengths.",
            "in at least half of the cells with a strength, both it and the learning rate are at most one step of the "
            f"grid from the paper's ({describe_conditions(list(results))})",
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
