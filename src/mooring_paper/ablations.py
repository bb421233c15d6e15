"""Why cells differ from the paper's: runs of methods that differ are repeated with one thing changed at a time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_paper.changes import BASE, CHANGES, applicable_changes, changed_seeds
from mooring_paper.context.paper_context import PaperContext, paper_setting
from mooring_paper.context.scale import REPLAY, ROWS, Condition
from mooring_paper.context.seed_statistics import format_difference
from mooring_paper.context.target_result import CELL_METRICS, Reason, ResultTable, TargetResult
from mooring_paper.effects import (
    EXPLAINED,
    PERHAPS,
    Effect,
    MethodKey,
    closer_changes,
    closest_change,
    differs,
    explain,
    is_explained,
    measure_effects,
)
from mooring_paper.published.published_numbers import PLAIN_SETTING_NOTE, published

Effects = Mapping[MethodKey, Mapping[str, Sequence[Effect]]]
"""Effects by condition and method, then by metric; the first effect of each list is that of no change."""

Reasons = Mapping[tuple[Condition, str, str], Reason]
"""Why a cell differs, by condition, method and metric."""


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
    known = context.run([spec for specs in base.values() for spec in specs])
    runs = {key: {BASE.name: [known[spec] for spec in specs]} for key, specs in base.items()}
    changed = {key for key in base if _needs_reason(context, key, runs[key])}
    first = {key for key in changed if key[0].regime == context.scale.regimes[0]}

    def train(specs: Mapping[MethodKey, Mapping[str, Sequence[RunSpec]]]) -> Effects:
        """Train changed runs beside those before, and return the effects of all changes so far."""
        known.update(context.run([spec for changes in specs.values() for group in changes.values() for spec in group]))
        for key, changes in specs.items():
            runs[key] |= {name: [known[spec] for spec in group] for name, group in changes.items()}
        return {key: _effects(context, key, tested) for key, tested in runs.items()}

    effects = train({key: change_specs(context, *key, apart=False) for key in base if key in first})
    unexplained = {key for key in first if not all(map(is_explained, _differing(effects[key]).values()))}
    again = {key: change_specs(context, *key, apart=True) for key in base if key in unexplained}
    elsewhere = {key: _promising(change_specs(context, *key), key, effects) for key in base if key in changed - first}
    effects = train(again | elsewhere)
    reasons = {
        (*key, metric): explain(tested)
        for key in base
        if key in changed
        for metric, tested in _differing(effects[key]).items()
    }
    text = [*_explanation(), *_summary(effects, reasons), *replay_summary(effects)]
    tables = [_table(condition, effects) for condition in context.scale.conditions()]
    return TargetResult("reasons", text, tables, list(known.values()), reasons=reasons)


def _base_specs(context: PaperContext, condition: Condition, method: str) -> list[RunSpec]:
    """Return the unchanged runs of a method, one for each seed: those of the main table at the paper's settings."""
    setting = paper_setting(context.scale, condition, method)
    return [context.spec(condition, method, seed, setting) for seed in range(context.scale.seeds)]


def _needs_reason(context: PaperContext, key: MethodKey, runs: Mapping[str, Sequence[Result]]) -> bool:
    """Return whether the paper has numbers for a method, and one of them differs from ours or no run finished."""
    condition, method = key
    if published(condition.network, condition.regime.name, condition.data, method) is None:
        return False
    return bool(_differing(_effects(context, key, runs)))


def _effects(
    context: PaperContext, key: MethodKey, runs: Mapping[str, Sequence[Result]]
) -> dict[str, Sequence[Effect]]:
    """Return the effects on each metric, with a confidence for all changes that may be tested."""
    comparisons = len(applicable_changes(context.scale, *key))
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
        if None not in changed:
            specs[change.name] = [spec for spec in changed if spec is not None]
    return specs


def _promising(specs: Mapping[str, list[RunSpec]], key: MethodKey, effects: Effects) -> dict[str, list[RunSpec]]:
    """Return the changes to test outside the first regime: those that bring the method closer to the paper there.

    All changes are returned if none was tested there, and those without runs of their own always.

    Args:
        specs: the runs of each change that applies.
        key: condition and method.
        effects: those of the first regime among them.
    """
    condition, method = key
    same = [tested for (other, name), tested in effects.items() if name == method and other.data == condition.data]
    tested = [by_change for by_metric in same for by_change in by_metric.values() if len(by_change) > 1]
    closer = {effect.change for by_change in tested for effect, _ in closer_changes(by_change)}
    free = {change.name for change in CHANGES if not change.trains}
    return {name: group for name, group in specs.items() if not tested or name in closer | free}


def _explanation() -> list[str]:
    return [
        "One thing is changed at a time, at the paper's settings; only methods with a cell that differs are trained "
        "again. All changes are tested with all seeds in the first regime. In the others, three seeds test the changes "
        "that brought the method closer to the paper on the same data in the first regime, and all changes if none was "
        "tested there. Changes of the data, the precision and the memory of replay are tested only in the first "
        "regime, where no other change explains a cell. A change explains a cell if three conditions hold: our mean "
        "differs from the paper's without the change, it agrees with the change, and the effect of the change is "
        "beyond chance. The last means that the interval of the difference over seeds excludes 0, at 95 % for all "
        "changes of the cell together (Bonferroni). A change may explain a cell if its interval excludes 0 at 95 % for "
        "the change alone; this happens for one in twenty changes that have no effect. Tables show the intervals for "
        "the change alone. If the paper gives no standard deviation, ours replaces it.",
        "Classes in another order means one other order, with the searched tasks cut off in the same way. Strength x 2 "
        "and / 2 test the factor 1/2 of a penalty. Strength x batch and / batch test importance from gradients of "
        "single samples or of batches. Fresh heads start from random weights in every task instead of from the head of "
        "the previous task; the paper does not say which it uses, and the authors' public code "
        "(github.com/EkdeepSLubana/QRforgetting) inherits heads with regularizers and not with replay. "
        f"{PLAIN_SETTING_NOTE}",
    ]


def _summary(effects: Effects, reasons: Reasons) -> list[str]:
    """Return how many cells differ and are explained, and the reasons of each method."""
    cells = [tested[0] for both in effects.values() for tested in both.values() if tested[0].cell_before is not None]
    if not cells and not reasons:
        return ["The paper has no numbers for these data sets: there is nothing to explain."]
    explained, perhaps = (sum(r.causes[0].startswith(word) for r in reasons.values()) for word in (EXPLAINED, PERHAPS))
    text = [
        f"Of {len(cells)} cells, {len(reasons)} differ from the paper's. A change explains {explained} of these, "
        f"perhaps explains {perhaps}, and does not explain {len(reasons) - explained - perhaps}."
    ]
    for (condition, method), by_metric in effects.items():
        parts = []
        for metric, tested in by_metric.items():
            cell, reason = tested[0].cell_before, reasons.get((condition, method, metric))
            if reason is not None:
                difference = "" if cell is None else f" differs by {cell.difference:+.2f}"
                parts.append(f"{metric}{difference}: {reason.text}")
        if parts:
            text.append(f"{condition}, {method}: {'; '.join(parts)}.")
    return text


def replay_summary(effects: Effects) -> list[str]:
    """Return which change brings the accuracy of each replay method closest to the paper's, for each condition."""
    text = []
    for (condition, method), by_metric in effects.items():
        tested = by_metric["accuracy"]
        cell = tested[0].cell_before
        if method not in REPLAY or cell is None:
            continue
        start = f"Replay, {condition}, {method}: accuracy {cell.ours.mean:.2f}, the paper's {cell.mean:g}"
        closest = closest_change(tested)
        if not differs(tested):
            text.append(f"{start}; they agree without a change.")
        elif closest is None:
            text.append(f"{start}; no change brings it significantly closer.")
        else:
            effect, after = closest
            left = f"{effect.change} comes closest, with {after.ours.mean:.2f} and {after.difference:+.2f} left"
            text.append(f"{start}; {left} ({effect.verdict}).")
    return text


def _table(condition: Condition, effects: Effects) -> ResultTable:
    rows: list[dict[str, Any]] = []
    for (tested_condition, method), by_metric in effects.items():
        if tested_condition == condition:
            rows += _rows(method, by_metric)
    columns = ["method", "changed", *(column for metric in CELL_METRICS for column in _columns(metric))]
    return ResultTable(f"{condition}: one change at a time", columns, rows)


def _rows(method: str, by_metric: Mapping[str, Sequence[Effect]]) -> Iterable[dict[str, Any]]:
    """Return a row for each change."""
    by_change: dict[str, dict[str, Any]] = {}
    for metric, tested in by_metric.items():
        for effect in tested:
            row = by_change.setdefault(effect.change, {"method": method, "changed": effect.change})
            row |= _effect_values(metric, effect)
    return by_change.values()


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
