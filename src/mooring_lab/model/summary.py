"""Summary tables: one row per method and setting, with metrics over the seeds."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from mooring.errors import MooringError
from mooring_lab.model.method_versions import names_in_table, without_version
from mooring_lab.model.metric_definitions import DEFINITIONS
from mooring_lab.model.metrics import Interval, confidence_interval, intransigence, paired_difference
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import METRICS, Result
from mooring_lab.model.scenarios import scenario_title
from mooring_lab.model.spec import FIELD_NAMES, RunSpec


@dataclass(frozen=True, repr=False)
class Row:
    """The results of runs that differ only in their seed.

    Attributes:
        setting: the specification that they share; its seed is always 0.
        results: one result per seed, in order.
        metrics: an interval for each metric that is defined, over the finished runs, within 0 to 100 %, or -100 to 100
            for those that have a sign; empty if none finished.
        difference: accuracy minus the baseline's, paired by seed, within -100 to 100; None without a baseline or
            common seeds.
        name: the method's name; that of an imported one has its hash only if another version has a row on the stream.
    """

    setting: RunSpec
    results: tuple[Result, ...]
    metrics: dict[str, Interval]
    difference: Interval | None
    name: str

    def __repr__(self) -> str:
        """Return the row in one line; `results` has the rest."""
        titles = {"accuracy": ("accuracy", " %"), "forgetting": (DEFINITIONS["forgetting"].title, "")}
        shown = ((titles[name], value) for name, value in self.metrics.items() if name in titles)
        scores = "".join(f"{title} {value}{unit}, " for (title, unit), value in shown)
        runs = ", ".join(filter(None, [pluralize(len(self.results), "seed"), self.verdict]))
        return f"<Row {self.label} on {self.stream}: {scores}{runs}>"

    @property
    def label(self) -> str:
        """The method's name, followed by its strength if it has one."""
        strength = self.setting.strength
        return self.name if strength is None else f"{self.name} {strength:g}"

    @property
    def scenario(self) -> str:
        """The scenario of the runs: "task", "class" or "domain"."""
        return self.results[0].scenario

    @property
    def stream(self) -> str:
        """The name of the stream and its scenario, as tables show them."""
        return f"{self.setting.stream}, {scenario_title(self.scenario)}"

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
            "scenario": self.scenario,
            "seeds": [result.spec.seed for result in self.results],
            "verdict": self.verdict,
            "metrics": {name: _interval_to_json(value) for name, value in self.metrics.items()},
            "difference": None if self.difference is None else _interval_to_json(self.difference),
        }

    def to_record(self) -> dict[str, Any]:
        """Return flat values for one line of a CSV file, with the same names for every row.

        A metric has a mean, a standard deviation and the ends of its interval; None where it is not defined.
        """
        record: dict[str, Any] = {"stream": self.setting.stream, "scenario": self.scenario}
        record |= {name: getattr(self.setting, name) for name in FIELD_NAMES if name != "seed"}
        record |= {"seeds": len(self.results), "finished": len(self.results) - len(self.unfinished)}
        for name, interval in {**dict.fromkeys(DEFINITIONS), **self.metrics, "difference": self.difference}.items():
            record |= {f"{name} {part}": getattr(interval, part, None) for part in ("mean", "std", "low", "high")}
        return record


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
    rows = _with_intransigence(_with_versions(rows))
    if baseline is None:
        return rows
    if not any(row.setting.method == baseline for row in rows):
        methods = ", ".join(dict.fromkeys(row.setting.method for row in rows))
        raise MooringError(
            f"the baseline {baseline!r} is not among the runs: they are of {methods}; give one of them, or run it too: "
            "add it to --methods"
        )
    best = _most_accurate([row for row in rows if row.setting.method == baseline])
    return [replace(row, difference=_difference(row, best.get(_without_method(row.setting)))) for row in rows]


def _with_versions(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, with the hash in the name of each method that has several versions on a stream."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        methods.setdefault(row.stream, []).append(row.setting.method)
    names = {stream: names_in_table(used) for stream, used in methods.items()}
    return [replace(row, name=names[row.stream][row.setting.method]) for row in rows]


def _with_intransigence(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their intransigence, where joint training has a finished run with the same seed."""
    joint = _most_accurate([row for row in rows if row.results[0].is_joint])
    with_metric = []
    for row in rows:
        pairs = [] if row.results[0].is_joint else _paired(row, joint.get(_without_method(row.setting)))
        values = [intransigence(ours.accuracies, theirs.joint or theirs.matrix[-1]) for ours, theirs in pairs]
        interval = {"intransigence": _interval("intransigence", values)} if values else {}
        with_metric.append(replace(row, metrics={**row.metrics, **interval}))
    return with_metric


def _most_accurate(rows: Iterable[Row]) -> dict[RunSpec, Row]:
    """Return the most accurate row of each group of rows that may be compared."""
    best: dict[RunSpec, Row] = {}
    for row in (row for row in rows if row.metrics):
        known = best.get(_without_method(row.setting))
        if known is None or row.metrics["accuracy"].mean > known.metrics["accuracy"].mean:
            best[_without_method(row.setting)] = row
    return best


def _without_method(setting: RunSpec) -> RunSpec:
    """Return what two rows must share to be compared: everything but the method and its own settings.

    Buffers are one of these: methods without an importance, such as plain and joint, always follow the data.
    """
    return replace(setting, method="", lr=1.0, strength=None, memory=None, buffers="follow")


def _row(results: Sequence[Result]) -> Row:
    finished = [result.metrics for result in results if result.status == "finished"]
    defined = [name for name in METRICS if finished and finished[0][name] == finished[0][name]]
    intervals = {name: _interval(name, [metrics[name] for metrics in finished]) for name in defined}
    spec = results[0].spec
    return Row(replace(spec, seed=0), tuple(results), intervals, None, without_version(spec.method))


def _interval(metric: str, values: Sequence[float]) -> Interval:
    """Return the interval of a metric, cut at the values that it can have."""
    return confidence_interval(values).within(-100 if DEFINITIONS[metric].signed else 0, 100)


def _difference(row: Row, base: Row | None) -> Interval | None:
    pairs = _paired(row, base)
    if not pairs:
        return None
    ours, theirs = ([result.metrics["accuracy"] for result in side] for side in zip(*pairs, strict=True))
    return paired_difference(ours, theirs).within(-100, 100)


def _paired(row: Row, other: Row | None) -> list[tuple[Result, Result]]:
    """Return the finished runs of a row, each with the finished run of another row that has the same seed."""
    finished = {result.spec.seed: result for result in other.results if result.status == "finished"} if other else {}
    own = (result for result in row.results if result.status == "finished" and result.spec.seed in finished)
    return [(result, finished[result.spec.seed]) for result in own]


def _interval_to_json(interval: Interval) -> dict[str, float | int | None]:
    """Return the interval's numbers, with None for NaN, which JSON lacks."""
    return {name: None if number != number else number for name, number in asdict(interval).items()}
