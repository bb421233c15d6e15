"""The runs behind the claims, in pairs of methods, and what follows from the differences between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from recomputation.run_records import EXPLICIT, REPLAY, Condition, Reproduction, RunRecord, Setting, rows_by_setting
from recomputation.seed_intervals import SeedInterval, interval, verdict_on_range
from recomputation.table_cells import GridCell, grid_cells

SEEDS_PER_LOOK = 5
ERROR_RATE = 0.05

Rows = dict[tuple[Condition, str, Setting], list[RunRecord]]
"""The seeds of each setting of a method under a condition."""


class Recomputed(NamedTuple):
    """What a claim's row must say.

    Attributes:
        numbers: the numbers of the column "ours", in order, up to the pairs that it leaves out.
        verdict: the verdict.
        papers: the first numbers of the column "paper's"; empty if it has none from the tables, None if not computed.
        words: names that "ours" must contain.
        scopes: how many of how many pairs the definition must say that a mean is over.
        seeds: the seeds of every comparison.
        details: the numbers of "ours" after the first semicolon, if they are computed.
    """

    numbers: Sequence[float]
    verdict: str
    papers: Sequence[float] | None = None
    words: Sequence[str] = ()
    scopes: Sequence[tuple[int, int]] = ()
    seeds: Sequence[int] = ()
    details: Sequence[float] = ()


@dataclass(frozen=True)
class Pair:
    """The seeds of two methods under a condition; empty if no setting of a method finished the search."""

    condition: Condition
    methods: tuple[str, str]
    first: Sequence[RunRecord]
    second: Sequence[RunRecord]

    def __str__(self) -> str:
        return f"{self.methods[0]} against {self.methods[1]} on {self.condition.data} in {self.condition.regime}"

    @property
    def swapped(self) -> "Pair":
        """The second method minus the first."""
        return Pair(self.condition, self.methods[::-1], self.second, self.first)

    def all_finished(self, seeds: int) -> bool:
        """Return whether there are runs of both, and all of the first seeds finished."""
        runs = [run for run in (*self.first, *self.second) if run.seed < seeds]
        return bool(self.first and self.second) and all(run.finished for run in runs)


class Look(NamedTuple):
    """A difference at the last look at it.

    Attributes:
        difference: its mean over seeds and interval; None if no pair finished.
        verdict: the verdict.
        used, minus: the pairs over which the mean is taken, and those whose mean is subtracted.
    """

    difference: SeedInterval | None
    verdict: str
    used: list[Pair]
    minus: list[Pair]

    @property
    def numbers(self) -> list[float]:
        """The numbers that are printed."""
        return [] if self.difference is None else self.difference.numbers

    @property
    def seeds(self) -> int:
        """How many seeds the mean is over."""
        return 0 if self.difference is None else self.difference.seeds


class Evidence:
    """The runs behind the claims, and the differences between them.

    Args:
        reproduction: the files.
        at_paper_settings: whether rows of the tables are those at the paper's settings, without added seeds.
        stands_in: whether the claims are those on data that stand in for the paper's, which get no added seeds.

    Attributes:
        conditions: the columns that claims on the tables are about.
    """

    def __init__(self, reproduction: Reproduction, *, at_paper_settings: bool = False, stands_in: bool = False) -> None:
        self.reproduction, self.at_paper_settings, self.stands_in = reproduction, at_paper_settings, stands_in
        self.conditions = reproduction.stand_in_conditions if stands_in else reproduction.main_conditions

    @cached_property
    def grids(self) -> dict[Condition, dict[str, GridCell]]:
        """The grid search on the paper's data sets."""
        stand_ins = self.reproduction.stand_in_conditions
        return {c: methods for c, methods in self._every_grid.items() if c not in stand_ins}

    @cached_property
    def _every_grid(self) -> dict[Condition, dict[str, GridCell]]:
        return grid_cells(self.reproduction)

    @cached_property
    def looks(self) -> list[int]:
        """The numbers of seeds at which a difference is looked at: five more each time, up to the most."""
        first, last = (self.reproduction.scale[name] for name in ("seeds", "max_seeds"))
        if self.stands_in:
            return [first]
        return [*range(first, last, SEEDS_PER_LOOK), max(first, last)]

    @cached_property
    def _claimed(self) -> Rows:
        targets = ("table1", "stand-in") if self.stands_in else ("claims",)
        runs = [run for target in targets for run in self.reproduction.runs_of(target)]
        return rows_by_setting(run for run in runs if run.part == "trained" and not run.has_fresh_heads)

    def rows_of(self, target: str) -> Rows:
        """Return the rows of a figure, with the seeds that were added for claims."""
        rows = rows_by_setting(self.reproduction.runs_of(target))
        return {
            key: self._claimed[key] if len(self._claimed.get(key, ())) > len(row) else row for key, row in rows.items()
        }

    @cached_property
    def table(self) -> dict[tuple[Condition, str], Sequence[RunRecord]]:
        """The seeds of each method at our setting or at the paper's, by condition and method."""
        if self.at_paper_settings:
            return self._paper_table()
        chosen = {(c, m): cell.best for c, methods in self._every_grid.items() for m, cell in methods.items()}
        return {(c, m): self._claimed.get((c, m, s), []) for (c, m), s in chosen.items() if s is not None}

    def _paper_table(self) -> dict[tuple[Condition, str], Sequence[RunRecord]]:
        """Return the seeds of the tables; plain fine-tuning has the rate of the explicit step, or one below EWC's."""
        rows, seeds = self._claimed, self.reproduction.scale["seeds"]
        table: dict[tuple[Condition, str], Sequence[RunRecord]] = {}
        for condition in (*self.reproduction.main_conditions, *self.reproduction.second_conditions):
            for method in self.grids[condition]:
                settings = [self.reproduction.published_setting(condition, method)]
                if method == "plain":
                    settings += self.reproduction.plain_settings(condition)
                known = [rows[condition, method, s] for s in settings if s and (condition, method, s) in rows]
                if known:
                    table[condition, method] = [run for run in known[0] if run.seed < seeds]
        return table

    def fresh_replay(self) -> list[Pair]:
        """Return pairs of replay with fresh heads and each explicit step, at the paper's settings."""
        runs = [run for run in self.reproduction.runs_of("claims") if run.has_fresh_heads]
        fresh = {(condition, method): row for (condition, method, _), row in rows_by_setting(runs).items()}
        conditions = dict.fromkeys(condition for condition, _ in fresh)
        table = self._paper_table()
        return [
            Pair(c, (a, b), fresh.get((c, a), []), table.get((c, b), []))
            for c in self.reproduction.main_conditions
            if c in conditions
            for a in REPLAY
            for b in EXPLICIT
        ]

    def pairs(
        self, conditions: Sequence[Condition], first: Sequence[str], second: Sequence[str], *, every: bool = False
    ) -> list[Pair]:
        """Return pairs of methods at our settings: one by one, or every first with every second."""
        names = [(a, b) for a in first for b in second] if every else list(zip(first, second, strict=True))
        return [
            Pair(c, (a, b), self.table.get((c, a), []), self.table.get((c, b), []))
            for c in conditions
            for a, b in names
        ]

    def look(
        self,
        pairs: Sequence[Pair],
        metric: str,
        low: float = 0.0,
        high: float = math.inf,
        *,
        second_metric: str | None = None,
        minus: Sequence[Pair] = (),
        to_hold: int = 1,
        to_fail: int = 1,
    ) -> Look:
        """Return the mean difference over pairs at the first look that decides, or at the last one.

        The error rate of 5 % is divided by the number of looks, and by that of comparisons of which one suffices for
        the claim to hold or to fail.
        """

        def finished(group: Sequence[Pair], seeds: int) -> list[Pair]:
            return [pair for pair in group if pair.all_finished(seeds)]

        result = Look(None, "not decided", finished(pairs, self.looks[0]), finished(minus, self.looks[0]))
        for seeds in self.looks[:1] if self.at_paper_settings else self.looks:
            used, others = finished(pairs, seeds), finished(minus, seeds)
            rows = [row for pair in (*used, *others) for row in (pair.first, pair.second)]
            if seeds > self.looks[0] and any(len(row) < seeds for row in rows):
                break
            values = gains(used, seeds, metric, second_metric or metric)
            if minus:
                subtracted = gains(others, seeds, metric, metric)
                values = {seed: value - subtracted[seed] for seed, value in values.items() if seed in subtracted}
            if not values:
                break
            shown, holding, failing = (
                interval(list(values.values()), 1 - ERROR_RATE / (len(self.looks) * comparisons))
                for comparisons in (1, to_hold, to_fail)
            )
            holds, fails = verdict_on_range(holding, low, high), verdict_on_range(failing, low, high)
            verdict = "holds" if holds == "holds" else "does not hold" if fails == "does not hold" else "not decided"
            result = Look(shown, verdict, used, others)
            if verdict != "not decided" or len(values) < 2:
                break
        return result

    def mean_claim(
        self, pairs: Sequence[Pair], metric: str, low: float = 0.0, high: float = math.inf, **options: Any
    ) -> Recomputed:
        """Test whether the mean over pairs of first minus second lies between bounds."""
        look = self.look(pairs, metric, low, high, **options)
        minus = options.get("minus", ())
        scopes = [(len(used), len(group)) for used, group in ((look.used, pairs), (look.minus, minus)) if group]
        papers = [self.papers(group, metric) for group in (look.used, look.minus)]
        known = bool(look.used) and all(None not in group for group in papers)
        means = [math.fsum(value or 0.0 for value in group) / len(group) if group else 0.0 for group in papers]
        numbers = [*look.numbers, *(count for scope in scopes or [(0, 0)] for count in scope)]
        return Recomputed(numbers, look.verdict, [means[0] - means[1]] if known else [], (), scopes, [look.seeds])

    def papers(self, pairs: Sequence[Pair], metric: str) -> list[float | None]:
        """Return the differences between the means of the paper's tables; None where it lacks one."""
        differences = []
        for pair in pairs:
            a, b = (self.reproduction.published_cell(pair.condition, method).get(metric) for method in pair.methods)
            differences.append(None if a is None or b is None else a - b)
        return differences

    def violations(self, run: RunRecord) -> list[int]:
        """Return after each task how many parameters have lr * strength * importance >= 1."""
        return [s["extrapolate"] + s["diverge"] - s["negative"] for s in self.reproduction.stability_of(run)]

    def broke_under_penalty(self, run: RunRecord) -> bool:
        """Return whether a run became unstable after the first task, when a penalty acts."""
        return run.status == "unstable" and bool(self.reproduction.stability_of(run))


def gains(pairs: Sequence[Pair], seeds: int, first: str, second: str) -> dict[int, Any]:
    """Return by seed the mean over pairs of first minus second; only seeds that have a number everywhere."""
    sides = [(_by_seed(pair.first, seeds, first), _by_seed(pair.second, seeds, second)) for pair in pairs]
    common = sorted(set.intersection(*(set(side) for both in sides for side in both))) if sides else []
    return {seed: sum(a[seed] - b[seed] for a, b in sides) / len(sides) for seed in common}


def _by_seed(runs: Sequence[RunRecord], seeds: int, metric: str) -> dict[int, Any]:
    return {run.seed: value for run in runs if run.seed < seeds and (value := run.metric(metric)) is not None}
