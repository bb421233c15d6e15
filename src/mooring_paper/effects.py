"""The effect of a change on a cell of the paper's tables, and what it says about why the cell differs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooring_lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring_lab.model.results import Result
from mooring_paper.changes import BASE, CHANGES, Change
from mooring_paper.context.scale import Condition
from mooring_paper.context.target_result import PaperCell, make_cell

MethodKey = tuple[Condition, str]
"""Condition and method."""

EXPLANATIONS = {"explains it": "explained by", "may explain it": "perhaps explained by"}
"""How a reason begins, by the verdict on the change."""

UNEXPLAINED = "not explained by any change"


@dataclass(frozen=True)
class Effect:
    """The effect of a change on a metric.

    Attributes:
        change: the name of the change.
        before, after: means over the seeds that finished; None if none did. A change may have fewer seeds.
        shift: after minus before, paired by seed; None if no seed finished both times.
        strict_shift: the same with a confidence corrected for the number of changes that were tested (Bonferroni).
        cell_before, cell_after: the cells without and with the change; None if the paper has no number.
    """

    change: str
    before: Interval | None
    after: Interval | None
    shift: Interval | None
    strict_shift: Interval | None
    cell_before: PaperCell | None
    cell_after: PaperCell | None

    @property
    def verdict(self) -> str:
        """Whether the change brings our mean to the paper's, beyond chance.

        A change whose interval contains 0 explains nothing. One whose strict interval contains 0 may be the one in
        twenty that seems to have an effect. The direction is that of the seeds that both have.
        """
        before, after = self.cell_before, self.cell_after
        if self.after is None:
            return "does not finish"
        if self.before is None:
            return "finishes, and agrees" if after is not None and after.differs is False else "finishes"
        if self.shift is None or math.isnan(self.shift.low):
            return "not decided"
        if not _excludes_zero(self.shift):
            return "no significant effect"
        if before is None or after is None:
            return "higher" if self.shift.mean > 0 else "lower"
        if before.differs is False:
            return "still agrees" if after.differs is False else "moves away"
        start = after.difference - self.shift.mean
        if abs(after.difference) >= abs(start):
            return "overshoots" if start * after.difference < 0 else "moves away"
        if after.differs is False:
            sure = self.strict_shift is not None and _excludes_zero(self.strict_shift)
            return "explains it" if sure else "may explain it"
        return "overshoots" if start * after.difference < 0 else "moves towards"


def _excludes_zero(bounds: Interval) -> bool:
    return bounds.low > 0 or bounds.high < 0


def measure_effects(
    key: MethodKey, runs: Mapping[str, Sequence[Result]], metric: str, comparisons: int = 0
) -> list[Effect]:
    """Return the effect of each change on a metric; the first is that of no change.

    Args:
        key: condition and method.
        runs: the runs of each change by its name, the unchanged ones among them.
        metric: "accuracy" or "forgetting".
        comparisons: the number of changes to correct the confidence for, if more may be tested than there are runs of.
    """
    base = _scores(BASE, runs[BASE.name], metric)
    before = confidence_interval(list(base.values())) if base else None
    tested = [c for c in (BASE, *CHANGES) if c.name in runs and (c.trains or c is BASE or metric == "forgetting")]
    strict_level = 0.05 / max(1, len(tested) - 1, comparisons)
    effects = []
    for change in tested:
        scores = _scores(change, runs[change.name], metric)
        after = confidence_interval(list(scores.values())) if scores else None
        common = [seed for seed in scores if seed in base]
        pairs = ([scores[seed] for seed in common], [base[seed] for seed in common])
        shift, strict = (paired_difference(*pairs, 1 - level) if common else None for level in (0.05, strict_level))
        cells = (make_cell(*key, metric, before), make_cell(*key, metric, after))
        effects.append(Effect(change.name, before, after, shift, strict, *cells))
    return effects


def _scores(change: Change, results: Sequence[Result], metric: str) -> dict[int, float]:
    return {r.spec.seed: change.score(r, metric) for r in results if r.status == "finished"}


def differs(effects: Sequence[Effect]) -> bool:
    """Return whether our mean differs from the paper's before anything is changed, beyond bounds and chance."""
    cell = effects[0].cell_before
    return cell is not None and cell.differs is True


def is_explained(effects: Sequence[Effect]) -> bool:
    """Return whether a change explains the cell for certain, or lets it finish and agree."""
    return any(effect.verdict in ("explains it", "finishes, and agrees") for effect in effects[1:])


def closer_changes(effects: Sequence[Effect]) -> list[tuple[Effect, PaperCell]]:
    """Return the significant changes that leave a smaller difference from the paper than there was, with their cells.

    Changes that leave a larger difference do not count, in either direction.
    """
    towards = ("explains it", "may explain it", "moves towards", "overshoots", "finishes, and agrees", "finishes")
    before = effects[0].cell_before
    limit = math.inf if before is None else abs(before.difference)
    moved = [(effect, effect.cell_after) for effect in effects[1:] if effect.verdict in towards]
    return [(effect, cell) for effect, cell in moved if cell is not None and abs(cell.difference) < limit]


def explain(effects: Sequence[Effect]) -> list[str]:
    """Return why a cell differs: every change that explains it, or the one that leaves the smallest difference."""
    for verdict, prefix in EXPLANATIONS.items():
        if matching := [effect.change for effect in effects[1:] if effect.verdict == verdict]:
            return [f"{prefix} {change}" for change in matching]
    closest = min(closer_changes(effects), key=lambda pair: abs(pair[1].difference), default=None)
    if effects[0].before is None or closest is None:
        return [UNEXPLAINED]
    return [f"{UNEXPLAINED}; {closest[0].change} comes closest"]
