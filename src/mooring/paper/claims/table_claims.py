"""The claims that the tables test: the explicit step against penalties and replay, and simple penalties."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mooring.lab.model.metrics import Interval, confidence_interval
from mooring.lab.model.summary import Row
from mooring.paper.claims.claim import (
    Claim,
    MetricOfRun,
    RowPair,
    Verdict,
    claim_on_difference,
    describe,
    finished_pairs,
    gains_by_seed,
    mean_gain,
    range_verdict,
)
from mooring.paper.context.scale import EXPLICIT, REGULARIZERS, REPLAY, Condition, Scale
from mooring.paper.figures.cka import deep_cka
from mooring.paper.published.published_numbers import published

__all__ = ["TableRows", "claims"]

TableRows = dict[Condition, list[Row]]

ACCURACY_TOLERANCE = 2.0
"""Points of accuracy within which one form is competitive with another."""

PAPER_LARGEST_GAIN = 23
"""The paper's "up to 23 %"."""


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


def claims(scale: Scale, main: TableRows, second: TableRows) -> list[Claim]:
    """Return the claims.

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
    """Compare penalties with plain fine-tuning, and with uniform or random importance."""
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
