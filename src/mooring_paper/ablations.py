"""Why cells differ from the paper's: runs of methods that differ are repeated with one thing changed at a time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooring_lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_paper.changes import BASE, CHANGES, Change, applicable_changes, changed_seeds
from mooring_paper.context.paper_context import PaperContext, paper_setting, unique_runs
from mooring_paper.context.scale import ROWS, Condition, Regime
from mooring_paper.context.seed_statistics import format_difference
from mooring_paper.context.target_result import CELL_METRICS, PaperCell, ResultTable, TargetResult, make_cell
from mooring_paper.published.published_numbers import published

MethodKey = tuple[Condition, str]
"""Condition and method."""

EXPLANATIONS = {"explains it": "explained by", "may explain it": "perhaps explained by"}
"""How a reason begins, by the verdict on the change."""

TRAINED = {change.name for change in CHANGES if change.trains}
"""The changes of a run; the others change the measure alone."""

UNEXPLAINED = "not explained by any change that was tested"


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


def row_agrees(by_metric: Mapping[str, Sequence[Effect]], change: str) -> bool:
    """Return whether accuracy and forgetting of a row both agree with the paper's under a change.

    A change of the measure alone leaves the other metrics as they are.
    """
    cells = []
    for effects in by_metric.values():
        own = [effect.cell_after for effect in effects if effect.change == change]
        cells += own or [effects[0].cell_before]
    return all(cell is not None and cell.differs is False for cell in cells)


def is_explained(by_metric: Mapping[str, Sequence[Effect]], metric: str) -> bool:
    """Return whether a change explains the row for certain, or lets it finish and agree."""
    certain = [e.change for e in by_metric[metric][1:] if e.verdict in ("explains it", "finishes, and agrees")]
    return any(row_agrees(by_metric, change) for change in certain)


def closer_changes(effects: Sequence[Effect]) -> list[tuple[Effect, PaperCell]]:
    """Return the significant changes that leave a smaller difference from the paper than there was, with their cells.

    Changes that leave a larger difference do not count, in either direction.
    """
    towards = ("explains it", "may explain it", "moves towards", "overshoots", "finishes, and agrees", "finishes")
    before = effects[0].cell_before
    limit = math.inf if before is None else abs(before.difference)
    moved = [(effect, effect.cell_after) for effect in effects[1:] if effect.verdict in towards]
    return [(effect, cell) for effect, cell in moved if cell is not None and abs(cell.difference) < limit]


def explain(by_metric: Mapping[str, Sequence[Effect]], metric: str) -> list[str]:
    """Return why a cell differs: every change that explains its row, or the one that leaves the smallest difference.

    Empty if no change of a run was tested.

    Args:
        by_metric: the effects on accuracy and on forgetting. A change explains neither unless both then agree.
        metric: that of the cell.
    """
    effects = by_metric[metric]
    if not TRAINED & {effect.change for effect in effects}:
        return []
    for verdict, prefix in EXPLANATIONS.items():
        matching = [effect.change for effect in effects[1:] if effect.verdict == verdict]
        if matching := [change for change in matching if row_agrees(by_metric, change)]:
            return [f"{prefix} {change}" for change in matching]
    closest = min(closer_changes(effects), key=lambda pair: abs(pair[1].difference), default=None)
    if effects[0].before is None or closest is None:
        return [UNEXPLAINED]
    return [f"{UNEXPLAINED}; {closest[0].change} comes closest"]


Effects = Mapping[MethodKey, Mapping[str, Sequence[Effect]]]
"""Effects by condition and method, then by metric; the first effect of each list is that of no change."""


def run(context: PaperContext) -> TargetResult:
    """Test why cells of the main table differ, at the paper's settings.

    All methods are trained unchanged first. Only those with a cell that differs are trained again, in the first regime
    with each change that applies. Changes whose runs need fleets of their own come last there, and only for methods
    with a cell that no other change explains. The other regimes have fewer seeds, and only changes that help in the
    first one (`_promising`).
    """
    base = {
        (condition, method): _base_specs(context, condition, method)
        for condition in context.scale.conditions()
        for method in ROWS
    }
    runs = {key: {BASE.name: results} for key, results in context.run_groups(base).items()}
    regimes = context.scale.regimes
    changed = {key for key in base if _needs_reason(context, key, runs[key])}
    first = {key for key in changed if key[0].regime == context.scale.regimes[0]}

    def train(specs: Mapping[MethodKey, Mapping[str, Sequence[RunSpec]]]) -> Effects:
        """Train changed runs beside those before, and return the effects of all changes so far."""
        groups = {(key, name): group for key, changes in specs.items() for name, group in changes.items()}
        for (key, name), results in context.run_groups(groups).items():
            runs[key][name] = results
        return {key: _effects(context, key, tested) for key, tested in runs.items()}

    effects = train({key: change_specs(context, *key, apart=False) for key in base if key in first})
    unexplained = {k for k in first if not all(is_explained(effects[k], metric) for metric in _differing(effects[k]))}
    again = {key: change_specs(context, *key, apart=True) for key in base if key in unexplained}
    elsewhere = {key: _promising(change_specs(context, *key), key, effects) for key in base if key in changed - first}
    effects = train(again | elsewhere)
    reasons = {
        (*key, metric): explain(effects[key], metric)
        for key in base
        if key in changed
        for metric in _differing(effects[key])
    }
    tables = [_table(condition, effects) for condition in context.scale.conditions()]
    results = unique_runs(group for changes in runs.values() for group in changes.values())
    text = [_tested_text(context, regime, [effects[k] for k in changed if k[0].regime == regime]) for regime in regimes]
    return TargetResult("reasons", text, tables, results, reasons=reasons)


def _base_specs(context: PaperContext, condition: Condition, method: str) -> list[RunSpec]:
    """Return the unchanged runs of a method, one for each seed: those of the main table at the paper's settings."""
    return context.seed_specs(condition, method, paper_setting(context.scale, condition, method))


def _needs_reason(context: PaperContext, key: MethodKey, runs: Mapping[str, Sequence[Result]]) -> bool:
    """Return whether the paper has numbers for a method, and one of them differs from ours or no run finished."""
    condition, method = key
    return published(*condition.where, method) is not None and bool(_differing(_effects(context, key, runs)))


def _effects(
    context: PaperContext, key: MethodKey, runs: Mapping[str, Sequence[Result]]
) -> dict[str, Sequence[Effect]]:
    """Return the effects on each metric, with a confidence for all changes that may be tested."""
    comparisons = len(change_specs(context, *key))
    return {metric: measure_effects(key, runs, metric, comparisons) for metric in CELL_METRICS}


def _differing(effects: Mapping[str, Sequence[Effect]]) -> dict[str, Sequence[Effect]]:
    """Return the metrics that differ from the paper's, or of which no unchanged run finished."""
    return {metric: tested for metric, tested in effects.items() if differs(tested) or tested[0].before is None}


def change_specs(
    context: PaperContext, condition: Condition, method: str, *, apart: bool | None = None
) -> dict[str, list[RunSpec]]:
    """Return the runs of each change that applies to a method, one for each seed, by the name of the change.

    Args:
        context: makes the runs.
        condition: network, regime and data set.
        method: the name of the method.
        apart: only the changes that need fleets of their own, or only the others; None returns all.
    """
    base = _base_specs(context, condition, method)
    specs = {}
    for change in applicable_changes(context.scale, condition, method):
        if apart not in (None, change.apart):
            continue
        seeds = changed_seeds(context.scale, condition) if change.trains else len(base)
        changed = [change.spec(context, condition, spec) for spec in base[:seeds]]
        known = [spec for spec in changed if spec is not None]
        if len(known) == len(changed) and context.has(known):
            specs[change.name] = known
    return specs


def _promising(specs: Mapping[str, list[RunSpec]], key: MethodKey, effects: Effects) -> dict[str, list[RunSpec]]:
    """Return the changes to test outside the first regime: those that bring the method closer to the paper there.

    All changes are returned if none was tested there. Those without runs of their own, and those that say so, are
    returned always.

    Args:
        specs: the runs of each change that applies.
        key: condition and method.
        effects: those of the first regime among them.
    """
    condition, method = key
    same = [tested for (other, name), tested in effects.items() if name == method and other.data == condition.data]
    tested = [by_change for by_metric in same for by_change in by_metric.values() if len(by_change) > 1]
    closer = {effect.change for by_change in tested for effect, _ in closer_changes(by_change)}
    free = {change.name for change in CHANGES if not change.trains or change.always}
    return {name: group for name, group in specs.items() if not tested or name in closer | free}


def _tested_text(context: PaperContext, regime: Regime, methods: Sequence[Mapping[str, Sequence[Effect]]]) -> str:
    """Return how many changes were tested with the methods that differ in a regime, and with how many seeds."""
    counts = [len(TRAINED & {e.change for tested in by_metric.values() for e in tested}) for by_metric in methods]
    if not counts:
        return f"No method differs in {regime.name}."
    few, many = min(counts), max(counts)
    seeds = changed_seeds(context.scale, Condition(context.scale.network, regime, ""))
    which = "" if regime == context.scale.regimes[0] else ", those that bring the method closer in the first regime"
    number = pluralize(many, "change") if few == many else f"{few} to {pluralize(many, 'change')}"
    return f"In {regime.name}, {number} of a run were tested for each method that differs{which}, with {seeds} seeds."


def _table(condition: Condition, effects: Effects) -> ResultTable:
    """Return the table of a condition, with a row for each method and change."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (tested_condition, method), by_metric in effects.items():
        for metric, tested in by_metric.items() if tested_condition == condition else ():
            for effect in tested:
                row = rows.setdefault((method, effect.change), {"method": method, "changed": effect.change})
                row |= _effect_values(metric, effect)
    columns = ["method", "changed", *(column for metric in CELL_METRICS for column in _columns(metric))]
    return ResultTable(f"{condition}: one change at a time", columns, list(rows.values()))


def _columns(metric: str) -> list[str]:
    return [metric, f"{metric} changes by", f"{metric} from the paper's", f"{metric}: what it does"]


def _effect_values(metric: str, effect: Effect) -> dict[str, Any]:
    unchanged, cell = effect.change == BASE.name, effect.cell_after
    agreement = {True: "agrees", False: "differs", None: None}[cell.probably_agrees if cell else None]
    values = (
        None if effect.after is None else str(effect.after),
        None if unchanged else format_difference(effect.shift),
        None if cell is None else round(cell.difference, 2),
        agreement if unchanged else effect.verdict,
    )
    return dict(zip(_columns(metric), values, strict=True))
