"""The claims that the tables decide: the explicit step against penalties and replay, and what simple penalties do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mooring.lab.model.metrics import Interval, confidence_interval
from mooring.lab.model.summary import Row
from mooring.paper.claims.claim import Claim, Score, Verdict, decided, gain, gains, told, whole, within
from mooring.paper.context.scale import EXPLICIT, REGULARIZERS, REPLAY, Case, Scale
from mooring.paper.figures.cka import deep
from mooring.paper.published.published_numbers import published

__all__ = ["Rows", "claims"]

Rows = dict[Case, list[Row]]

CLOSE = 2.0
"""Points of accuracy within which one form is competitive with another."""


@dataclass(frozen=True)
class Pair:
    """Two methods on the same data."""

    case: Case
    first: Row
    second: Row

    @property
    def swapped(self) -> "Pair":
        """The other way round: how much lower the first is."""
        return Pair(self.case, self.second, self.first)

    def papers(self, metric: str) -> float | None:
        """The difference by the paper's tables; None where they have none."""
        where = (self.case.network, self.case.regime.name, self.case.data)
        both = [published(*where, row.setting.method) for row in (self.first, self.second)]
        first, second = (None if each is None else getattr(each, metric) for each in both)
        return None if first is None or second is None else first - second


def claims(scale: Scale, main: Rows, other: Rows) -> list[Claim]:
    """All of them.

    Args:
        scale: which data sets and regimes there are.
        main: rows of the main table, at our settings.
        other: rows of the second network.
    """
    explicit = _pairs(main, EXPLICIT, REGULARIZERS)
    found = _better(explicit, f"with {scale.network}", accuracy="6.2 in its abstract", forgetting="4.5 in its abstract")
    found += [_largest(explicit, scale), *_everywhere(explicit)]
    regimes = list(dict.fromkeys(pair.case.regime for pair in explicit))
    for regime in regimes if len(regimes) > 1 else ():
        text = "6.2 in its text" if regime == scale.regimes[0] else ""
        found += _better([pair for pair in explicit if pair.case.regime == regime], f"in {regime.name}", text)
    for data in scale.streams if len(scale.streams) > 1 else ():
        found += _better([pair for pair in explicit if pair.case.data == data], f"on {data}")
    found += [*_long_streams(explicit), _keeps_deep_layers(explicit), *_against_replay(main), *_simple(main)]
    found += _better(_pairs(other, EXPLICIT, REGULARIZERS), f"with the second network, {scale.other}")
    return [*found, _plain_against_ewc(other, scale.other)]


def _pairs(rows: Rows, first: Sequence[str], second: Sequence[str]) -> list[Pair]:
    """Pairs of methods that both have a row, case by case."""
    found = []
    for case, some in rows.items():
        by_name = {row.setting.method: row for row in some}
        both = [(a, b) for a, b in zip(first, second, strict=True) if a in by_name and b in by_name]
        found += [Pair(case, by_name[a], by_name[b]) for a, b in both]
    return found


def _every_pair(rows: Rows, first: Sequence[str], second: Sequence[str]) -> list[Pair]:
    both = [(a, b) for a in first for b in second]
    return _pairs(rows, [a for a, _ in both], [b for _, b in both])


def _rows(pairs: Sequence[Pair]) -> list[tuple[Row, Row]]:
    return [(pair.first, pair.second) for pair in pairs]


def _gain(pairs: Sequence[Pair], metric: Score) -> Interval | None:
    return gain(whole(_rows(pairs)), metric)


def _told(pairs: Sequence[Pair], metric: Score, form: str = "+.2f") -> str:
    """The gain, and in how many of the pairs, where a run of some did not finish."""
    used = len(whole(_rows(pairs)))
    if used == len(pairs):
        return told(_gain(pairs, metric), form)
    lost = [sum(bool(row.unfinished) for row in side) for side in zip(*_rows(pairs), strict=True)]
    return (
        f"{told(_gain(pairs, metric), form)} over the {used} pairs in which every run finished; of all {len(pairs)} "
        f"the first did not in {lost[0]}, the second in {lost[1]}"
    )


def _papers(pairs: Sequence[Pair], metric: str, text: str = "") -> str:
    """The same mean by the paper's tables, and what its text says."""
    known = [value for pair in pairs if (value := pair.papers(metric)) is not None]
    mean = f"{math.fsum(known) / len(known):+.2f} by its tables" if known else ""
    return ", ".join(part for part in (mean, text) if part)


def _higher(statement: str, pairs: Sequence[Pair], metric: str, between: str, text: str = "") -> Claim:
    found = _gain(pairs, metric)
    definition = f"mean difference in {metric} over {len(pairs)} pairs, {between} > 0"
    return Claim(statement, definition, _told(pairs, metric), _papers(pairs, metric, text), decided(found))


def _better(pairs: Sequence[Pair], where: str, accuracy: str = "", forgetting: str = "") -> list[Claim]:
    """The explicit step against the penalty of the same importance."""
    less = [pair.swapped for pair in pairs]
    more = f"The explicit step is more accurate than its penalty {where}."
    kept = f"The explicit step forgets less than its penalty {where}."
    return [
        _higher(more, pairs, "accuracy", "explicit minus penalty", accuracy),
        _higher(kept, less, "forgetting", "penalty minus explicit", forgetting),
    ]


def _largest(pairs: Sequence[Pair], scale: Scale) -> Claim:
    """The paper's "up to 23 %"."""
    first = [pair for pair in pairs if pair.case.regime == scale.regimes[0]]
    known = [(found, pair) for pair in first if (found := _gain([pair], "accuracy")) is not None]
    found, best = max(known, key=lambda each: each[0].mean, default=(None, None))
    where = "" if best is None else f", {best.first.setting.method} on {best.case.data}"
    if len(known) < len(first):
        where += f"; {len(first) - len(known)} of {len(first)} pairs have no seed that finished in both"
    return Claim(
        f"The explicit step gains up to 23 points of accuracy in {scale.regimes[0].name}.",
        "the largest of the pairs' mean differences is 23 or more",
        f"{told(found)}{where}",
        "23",
        within(found, 23, math.inf),
    )


def _everywhere(pairs: Sequence[Pair]) -> list[Claim]:
    """Whether it is better in each pair, and not only in the mean."""
    found = []
    for metric, what, each in (
        ("accuracy", "more accurate", pairs),
        ("forgetting", "less forgetful", [pair.swapped for pair in pairs]),
    ):
        verdicts = [decided(_gain([pair], metric)) for pair in each]
        better, worse = verdicts.count("holds"), verdicts.count("does not hold")
        verdict: Verdict = "does not hold" if worse else "holds" if verdicts and better == len(each) else "not decided"
        known = [value for pair in each if (value := pair.papers(metric)) is not None]
        found.append(
            Claim(
                f"The explicit step is consistently {what} than its penalty.",
                "it is in every pair, beyond the 95 % interval; it is not where one pair is surely the other way round",
                f"surely in {better} of {len(each)}, surely not in {worse}",
                f"in {sum(value > 0 for value in known)} of {len(known)} by its tables" if known else "",
                verdict,
            )
        )
    return found


def _long_streams(pairs: Sequence[Pair]) -> list[Claim]:
    """What the paper says of balanced classes and long tasks (CIFAR-100), and of the other data sets."""
    near = [pair for pair in pairs if pair.case.data == "cifar100"]
    far = [pair for pair in pairs if pair.case.data != "cifar100"]
    if not near:
        return []
    close = _gain(near, "accuracy")
    found = [
        Claim(
            "On cifar100 penalties are competitive with the explicit step.",
            f"mean difference in accuracy over {len(near)} pairs is below {CLOSE:g} points",
            _told(near, "accuracy"),
            _papers(near, "accuracy"),
            within(close, -math.inf, CLOSE),
        )
    ]
    if far:
        here, there = (gains(whole(_rows(some)), "accuracy") for some in (near, far))
        apart = [there[seed] - here[seed] for seed in here if seed in there]
        more = confidence_interval(apart) if apart else None
        found.append(
            Claim(
                "The explicit step gains most on unbalanced classes and long streams.",
                "its mean gain in accuracy on the other data sets minus that on cifar100 > 0",
                told(more),
                "",
                decided(more),
            )
        )
    return found


def _keeps_deep_layers(pairs: Sequence[Pair]) -> Claim:
    found = _gain(pairs, deep)
    return Claim(
        "The explicit step keeps the representations of deep layers, where its penalty does not.",
        f"mean difference in CKA of the deeper half of the layers over {len(pairs)} pairs, explicit minus penalty > 0",
        _told(pairs, deep, "+.4f"),
        "",
        decided(found),
    )


def _against_replay(rows: Rows) -> list[Claim]:
    """The explicit step against replay, which keeps old data."""
    pairs = _every_pair(rows, REPLAY, EXPLICIT)
    between = "replay minus explicit"
    return [
        _higher("The explicit step forgets less than replay.", pairs, "forgetting", between),
        _higher("Replay is more accurate than the explicit step.", pairs, "accuracy", between),
    ]


def _simple(rows: Rows) -> list[Claim]:
    """Penalties without an importance worth the name against those with one, and these against none at all."""
    pairs = _every_pair(rows, REGULARIZERS, ("uniform", "random"))
    plain = _every_pair(rows, ("plain",), REGULARIZERS)
    accurate = [pair.swapped for pair in pairs]
    return [
        _higher("Penalties forget less than plain fine-tuning.", plain, "forgetting", "plain minus penalty"),
        _higher(
            "The same importance everywhere, or a random one, forgets less than the popular definitions.",
            pairs,
            "forgetting",
            "importance minus uniform or random",
        ),
        _higher(
            "The same importance everywhere, or a random one, is more accurate than the popular definitions.",
            accurate,
            "accuracy",
            "uniform or random minus importance",
        ),
    ]


def _plain_against_ewc(rows: Rows, network: str) -> Claim:
    """The paper: since the search leads to a small learning rate for plain fine-tuning."""
    pairs = _pairs(rows, ("plain",), ("ewc",))
    verdicts = [decided(_gain([pair], "accuracy")) for pair in pairs]
    known = [value for pair in pairs if (value := pair.papers("accuracy")) is not None]
    held: Verdict = "holds" if "holds" in verdicts else "not decided" if "not decided" in verdicts else "does not hold"
    each = ", ".join(f"{pair.case.data} {told(_gain([pair], 'accuracy'))}" for pair in pairs)
    return Claim(
        f"With {network} plain fine-tuning can be more accurate than EWC.",
        "it is on a data set, beyond the 95 % interval",
        each or "neither was trained",
        f"on {sum(value > 0 for value in known)} of {len(known)}" if known else "",
        held if pairs else "not decided",
    )
