"""What the default has to hold in the gauntlet, computed from rows, for all cells and for each level of each factor."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gauntlet_problems.problem_set import PROBLEMS

from gauntlet_runs.covering_design import FACTORS, GauntletCell

Row = dict[str, Any]

PEER_SHARE = 0.95
"""Below this part of what the best peer learns, a cell is lost."""

POINTS = 0.10
"""A cell that is lost by more than this needs a warning."""

MEASURED = ("learned", "kept", "final", "held_out", "seconds")


@dataclass(frozen=True)
class CellResult:
    """A cell, with the means over seeds of the rows of each method.

    Attributes:
        cell: the cell.
        methods: the means of what was measured, by method.
        warned: whether the end of every seed's run of the default that lost by more than ten points has a warning.
        gauge: the largest value on the gauge over the seeds of the default, over the budget.
        budget: in nats.
        end: the seconds at the end of the default's tasks, in steps of plain training.
    """

    cell: GauntletCell
    methods: dict[str, dict[str, float]]
    warned: bool
    gauge: float
    budget: float
    end: float

    @property
    def default(self) -> dict[str, float]:
        """What the default reached."""
        return self.methods["mooring"]

    @property
    def plain(self) -> float:
        """What plain training learned."""
        return self.methods["plain"]["learned"]

    def best_peer(self, most_nats: float) -> tuple[float, str]:
        """Return what the best weight of KL by hand learns with so much held-out KL at most, and its name."""
        peers = [(m["learned"], name) for name, m in self.by_hand.items() if m["held_out"] <= most_nats]
        return max(peers, default=(0.0, "none"))

    @property
    def by_hand(self) -> dict[str, dict[str, float]]:
        """The rows of KL by hand, by method."""
        return {name: measured for name, measured in self.methods.items() if name.startswith("kl ")}

    @property
    def is_below_peer(self) -> bool:
        """Whether the default learns less than 95 % of the best peer that forgets as little."""
        return self.default["learned"] < PEER_SHARE * self.best_peer(self.default["held_out"])[0]

    @property
    def is_below_peer_in_silence(self) -> bool:
        """Whether the default learns ten points less than that peer, without a warning."""
        return self.default["learned"] < self.best_peer(self.default["held_out"])[0] - POINTS and not self.warned

    @property
    def is_given_up(self) -> bool:
        """Whether the default learns less than 80 % of plain, while a peer within the budget learns 90 %."""
        return self.default["learned"] < 0.8 * self.plain and self.best_peer(self.budget)[0] >= 0.9 * self.plain

    @property
    def forgets_more(self) -> bool:
        """Whether held-out KL is above 1.5 times the budget."""
        return self.default["held_out"] > 1.5 * self.budget

    @property
    def is_above_gauge(self) -> bool:
        """Whether a run ended above the budget on the gauge."""
        return self.gauge > 1 + 1e-6

    def share(self, method: str) -> float:
        """Return which part of what plain learns a method learns; 0 if it forgets more than 1.5 times the budget."""
        measured = self.methods[method]
        return 0.0 if measured["held_out"] > 1.5 * self.budget else measured["learned"] / max(self.plain, 1e-9)


CRITERIA: dict[str, Callable[[CellResult], bool]] = {
    "below peer": lambda result: result.is_below_peer,
    "silent": lambda result: result.is_below_peer_in_silence,
    "given up": lambda result: result.is_given_up,
    "held out": lambda result: result.forgets_more,
    "gauge": lambda result: result.is_above_gauge,
}
"""What is counted, by a short name."""

ALLOWED = {"below peer": 0.02, "silent": 0.0, "given up": 0.0, "held out": 0.05, "gauge": 0.0}
"""The largest part of cells in which each of these may be."""


def results_of(cells: Sequence[GauntletCell], rows: Sequence[Row]) -> list[CellResult]:
    """Return the results of the cells that have rows of the default, of plain training and of KL by hand."""
    by_cell: dict[str, list[Row]] = {}
    for row in rows:
        by_cell.setdefault(row["cell"], []).append(row)
    results = []
    for cell in cells:
        own = by_cell.get(cell.text, [])
        defaults = [row for row in own if row["method"] == "mooring"]
        if not defaults:
            continue
        seeds = {row["seed"] for row in defaults}
        names = dict.fromkeys(row["method"] for row in own)
        methods = {}
        for name in names:
            of_method = [row for row in own if row["method"] == name and row["seed"] in seeds]
            if {row["seed"] for row in of_method} == seeds:
                methods[name] = {key: statistics.fmean(row[key] for row in of_method) for key in MEASURED}
        if "plain" not in methods or not any(name.startswith("kl ") for name in methods):
            continue
        gauge = max(row["gauge"] if row["gauge"] is not None else 0.0 for row in defaults) / defaults[0]["budget"]
        step = methods["plain"]["seconds"] / (cell.length * cell.tasks)
        end = statistics.fmean(row["seconds_at_end"] for row in defaults) / cell.tasks / max(step, 1e-9)
        result = CellResult(cell, methods, False, gauge, defaults[0]["budget"], end)
        limit = result.best_peer(result.default["held_out"])[0] - POINTS
        far = [row for row in defaults if row["learned"] < limit]
        warned = bool(far) and all(row["warnings_at_end"] or row["failed"] for row in far)
        results.append(replace(result, warned=warned))
    return results


def summary(results: Sequence[CellResult]) -> str:
    """Return the criteria, the means of all methods, the criteria for each level, and the lost cells, as text."""
    if not results:
        return "no cell has rows of mooring, plain and KL by hand yet"
    return "\n\n".join([_criteria(results), _methods(results), _levels(results), _lost(results)])


def page_table(parts: dict[str, Sequence[CellResult]]) -> str:
    """Return the criteria of several parts of the rows as a Markdown table, one column for each part."""
    rows = [["", *parts], ["---"] * (len(parts) + 1)]
    rows.append(["cells", *(str(len(results)) for results in parts.values())])
    names = {
        "below peer": "learns less than 95 % of the best KL by hand with as little held-out KL",
        "silent": "learns 10 points less than that, without a warning",
        "given up": "learns less than 80 % of plain, while KL by hand within the budget learns 90 %",
        "held out": "held-out KL above 1.5 budgets",
        "gauge": "above the budget on the gauge",
    }
    for name, text in names.items():
        rows.append([text, *(str(sum(map(CRITERIA[name], results))) for results in parts.values())])
    rows.append(["share of plain's learning, 0 above 1.5 budgets"])
    rows[-1] += [f"{_mean_share(results, 'mooring'):.2f}" for results in parts.values()]
    rows.append(["the same, KL by hand at its best single weight"])
    for results in parts.values():
        best, name = max((_mean_share(results, name), name) for name in _common(results) if name.startswith("kl "))
        rows[-1].append(f"{best:.2f} ({name.removeprefix('kl ')})")
    rows.append(["the end of a task, plain steps, median"])
    rows[-1] += [f"{statistics.median(result.end for result in results):.0f}" for results in parts.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _criteria(results: Sequence[CellResult]) -> str:
    texts = {
        "below peer": "below 95 % of the best KL by hand with the same or less held-out KL",
        "silent": "more than 10 points below it without a warning at the end",
        "given up": "below 80 % of plain while a KL by hand within the budget learns 90 %",
        "held out": "held-out KL above 1.5 budgets",
        "gauge": "above the budget on the gauge",
    }
    lines = [f"{len(results)} cells"]
    for name, counts in CRITERIA.items():
        number = sum(map(counts, results))
        holds = "holds" if number <= ALLOWED[name] * len(results) else "FAILS"
        lines.append(
            f"{holds}  {name:10s} {number:4d} cells, {100 * number / len(results):5.1f} % "
            f"(at most {100 * ALLOWED[name]:g} %): {texts[name]}"
        )
    own = _mean_share(results, "mooring")
    best, name = max((_mean_share(results, name), name) for name in _common(results) if name.startswith("kl "))
    holds = "holds" if own > best else "FAILS"
    lines.append(f"{holds}  share      {own:.3f} of plain's learning within 1.5 budgets; {name} has {best:.3f}")
    ends = sorted(result.end for result in results)
    lines.append(
        f"the end of a task takes {statistics.median(ends):.0f} plain steps in the median cell, {ends[-1]:.0f} at most"
    )
    return "\n".join(lines)


def _methods(results: Sequence[CellResult]) -> str:
    lines = [f"{'method':10s} share  within  learned    kept   final  median KL  over budget   seconds"]
    for name in _common(results):
        rows = [result.methods[name] for result in results]
        within = statistics.fmean(result.methods[name]["held_out"] <= 1.5 * result.budget for result in results)
        over = statistics.median(result.methods[name]["held_out"] / result.budget for result in results)
        means = [100 * statistics.fmean(row[key] for row in rows) for key in ("learned", "kept", "final")]
        nats = statistics.median(row["held_out"] for row in rows)
        numbers = "".join(f"{mean:8.1f}" for mean in means)
        seconds = statistics.fmean(row["seconds"] for row in rows)
        share = _mean_share(results, name)
        lines.append(f"{name:10s} {share:5.3f} {100 * within:7.0f}{numbers} {nats:10.4f} {over:12.2f} {seconds:9.2f}")
    return "\n".join(lines)


def _levels(results: Sequence[CellResult]) -> str:
    peers = [name for name in _common(results) if name.startswith("kl ")]
    lines = [f"{'level':40s} cells {''.join(f'{name:>11s}' for name in CRITERIA)}      share  best KL"]
    relations = ("relation", list(dict.fromkeys(PROBLEMS[result.cell.problem].relation for result in results)))
    problems = ("problem", sorted({result.cell.problem for result in results}))
    for factor, levels in [*FACTORS.items(), relations, problems]:
        for level in levels:
            own = [result for result in results if _level(result.cell, factor) == level]
            if not own:
                continue
            counts = "".join(f"{sum(map(counts, own)):11d}" for counts in CRITERIA.values())
            best = max(_mean_share(own, name) for name in peers)
            share = _mean_share(own, "mooring")
            lines.append(f"{f'{factor} {level}':40s} {len(own):5d} {counts} {share:10.3f} {best:8.3f}")
    return "\n".join(lines)


def _lost(results: Sequence[CellResult]) -> str:
    lines = ["cells that fail: learned @ held-out KL of the default, plain, and the peer that it is compared with"]
    for result in results:
        failed = [name for name, counts in CRITERIA.items() if counts(result)]
        if not failed:
            continue
        own, (learned, name) = result.default, result.best_peer(result.default["held_out"])
        if "given up" in failed and "below peer" not in failed:
            learned, name = result.best_peer(result.budget)
        peer = f"{name} {100 * learned:.1f} @ {result.methods[name]['held_out']:.3f}" if name != "none" else "no peer"
        warned = "warned" if result.warned else ""
        lines.append(
            f"{result.cell.text:75s} {100 * own['learned']:5.1f} @ {own['held_out']:.3f}, gauge {result.gauge:.2f}; "
            f"plain {100 * result.plain:.1f}; {peer}; {', '.join(failed)} {warned}".rstrip()
        )
    return "\n".join(lines)


def _common(results: Sequence[CellResult]) -> list[str]:
    """Return the methods that all cells have."""
    return [name for name in results[0].methods if all(name in result.methods for result in results)]


def _mean_share(results: Sequence[CellResult], method: str) -> float:
    return statistics.fmean(result.share(method) for result in results)


def _level(cell: GauntletCell, factor: str) -> Any:
    return PROBLEMS[cell.problem].relation if factor == "relation" else getattr(cell, factor)
