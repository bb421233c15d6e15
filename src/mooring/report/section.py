"""The runs of one stream, as the page and its figures need them."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import Row, summarize
from mooring.report.families import FAMILIES, Family, family_of
from mooring.report.numbers import given, printable

__all__ = ["Entry", "Section", "mean_over_seeds", "sections"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Entry:
    """A row of the study with what it is called in this section.

    Attributes:
        row: the runs of one setting.
        method: its name, fit to print.
        detail: what tells it from the other settings of its method, such as "strength 100"; empty where nothing does.
        family: what kind of method it is.
    """

    row: Row
    method: str
    detail: str
    family: Family

    @property
    def label(self) -> str:
        """The method and its detail, in short."""
        return f"{self.method} {self.detail.removeprefix('strength ')}".strip()

    @property
    def accuracy(self) -> float:
        """The mean over the seeds that finished; not a number where none did."""
        found = self.row.metrics.get("accuracy")
        return math.nan if found is None else found.mean

    @property
    def complete(self) -> bool:
        """Whether every seed finished with an accuracy."""
        return not self.row.unfinished and not math.isnan(self.accuracy)

    @property
    def contender(self) -> RunSpec:
        """The setting without what a study tunes, strength and learning rate: anything else makes another contender."""
        return replace(self.row.setting, strength=None, lr=1.0)

    def matrices(self, tasks: int) -> Array:
        """Accuracy matrices of shape (seeds, tasks, tasks); not a number where a run did not get or was not scored."""
        stacked = np.full((len(self.row.results), tasks, tasks), np.nan)
        for run, result in zip(stacked, self.row.results, strict=True):
            for line, reached in zip(run, result.matrix, strict=False):
                line[: len(reached)] = reached[:tasks]
        return stacked


@dataclass(frozen=True)
class Section:
    """One stream.

    Attributes:
        stream: what it is called, fit to print.
        slug: the same, fit for file names and addresses, unlike any other section's.
        tasks: how many tasks it has.
        baseline: the method that accuracy is compared with, or None.
        entries: every setting, in the order of their first run.
        shown: the best setting of each method, by family: what figures with a panel or line per method show.
    """

    stream: str
    slug: str
    tasks: int
    baseline: str | None
    entries: tuple[Entry, ...]
    shown: tuple[Entry, ...]

    @property
    def results(self) -> list[Result]:
        """Every run."""
        return [result for entry in self.entries for result in entry.row.results]

    @property
    def families(self) -> list[Family]:
        """Those that have a method here, in their order."""
        present = {entry.family for entry in self.entries}
        return [family for family in FAMILIES if family in present]

    def name(self, entry: Entry) -> str:
        """What a figure calls one of those shown: the method alone where that says it all."""
        return entry.label if sum(other.method == entry.method for other in self.shown) > 1 else entry.method

    @property
    def at_best(self) -> str:
        """For captions: says so where methods were run with several settings and only one is shown."""
        return "" if len(self.shown) == len(self.entries) else ", each method at its best setting"


def sections(results: Iterable[Result], baseline: str | None) -> list[Section]:
    """One section for each stream, in the order of their first run."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in summarize(results, baseline):
        groups.setdefault((row.setting.stream, row.setting.data), []).append(row)
    slugs: list[str] = []
    for stream, _ in groups:
        slugs.append(slug(stream, slugs))
    return [
        _section(stream, slug, rows, baseline) for ((stream, _), rows), slug in zip(groups.items(), slugs, strict=True)
    ]


def mean_over_seeds(values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation (n - 1) over the first axis, of the numbers there are.

    The mean is not a number where none is; the deviation is 0 for a single one.

    Example:
        >>> mean, std = mean_over_seeds(np.array([[1.0, np.nan], [3.0, 5.0]]))
        >>> mean.tolist(), std.round(3).tolist()
        ([2.0, 5.0], [1.414, 0.0])
    """
    there = np.isfinite(values)
    number = there.sum(0)
    mean = np.where(there, values, 0.0).sum(0) / np.maximum(number, 1)
    square = (np.where(there, values - mean, 0.0) ** 2).sum(0)
    return np.where(number > 0, mean, np.nan), np.sqrt(square / np.maximum(number - 1, 1))


def _section(stream: str, slug: str, rows: Sequence[Row], baseline: str | None) -> Section:
    details = _details([row.setting for row in rows])
    entries = tuple(
        Entry(row, printable(row.setting.method, 60), detail, family_of(row.setting.method))
        for row, detail in zip(rows, details, strict=True)
    )
    tasks = max(len(result.untrained) for row in rows for result in row.results)
    contenders: dict[RunSpec, list[Entry]] = {}
    for entry in entries:
        contenders.setdefault(entry.contender, []).append(entry)
    best = [max(group, key=_rank) for group in contenders.values()]
    shown = tuple(sorted(best, key=lambda entry: FAMILIES.index(entry.family)))
    return Section(printable(stream, 120), slug, tasks, baseline, entries, shown)


def _rank(entry: Entry) -> tuple[bool, float]:
    """Complete ones first: the mean over survivors of an unstable setting is no match for them."""
    return entry.complete, -math.inf if math.isnan(entry.accuracy) else entry.accuracy


def _details(settings: Sequence[RunSpec]) -> list[str]:
    """The strength where there is one, then every other field in which settings of the same method differ."""
    shared = ("stream", "data", "method", "strength", "seed")
    names = [field.name for field in fields(RunSpec) if field.name not in shared]
    rivals: dict[tuple[str, float | None], list[RunSpec]] = {}
    for setting in settings:
        rivals.setdefault((setting.method, setting.strength), []).append(setting)
    differing = {
        key: [name for name in names if len({getattr(other, name) for other in some}) > 1]
        for key, some in rivals.items()
    }
    told = []
    for setting in settings:
        parts = [] if setting.strength is None else [f"strength {given(setting.strength)}"]
        for name in differing[setting.method, setting.strength]:
            value = getattr(setting, name)
            written = given(value) if isinstance(value, float) else str(value)
            parts.append(f"{name.replace('_', ' ')} {printable(written, 40) or 'none'}")
        told.append(", ".join(parts))
    return told


def slug(stream: str, taken: Sequence[str]) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", stream.lower()).strip("-")[:40].strip("-") or "stream"
    slug, number = plain, 2
    while slug in taken:
        slug, number = f"{plain}-{number}", number + 1
    return slug
