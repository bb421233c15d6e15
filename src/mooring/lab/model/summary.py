"""Summary tables: one row per method and setting, with metrics over the seeds."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from mooring.errors import MooringError
from mooring.lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import METRICS, SIGNED_METRICS, Result
from mooring.lab.model.spec import FIELD_NAMES, RunSpec


@dataclass(frozen=True, repr=False)
class Row:
    """The results of runs that differ only in their seed.

    Attributes:
        setting: the specification that they share; its seed is always 0.
        results: one result per seed, in order.
        metrics: an interval for each metric over the finished runs, within 0 to 100 % (backward and forward transfer:
            -100 to 100); empty if none finished.
        difference: accuracy minus the baseline's, paired by seed; None without a baseline or common seeds.
    """

    setting: RunSpec
    results: tuple[Result, ...]
    metrics: dict[str, Interval]
    difference: Interval | None

    def __repr__(self) -> str:
        """Return the row in one line; `results` has the rest."""
        accuracy, forgetting = (self.metrics.get(name) for name in ("accuracy", "forgetting"))
        scores = f"accuracy {accuracy} %, forgetting {forgetting}, " if self.metrics else ""
        runs = ", ".join(filter(None, [pluralize(len(self.results), "seed"), self.verdict]))
        return f"<Row {self.label} on {self.setting.stream}: {scores}{runs}>"

    @property
    def label(self) -> str:
        """The method's name, without the hash of an imported one, followed by its strength if it has one."""
        name, strength = self.setting.method.partition("@")[0], self.setting.strength
        return name if strength is None else f"{name} {strength:g}"

    @property
    def unfinished(self) -> tuple[Result, ...]:
        """The runs that were unstable or rejected."""
        return tuple(result for result in self.results if result.status != "finished")

    @property
    def verdict(self) -> str:
        """How many runs were unstable or rejected, such as "unstable in 2 of 5"; empty if all finished."""
        counts: Counter[str] = Counter(result.status for result in self.results)
        statuses = [status for status in ("unstable", "rejected") if counts[status]]
        return ", ".join(f"{status} in {counts[status]} of {len(self.results)}" for status in statuses)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serializable values."""
        setting = self.setting.to_json()
        del setting["seed"]
        return {
            **setting,
            "seeds": [result.spec.seed for result in self.results],
            "verdict": self.verdict,
            "metrics": {name: _interval_to_json(value) for name, value in self.metrics.items()},
            "difference": None if self.difference is None else _interval_to_json(self.difference),
        }


_setting = attrgetter(*(name for name in FIELD_NAMES if name != "seed"))
"""Return what the runs of a row have in common."""


def summarize(results: Iterable[Result], baseline: str | None = None) -> list[Row]:
    """Return one row per setting, in the order of the settings' first runs.

    Args:
        results: the results, in any order.
        baseline: the method to compare accuracy with, paired by seed. Its most accurate setting is taken among those
            with the same stream, network, training and dtype.

    Example:
        >>> specs = [RunSpec("digits", "0", "plain", seed) for seed in (0, 1)]
        >>> results = [Result(spec, "finished", "", [10.0], [[90.0 + spec.seed]]) for spec in specs]
        >>> summarize(results)[0].metrics["accuracy"].mean
        90.5
    """
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(_setting(result.spec), []).append(result)
    rows = [_row(sorted(group, key=lambda result: result.spec.seed)) for group in groups.values()]
    if baseline is None:
        return rows
    if not any(row.setting.method == baseline for row in rows):
        methods = ", ".join(dict.fromkeys(row.setting.method for row in rows))
        raise MooringError(
            f"the baseline {baseline!r} is not among the runs: they are of {methods}; give one of them, or run it too: "
            "add it to --methods"
        )
    best: dict[RunSpec, Row] = {}
    for row in rows:
        if row.setting.method == baseline and row.metrics:
            known = best.get(_without_method(row.setting))
            if known is None or row.metrics["accuracy"].mean > known.metrics["accuracy"].mean:
                best[_without_method(row.setting)] = row
    return [replace(row, difference=_difference(row, best.get(_without_method(row.setting)))) for row in rows]


def _without_method(setting: RunSpec) -> RunSpec:
    """Return what two rows must share to be compared: everything but the method and its own settings."""
    return replace(setting, method="", lr=1.0, strength=None, memory=None)


def _row(results: Sequence[Result]) -> Row:
    finished = [result.metrics for result in results if result.status == "finished"]
    intervals = {name: _interval(name, [metrics[name] for metrics in finished]) for name in METRICS if finished}
    return Row(replace(results[0].spec, seed=0), tuple(results), intervals, None)


def _interval(metric: str, values: Sequence[float]) -> Interval:
    """Return the interval of a metric, cut at the values that it can have."""
    return confidence_interval(values).within(-100 if metric in SIGNED_METRICS else 0, 100)


def _difference(row: Row, base: Row | None) -> Interval | None:
    by_seed = {result.spec.seed: result for result in base.results if result.status == "finished"} if base else {}
    common = [result for result in row.results if result.status == "finished" and result.spec.seed in by_seed]
    if not common:
        return None
    return paired_difference(
        [result.metrics["accuracy"] for result in common],
        [by_seed[result.spec.seed].metrics["accuracy"] for result in common],
    )


def _interval_to_json(interval: Interval) -> dict[str, float | int | None]:
    """Return the interval's numbers, with None for NaN, which JSON lacks."""
    return {name: None if number != number else number for name, number in asdict(interval).items()}
