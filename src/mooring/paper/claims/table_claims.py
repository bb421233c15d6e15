"""The claims that the tables and the grid search test: the explicit step, penalties, replay and hyper-parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooring.lab.model.metrics import SCORE_TOLERANCE, Interval, confidence_interval
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row
from mooring.lab.study.protocol import Choice
from mooring.paper.claims.claim import (
    Claim,
    MetricOfRun,
    RowPair,
    Verdict,
    claim_on_count,
    claim_on_difference,
    describe,
    finished_pairs,
    gains_by_seed,
    mean_gain,
    range_verdict,
)
from mooring.paper.context.scale import EXPLICIT, REGULARIZERS, REPLAY, Condition, Scale
from mooring.paper.figures.cka import deep_cka
from mooring.paper.published.published_numbers import Setting, published, published_setting
from mooring.paper.tables.grid_search import best_settings

TableRows = dict[Condition, list[Row]]
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


@dataclass(frozen=True)
class MethodPair:
    """The rows of two methods under the same condition."""

    condition: Condition
    rows: RowPair

    def papers(self, metric: MetricOfRun) -> float | None:
        """Return the difference between the two methods in the paper's tables; None if it has none."""
        where = (self.condition.network, self.condition.regime.name, self.condition.data)
        first, second = (published(*where, row.setting.method) for row in self.rows)
        if first is None or second is None or not isinstance(metric, str):
            return None
        difference: float = getattr(first, metric) - getattr(second, metric)
        return difference


def table_claims(scale: Scale, main: TableRows, second: TableRows) -> list[Claim]:
    """Return the claims on the tables.

    Args:
        scale: the data sets and regimes.
        main: rows of the main table, at our settings.
        second: rows of the second network.
    """
    explicit = _pairs(main, EXPLICIT, REGULARIZERS)
    tested = _explicit_against_penalty(explicit, f"with {scale.network}", "6.2 in its abstract", "4.5 in its abstract")
    tested += [_largest_gain(explicit, scale), *_every_pair_gains(explicit)]
    regimes = list(dict.fromkeys(pair.condition.regime for pair in explicit))
    for regime in regimes if len(regimes) > 1 else ():
        in_regime = [pair for pair in explicit if pair.condition.regime == regime]
        text = "6.2 in its text" if regime == scale.regimes[0] else ""
        tested += _explicit_against_penalty(in_regime, f"in {regime.name}", text)
    for data in scale.streams if len(scale.streams) > 1 else ():
        tested += _explicit_against_penalty([pair for pair in explicit if pair.condition.data == data], f"on {data}")
    tested += [*_long_streams(explicit), _preserves_deep_layers(explicit), *_against_replay(main), *_simple(main)]
    second_pairs = _pairs(second, EXPLICIT, REGULARIZERS)
    tested += _explicit_against_penalty(second_pairs, f"with the second network, {scale.second_network}")
    return [*tested, _plain_against_ewc(second, scale.second_network)]


def _pairs(rows: TableRows, first: Sequence[str], second: Sequence[str]) -> list[MethodPair]:
    """Return pairs of a first and a second method that both have a row, by condition."""
    pairs = []
    for condition, table in rows.items():
        by_name = {row.setting.method: row for row in table}
        names = [(a, b) for a, b in zip(first, second, strict=True) if a in by_name and b in by_name]
        pairs += [MethodPair(condition, (by_name[a], by_name[b])) for a, b in names]
    return pairs


def _all_pairs(rows: TableRows, first: Sequence[str], second: Sequence[str]) -> list[MethodPair]:
    """Return pairs of every first with every second method."""
    return _pairs(rows, [a for a in first for _ in second], [*second] * len(first))


def _swap(pairs: Sequence[MethodPair]) -> list[MethodPair]:
    return [MethodPair(pair.condition, (pair.rows[1], pair.rows[0])) for pair in pairs]


def _finished(pairs: Sequence[MethodPair]) -> list[RowPair]:
    return finished_pairs([pair.rows for pair in pairs])


def _gain(pairs: Sequence[MethodPair], metric: MetricOfRun) -> Interval | None:
    return mean_gain(_finished(pairs), metric)


def _describe_gain(pairs: Sequence[MethodPair], metric: MetricOfRun, spec: str = "+.2f") -> str:
    """Return the gain and, if some runs did not finish, the number of pairs behind it."""
    gain, used = describe(_gain(pairs, metric), spec), len(_finished(pairs))
    if used == len(pairs):
        return gain
    first, second = (sum(bool(pair.rows[side].unfinished) for pair in pairs) for side in (0, 1))
    return (
        f"{gain} over the {used} pairs in which every run finished; of all {len(pairs)} pairs, the first method did "
        f"not finish in {first}, the second in {second}"
    )


def _known_papers(pairs: Sequence[MethodPair], metric: MetricOfRun) -> list[float]:
    return [value for pair in pairs if (value := pair.papers(metric)) is not None]


def _gain_claim(
    statement: str,
    definition: str,
    pairs: Sequence[MethodPair],
    metric: MetricOfRun,
    *,
    text: str = "",
    low: float = 0.0,
    high: float = math.inf,
    spec: str = "+.2f",
) -> Claim:
    """Return a claim on a gain, with the mean difference in the paper's tables and the number in its text."""
    known = _known_papers(pairs, metric)
    mean = f"{math.fsum(known) / len(known):+.2f} by its tables" if known else ""
    papers = ", ".join(part for part in (mean, text) if part)
    verdict = range_verdict(_gain(pairs, metric), low, high)
    return Claim(statement, definition, _describe_gain(pairs, metric, spec), papers, verdict)


def _positive_gain(statement: str, pairs: Sequence[MethodPair], metric: str, between: str, text: str = "") -> Claim:
    definition = f"mean difference in {metric} over {len(pairs)} pairs, {between} > 0"
    return _gain_claim(statement, definition, pairs, metric, text=text)


def _explicit_against_penalty(
    pairs: Sequence[MethodPair], where: str, accuracy: str = "", forgetting: str = ""
) -> list[Claim]:
    """Compare the explicit step with the penalty of the same importance, and with the gains in the paper's text."""
    more_accurate = f"The explicit step is more accurate than its penalty {where}."
    forgets_less = f"The explicit step forgets less than its penalty {where}."
    return [
        _positive_gain(more_accurate, pairs, "accuracy", "explicit minus penalty", accuracy),
        _positive_gain(forgets_less, _swap(pairs), "forgetting", "penalty minus explicit", forgetting),
    ]


def _largest_gain(pairs: Sequence[MethodPair], scale: Scale) -> Claim:
    first = [pair for pair in pairs if pair.condition.regime == scale.regimes[0]]
    known = [(gain, pair) for pair in first if (gain := _gain([pair], "accuracy")) is not None]
    largest, best = max(known, key=lambda gain_and_pair: gain_and_pair[0].mean, default=(None, None))
    where = "" if best is None else f", {best.rows[0].setting.method} on {best.condition.data}"
    if len(known) < len(first):
        where += f"; {len(first) - len(known)} of {len(first)} pairs have no seed that finished in both"
    return Claim(
        f"The explicit step gains up to {PAPER_LARGEST_GAIN} points of accuracy in {scale.regimes[0].name}.",
        f"the largest mean difference of a pair is {PAPER_LARGEST_GAIN} or more",
        f"{describe(largest)}{where}",
        f"{PAPER_LARGEST_GAIN}",
        range_verdict(largest, PAPER_LARGEST_GAIN, math.inf),
    )


def _every_pair_gains(pairs: Sequence[MethodPair]) -> list[Claim]:
    """Test whether the explicit step is better in every pair, and not only on average."""
    tested = []
    compared = (("accuracy", "more accurate", pairs), ("forgetting", "less forgetful", _swap(pairs)))
    for metric, better, group in compared:
        verdicts = [range_verdict(_gain([pair], metric)) for pair in group]
        holds, fails = verdicts.count("holds"), verdicts.count("does not hold")
        all_hold = verdicts and holds == len(verdicts)
        known = _known_papers(group, metric)
        tested.append(
            Claim(
                f"The explicit step is consistently {better} than its penalty.",
                "it is better in every pair, beyond the 95 % interval; it fails if one pair is significantly worse",
                f"significantly better in {holds} of {len(group)}, significantly worse in {fails}",
                f"in {sum(value > 0 for value in known)} of {len(known)} by its tables" if known else "",
                "does not hold" if fails else "holds" if all_hold else "not decided",
            )
        )
    return tested


def _long_streams(pairs: Sequence[MethodPair]) -> list[Claim]:
    """Compare CIFAR-100, with balanced classes and long tasks, with the other data sets."""
    cifar = [pair for pair in pairs if pair.condition.data == "cifar100"]
    others = [pair for pair in pairs if pair.condition.data != "cifar100"]
    if not cifar:
        return []
    competitive = _gain_claim(
        "On cifar100, penalties are competitive with the explicit step.",
        f"mean difference in accuracy over {len(cifar)} pairs is below {ACCURACY_TOLERANCE:g} points",
        cifar,
        "accuracy",
        low=-math.inf,
        high=ACCURACY_TOLERANCE,
    )
    if not others:
        return [competitive]
    on_cifar, on_others = (gains_by_seed(_finished(group), "accuracy") for group in (cifar, others))
    differences = [on_others[seed] - on_cifar[seed] for seed in on_cifar if seed in on_others]
    gains_most = claim_on_difference(
        "The explicit step gains most with unbalanced classes and long streams.",
        "its mean gain in accuracy on the other data sets minus that on cifar100 > 0",
        confidence_interval(differences) if differences else None,
    )
    return [competitive, gains_most]


def _preserves_deep_layers(pairs: Sequence[MethodPair]) -> Claim:
    return _gain_claim(
        "The explicit step preserves the representations of deep layers, and its penalty does not.",
        f"mean difference in CKA of the deeper half of the layers over {len(pairs)} pairs, explicit minus penalty > 0",
        pairs,
        deep_cka,
        spec="+.4f",
    )


def _against_replay(rows: TableRows) -> list[Claim]:
    """Compare the explicit step with replay, which stores old data."""
    pairs = _all_pairs(rows, REPLAY, EXPLICIT)
    between = "replay minus explicit"
    return [
        _positive_gain("The explicit step forgets less than replay.", pairs, "forgetting", between),
        _positive_gain("Replay is more accurate than the explicit step.", pairs, "accuracy", between),
    ]


def _simple(rows: TableRows) -> list[Claim]:
    pairs = _all_pairs(rows, REGULARIZERS, ("uniform", "random"))
    plain = _all_pairs(rows, ("plain",), REGULARIZERS)
    forgets_less = "Uniform or random importance forgets less than the popular definitions."
    more_accurate = "Uniform or random importance is more accurate than the popular definitions."
    return [
        _positive_gain("Penalties forget less than plain fine-tuning.", plain, "forgetting", "plain minus penalty"),
        _positive_gain(forgets_less, pairs, "forgetting", "importance minus uniform or random"),
        _positive_gain(more_accurate, _swap(pairs), "accuracy", "uniform or random minus importance"),
    ]


def _plain_against_ewc(rows: TableRows, network: str) -> Claim:
    """Test the paper's remark that the search leads to a small learning rate for plain fine-tuning."""
    pairs = _pairs(rows, ("plain",), ("ewc",))
    gains = [_gain([pair], "accuracy") for pair in pairs]
    verdicts = [range_verdict(gain) for gain in gains]
    known = _known_papers(pairs, "accuracy")
    verdict: Verdict = "does not hold" if verdicts and "not decided" not in verdicts else "not decided"
    by_data = ", ".join(f"{pair.condition.data} {describe(gain)}" for pair, gain in zip(pairs, gains, strict=True))
    return Claim(
        f"With {network}, plain fine-tuning can be more accurate than EWC.",
        "it is on at least one data set, beyond the 95 % interval",
        by_data or "neither was trained",
        f"on {sum(value > 0 for value in known)} of {len(known)}" if known else "",
        "holds" if "holds" in verdicts else verdict,
    )


def search_claims(results: SearchResults) -> list[Claim]:
    """Return the claims on the grid search, from the grids of all conditions."""
    return [_explicit_is_stable(results), _bound_is_safe(results), _sensitivity(results), *_same_settings(results)]


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
        "every explicit step is stable at every learning rate of the grid at which plain fine-tuning is",
        _grid_runs(results, EXPLICIT),
    )


def _bound_is_safe(results: SearchResults) -> Claim:
    """Test the paper's advice to reject settings outside 0 < lr * strength * importance < 1."""
    return _stable_claim(
        "Settings that keep lr * strength * importance in (0, 1) after the first task are stable.",
        "every penalty of the grid that the bound does not reject is stable where plain fine-tuning is",
        [run for run in _grid_runs(results, REGULARIZERS) if run.status != "rejected"],
    )


def _sensitivity(results: SearchResults) -> Claim:
    penalties, explicit = (_good_settings(results, methods) for methods in (REGULARIZERS, EXPLICIT))
    penalty_share, explicit_share = (good / total if total else math.nan for good, total in (penalties, explicit))
    known = math.isfinite(penalty_share) and math.isfinite(explicit_share)
    return Claim(
        "Penalties are more sensitive to their hyper-parameters than the explicit step.",
        "a smaller share of their grid, where plain is stable, is within "
        f"{GOOD_SETTING_TOLERANCE:g} points of the best setting of the method",
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
            theirs = published_setting(condition.network, condition.regime.name, condition.data, method)
            if theirs is not None:
                pairs.append((ours, theirs))
    with_strength = [(a, b) for a, b in pairs if a.strength is not None and b.strength is not None]
    return [
        claim_on_count(
            "A grid search finds the paper's learning rates.",
            "in at least half of the cells the learning rate is at most one step of the grid from the paper's",
            sum(_is_close_lr(*pair) for pair in pairs),
            len(pairs),
            share=0.5,
            details=f", {sum(a.lr == b.lr for a, b in pairs)} of them exactly",
        ),
        claim_on_count(
            "A grid search finds the paper's strengths.",
            "in at least half of the cells with a strength, both it and the learning rate are at most one step of the "
            "grid from the paper's",
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
