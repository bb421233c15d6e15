"""The tables of a section: cells with what they show and what they are sorted by."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooring.lab.model.metrics import Interval
from mooring.lab.model.results import Stability
from mooring.report.numbers import MISSING, bounds, count, fixed, general, given, points, printable
from mooring.report.section import Entry, Section

__all__ = ["Cell", "Column", "Strip", "Table", "Unfinished", "comparison", "stability", "unfinished"]


@dataclass(frozen=True)
class Column:
    """A column: its title, what it means, and whether it holds numbers."""

    title: str
    hint: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Strip:
    """An interval as a small drawing: where its ends and its mean lie, in percent of the width."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Cell:
    """What is shown, what it is sorted by (None: last, whichever way), and how it is set."""

    text: str
    sort: float | str | None = None
    note: str = ""
    strong: bool = False
    colour: str = ""
    strip: Strip | None = None


@dataclass(frozen=True)
class Table:
    """Columns and rows, and which column the rows come sorted by, falling; none where `sorted_by` is -1."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    sorted_by: int = -1


@dataclass(frozen=True)
class Unfinished:
    """A run that stopped: what, which seed, how, after how many tasks, and why."""

    label: str
    seed: int
    status: str
    tasks: int
    reason: str


def comparison(section: Section) -> Table:
    """Every setting with its metrics, best accuracy first."""
    columns = [
        Column("method", numeric=False),
        Column("strength", "factor of the penalty"),
        Column("lr", "learning rate"),
        Column("accuracy", "final accuracy, mean over tasks; mean ± standard deviation over seeds, %"),
        Column("95 % interval", "of the mean accuracy (Student's t); sorted by its lower end"),
        Column("forgetting", "best accuracy minus final accuracy, mean over tasks"),
        Column("learned", "accuracy on each task right after it was trained, %"),
        Column("backward", "backward transfer: what later tasks did to earlier ones"),
        Column("forward", "forward transfer: what earlier tasks did for later ones"),
        Column("seeds", "runs that finished"),
        Column("verdict", numeric=False),
    ]
    if section.baseline is not None:
        columns.insert(
            5, Column(f"vs {printable(section.baseline, 30)}", "accuracy minus the baseline's, seed by seed")
        )
    ends = [end for entry in section.entries for end in _ends(entry.row.metrics.get("accuracy"))]
    scale = (min(ends), max(ends)) if ends else (0.0, 1.0)
    ranked = sorted(section.entries, key=lambda entry: (math.isnan(entry.accuracy), -entry.accuracy))
    return Table(columns, [_compared(entry, section, scale) for entry in ranked], 3)


def stability(section: Section) -> Table | None:
    """How near each strength came to explosion; None where no run has a verdict."""
    columns = [
        Column("method", numeric=False),
        Column("strength"),
        Column("p, first task", "largest p of any parameter and seed, after the first task"),
        Column("p, last task", "largest p of any parameter and seed, after the last task reached"),
        Column("safe strength", "least over seeds: from here on a parameter would stop interpolating"),
        Column("free", "parameters with p = 0, mean over seeds"),
        Column("interpolate", "parameters with 0 < p < 1, mean over seeds"),
        Column("extrapolate", "parameters with p from 1 up to where they diverge, mean over seeds"),
        Column("diverge", "parameters beyond that or below 0, mean over seeds"),
        Column("negative", "those of the diverging below 0, mean over seeds"),
    ]
    judged = [entry for entry in section.entries if any(result.stability for result in entry.row.results)]
    return Table(columns, [_judged(entry) for entry in judged]) if judged else None


def unfinished(section: Section) -> list[Unfinished]:
    """Every run that was unstable or rejected, with its reason."""
    return [
        Unfinished(entry.label, run.spec.seed, run.status, len(run.matrix), printable(run.reason) or "no reason kept")
        for entry in section.entries
        for run in entry.row.unfinished
    ]


def _compared(entry: Entry, section: Section, scale: tuple[float, float]) -> list[Cell]:
    row = entry.row
    found = {name: row.metrics.get(name) for name in ("accuracy", "forgetting", "learned", "backward", "forward")}
    finished = len(row.results) - len(row.unfinished)
    others = [part for part in entry.detail.split(", ") if part and not part.startswith(("strength ", "lr "))]
    accuracy = found["accuracy"]
    low = None if accuracy is None or math.isnan(accuracy.low) else accuracy.low
    strip = None if low is None else _strip(accuracy, scale)
    cells = [
        Cell(entry.method, entry.method, note=", ".join(others), colour=entry.family.colour),
        _number(row.setting.strength, given(row.setting.strength)),
        _number(row.setting.lr, given(row.setting.lr)),
        _metric(accuracy),
        Cell("" if low is not None else MISSING, low, bounds(accuracy) if low is not None else "", strip=strip),
        *(_metric(found[name]) for name in ("forgetting", "learned", "backward", "forward")),
        Cell(f"{finished}" if finished == len(row.results) else f"{finished} of {len(row.results)}", finished),
        Cell(row.verdict or "finished", row.verdict or "finished", strong=bool(row.verdict)),
    ]
    if section.baseline is not None:
        cells.insert(5, _difference(row.difference, row.setting.method == section.baseline))
    return cells


def _difference(found: Interval | None, itself: bool) -> Cell:
    """In bold where the interval leaves no doubt about the sign."""
    if itself:
        return Cell("baseline", 0.0)
    if found is None or math.isnan(found.mean):
        return Cell(MISSING)
    sure = not math.isnan(found.low) and (found.low > 0 or found.high < 0)
    note = "" if math.isnan(found.low) else bounds(found)
    return Cell(points(found.mean), found.mean, note=note, strong=sure)


def _judged(entry: Entry) -> list[Cell]:
    found = [result.stability for result in entry.row.results if result.stability]
    first = max((entries[0].largest for entries in found), key=_number_first)
    last: list[Stability] = [entries[-1] for entries in found]
    largest = max((verdict.largest for verdict in last), key=_number_first)
    safe = min((verdict.safe_strength for verdict in last if not math.isnan(verdict.safe_strength)), default=math.nan)
    counts = [_mean(getattr(verdict, name) for verdict in last) for name in _COUNTS]
    strength = entry.row.setting.strength
    return [
        Cell(entry.method, entry.method, colour=entry.family.colour),
        _number(strength, given(strength)),
        _number(first, general(first), strong=first >= 1),
        _number(largest, general(largest), strong=largest >= 1),
        _number(safe, general(safe)),
        *(_number(value, count(value)) for value in counts),
    ]


_COUNTS = ("free", "interpolate", "extrapolate", "diverge", "negative")


def _metric(found: Interval | None) -> Cell:
    if found is None or math.isnan(found.mean):
        return Cell(MISSING)
    return Cell(fixed(found.mean), found.mean, note="" if math.isnan(found.std) else f"± {fixed(found.std)}")


def _number(value: float | None, text: str, strong: bool = False) -> Cell:
    return Cell(text, None if value is None or math.isnan(value) else value, strong=strong)


def _number_first(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _mean(values: Iterable[int]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _ends(found: Interval | None) -> list[float]:
    if found is None:
        return []
    return [value for value in (found.low, found.mean, found.high) if not math.isnan(value)]


def _strip(found: Interval | None, scale: tuple[float, float]) -> Strip | None:
    if found is None or not (ends := _ends(found)):
        return None
    width = scale[1] - scale[0] or 1.0
    low, mean, high = (round(100 * (value - scale[0]) / width, 2) for value in (ends[0], found.mean, ends[-1]))
    return Strip(low, mean, high)
