"""A study in a table: one row for each method at each setting, over its seeds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from mooring.errors import MooringError
from mooring.lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["METRICS", "Row", "summarize"]

METRICS = ("accuracy", "forgetting", "learned", "backward", "forward")


@dataclass(frozen=True)
class Row:
    """Runs that differ in nothing but their seed.

    Attributes:
        setting: what they share; its seed means nothing.
        results: one for each seed, in order.
        metrics: an interval for each metric over the seeds that finished; empty where none did.
        difference: accuracy minus the baseline's, seed by seed; None without a baseline or common seeds.
    """

    setting: RunSpec
    results: tuple[Result, ...]
    metrics: dict[str, Interval]
    difference: Interval | None

    @property
    def label(self) -> str:
        """The method, with its strength where it has one."""
        strength = self.setting.strength
        return self.setting.method if strength is None else f"{self.setting.method} {strength:g}"

    @property
    def unfinished(self) -> tuple[Result, ...]:
        """The runs that were unstable or rejected."""
        return tuple(result for result in self.results if result.status != "finished")

    @property
    def verdict(self) -> str:
        """How stable it was: "" where there is nothing to say, else such as "unstable in 2 of 5"."""
        told = []
        for status in ("unstable", "rejected"):
            count = sum(result.status == status for result in self.results)
            if count:
                told.append(f"{status} in {count} of {len(self.results)}")
        return ", ".join(told)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        shown = self.setting.to_json()
        del shown["seed"]
        return {
            **shown,
            "seeds": [result.spec.seed for result in self.results],
            "verdict": self.verdict,
            "metrics": {name: _told(value) for name, value in self.metrics.items()},
            "difference": None if self.difference is None else _told(self.difference),
        }


_setting = attrgetter(*(field.name for field in fields(RunSpec) if field.name != "seed"))
"""What the runs of a row have in common."""


def summarize(results: Iterable[Result], baseline: str | None = None) -> list[Row]:
    """One row for each setting, in the order of their first run.

    Args:
        results: runs, in any order.
        baseline: a method to compare accuracy with, seed by seed, where all else is the same; at its best setting.

    Example:
        >>> specs = [RunSpec("digits", "0", "plain", seed) for seed in (0, 1)]
        >>> made = [Result(spec, "finished", "", [10.0], [[90.0 + spec.seed]]) for spec in specs]
        >>> summarize(made)[0].metrics["accuracy"].mean
        90.5
    """
    alike: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        alike.setdefault(_setting(result.spec), []).append(result)
    groups = {replace(group[0].spec, seed=0): group for group in alike.values()}
    for group in groups.values():
        group.sort(key=lambda result: result.spec.seed)
    rows = [_row(setting, group) for setting, group in groups.items()]
    if baseline is None:
        return rows
    if not any(row.setting.method == baseline for row in rows):
        methods = ", ".join(dict.fromkeys(setting.method for setting in groups))
        among = f"the baseline {baseline!r} is not among the runs: they are of {methods}"
        raise MooringError(f"{among}; give one of them, or run it too: add it to --methods")
    best: dict[RunSpec, Row] = {}
    for row in rows:
        if row.setting.method == baseline and row.metrics:
            known = best.get(_circumstances(row.setting))
            if known is None or row.metrics["accuracy"].mean > known.metrics["accuracy"].mean:
                best[_circumstances(row.setting)] = row
    return [replace(row, difference=_difference(row, best.get(_circumstances(row.setting)))) for row in rows]


def _circumstances(setting: RunSpec) -> RunSpec:
    """What two rows share that can be compared: all but the method and its own dials."""
    return replace(setting, method="", lr=1.0, strength=None, memory=None)


def _row(setting: RunSpec, group: Sequence[Result]) -> Row:
    found = [result.metrics for result in group if result.status == "finished"]
    intervals = {name: confidence_interval([values[name] for values in found]) for name in METRICS} if found else {}
    return Row(setting, tuple(group), intervals, None)


def _difference(row: Row, base: Row | None) -> Interval | None:
    theirs = {result.spec.seed: result for result in base.results if result.status == "finished"} if base else {}
    common = [result for result in row.results if result.status == "finished" and result.spec.seed in theirs]
    if not common:
        return None
    return paired_difference(
        [result.metrics["accuracy"] for result in common],
        [theirs[result.spec.seed].metrics["accuracy"] for result in common],
    )


def _told(value: Interval) -> dict[str, float | int | None]:
    """Without what is not a number, which JSON has no word for."""
    shown = {"mean": value.mean, "std": value.std, "low": value.low, "high": value.high}
    return {**{name: None if number != number else number for name, number in shown.items()}, "count": value.count}
