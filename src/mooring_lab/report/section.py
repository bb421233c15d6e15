"""The runs of one stream, arranged for the page and its figures."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row, summarize
from mooring_lab.report.families import FAMILIES, Family, family_of
from mooring_lab.report.numbers import given, printable

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Entry:
    """A row of the study and its names in this section.

    Attributes:
        row: the runs of one setting.
        method: the name of the method, printable.
        detail: how it differs from other settings of its method, such as "strength 100"; empty if it is the only one.
        family: the family of the method.
    """

    row: Row
    method: str
    detail: str
    family: Family

    @property
    def label(self) -> str:
        """The method and its detail, shortened."""
        return f"{self.method} {self.detail.removeprefix('strength ')}".strip()

    @property
    def accuracy(self) -> float:
        """The mean accuracy over the seeds that finished; NaN if none did."""
        accuracy = self.row.metrics.get("accuracy")
        return math.nan if accuracy is None else accuracy.mean

    @property
    def complete(self) -> bool:
        """Whether every seed finished with an accuracy."""
        return not self.row.unfinished and not math.isnan(self.accuracy)

    @property
    def contender(self) -> RunSpec:
        """The setting without strength and learning rate; of several entries with one contender the best is shown."""
        return replace(self.row.setting, strength=None, lr=1.0)

    def matrices(self, tasks: int) -> Array:
        """Return accuracy matrices of shape (seeds, tasks, tasks), NaN where a run was not scored."""
        stacked = np.full((len(self.row.results), tasks, tasks), np.nan)
        for run, result in zip(stacked, self.row.results, strict=True):
            for line, reached in zip(run, result.matrix, strict=False):
                line[: len(reached)] = reached[:tasks]
        return stacked


@dataclass(frozen=True)
class Section:
    """The part of the page about one stream.

    Attributes:
        stream: the name of the stream and its scenario, printable.
        slug: its name in file names and links, unique in the page.
        tasks: the number of tasks.
        baseline: the method that accuracy is compared with, or None.
        entries: every setting, in the order of their first run.
        shown: the best setting of each method, sorted by family, for figures with a panel or a line per method.
    """

    stream: str
    slug: str
    tasks: int
    baseline: str | None
    entries: tuple[Entry, ...]
    shown: tuple[Entry, ...]

    @property
    def results(self) -> list[Result]:
        """All runs."""
        return [result for entry in self.entries for result in entry.row.results]

    @property
    def families(self) -> list[Family]:
        """The families that have a method here, in their order."""
        present = {entry.family for entry in self.entries}
        return [family for family in FAMILIES if family in present]

    def name(self, entry: Entry) -> str:
        """Return the name of a shown entry in figures: the method, with its detail if the method is shown twice."""
        return entry.label if sum(other.method == entry.method for other in self.shown) > 1 else entry.method

    @property
    def at_best(self) -> str:
        """A clause for captions if only one of several settings of a method is shown."""
        return "" if len(self.shown) == len(self.entries) else ", each method at its most accurate setting"


def sections(results: Iterable[Result], baseline: str | None) -> list[Section]:
    """Return a section for each stream, in the order of their first run."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in summarize(results, baseline):
        groups.setdefault((row.setting.stream, row.setting.data), []).append(row)
    slugs: list[str] = []
    for stream, _ in groups:
        slugs.append(slug(stream, slugs))
    named = zip(slugs, groups.items(), strict=True)
    return [_section(rows[0].stream, slug, rows, baseline) for slug, (_, rows) in named]


def mean_over_seeds(values: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation (n - 1) of the finite values over the first axis.

    Without a finite value the mean is NaN; with a single one the deviation is 0.

    Example:
        >>> mean, std = mean_over_seeds(np.array([[1.0, np.nan], [3.0, 5.0]]))
        >>> mean.tolist(), std.round(3).tolist()
        ([2.0, 5.0], [1.414, 0.0])
    """
    finite = np.isfinite(values)
    number = finite.sum(0)
    mean = np.where(finite, values, 0.0).sum(0) / np.maximum(number, 1)
    square = (np.where(finite, values - mean, 0.0) ** 2).sum(0)
    return np.where(number > 0, mean, np.nan), np.sqrt(square / np.maximum(number - 1, 1))


def _section(stream: str, slug: str, rows: Sequence[Row], baseline: str | None) -> Section:
    details = _details([row.setting for row in rows])
    entries = tuple(
        Entry(row, printable(row.name, 60), detail, family_of(row.setting.method))
        for row, detail in zip(rows, details, strict=True)
    )
    tasks = max(len(result.untrained) for row in rows for result in row.results)
    contenders: dict[RunSpec, list[Entry]] = {}
    for entry in entries:
        contenders.setdefault(entry.contender, []).append(entry)
    # Complete settings come first: a mean over the seeds that survived is not comparable.
    best = [
        max(group, key=lambda entry: (entry.complete, -math.inf if math.isnan(entry.accuracy) else entry.accuracy))
        for group in contenders.values()
    ]
    shown = tuple(sorted(best, key=lambda entry: FAMILIES.index(entry.family)))
    return Section(printable(stream, 120), slug, tasks, baseline, entries, shown)


def _details(settings: Sequence[RunSpec]) -> list[str]:
    """Return for each setting its strength, then the other fields in which settings of its method differ."""
    shared = ("stream", "data", "method", "strength", "seed")
    names = [field.name for field in fields(RunSpec) if field.name not in shared]
    rivals: dict[tuple[str, float | None], list[RunSpec]] = {}
    for setting in settings:
        rivals.setdefault((setting.method, setting.strength), []).append(setting)
    differing = {
        key: [name for name in names if len({getattr(other, name) for other in group}) > 1]
        for key, group in rivals.items()
    }
    details = []
    for setting in settings:
        parts = [] if setting.strength is None else [f"strength {given(setting.strength)}"]
        for name in differing[setting.method, setting.strength]:
            value = getattr(setting, name)
            text = given(value) if isinstance(value, float) else str(value)
            parts.append(f"{name.replace('_', ' ')} {printable(text, 40) or 'none'}")
        details.append(", ".join(parts))
    return details


def slug(stream: str, taken: Sequence[str]) -> str:
    """Return a name for files and links that is not taken yet.

    Example:
        >>> slug("CIFAR-100, rotated", ["digits"]), slug("digits", ["digits"])
        ('cifar-100-rotated', 'digits-2')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", stream.lower()).strip("-")[:40].strip("-") or "stream"
    slug, number = plain, 2
    while slug in taken:
        slug, number = f"{plain}-{number}", number + 1
    return slug
