"""Why cells differ from the paper's: runs are repeated with one thing changed at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mooring.lab.methods import find_method
from mooring.lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.paper.context.paper_context import PaperContext, paper_setting
from mooring.paper.context.scale import REGULARIZERS, ROWS, Condition
from mooring.paper.context.seed_statistics import format_difference
from mooring.paper.context.target_result import CELL_METRICS, PaperCell, ResultTable, TargetResult, make_cell
from mooring.paper.published.published_numbers import PLAIN_SETTING_NOTE

SHUFFLE_SEED = 1
"""The seed of the other order of classes."""

ABLATED_METHODS = ("plain", *REGULARIZERS, "explicit-ewc", "er")
"""The methods with which everything is changed; the others get only another backbone."""

PRECISION_METHODS = ("plain", "ewc", "explicit-ewc")
"""The methods with which the precision is changed: without a pull, with a penalty and with an explicit step."""

SpecChange = Callable[[PaperContext, Condition, RunSpec], RunSpec | None]
"""Returns the changed specification of a run; None if there is nothing to change."""

MethodKey = tuple[Condition, str]
"""Condition and method."""


@dataclass(frozen=True)
class Change:
    """A single change of a run.

    Attributes:
        name: its name on the page.
        spec: changes the specification of a run.
        applies_to: whether a method has what is changed.
        score: returns a metric of a run; another definition if the change is one of the measure.
        trains: whether there are new runs to train.
    """

    name: str
    spec: SpecChange
    applies_to: Callable[[str], bool] = lambda method: True
    score: Callable[[Result, str], float] = lambda result, metric: result.metrics[metric]
    trains: bool = True


def _first_backbone(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec | None:
    backbones = context.backbones.get(condition.network, [])
    return replace(spec, init=backbones[0]) if len(backbones) > 1 else None


def _other_backbone(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec | None:
    other = context.other_backbone
    return replace(spec, init=other) if other and spec.init != other else None


def _random_start(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec | None:
    return replace(spec, init="") if spec.init else None


def _other_class_order(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec:
    stream = context.main_stream(condition.data, shuffle=SHUFFLE_SEED)
    return replace(spec, stream=stream.name, data=stream.fingerprint)


def _all_tasks(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec:
    stream = context.full_stream(condition.data)
    return replace(spec, stream=stream.name, data=stream.fingerprint)


def _higher_precision(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec | None:
    return replace(spec, dtype="tf32") if spec.dtype == "bf16" else None


def _scale_strength(factor: Callable[[RunSpec], float]) -> SpecChange:
    return lambda context, condition, spec: replace(spec, strength=(spec.strength or 0.0) * factor(spec))


def _scale_lr(factor: float) -> SpecChange:
    return lambda context, condition, spec: replace(spec, lr=spec.lr * factor)


def _set(**fields: object) -> SpecChange:
    return lambda context, condition, spec: replace(spec, **fields)  # type: ignore[arg-type]


def _is_ablated(method: str) -> bool:
    return method in ABLATED_METHODS


def _has_strength(method: str) -> bool:
    return _is_ablated(method) and find_method(method).has_strength


def _without_last_task(result: Result, metric: str) -> float:
    """Return forgetting averaged over all tasks but the last, which cannot be forgotten; ours counts it as 0.

    Example:
        >>> spec = RunSpec("digits", "0", "plain", 0)
        >>> result = Result(spec, "finished", "", [10.0, 10.0], [[90.0, 20.0], [70.0, 80.0]])
        >>> result.metrics["forgetting"], _without_last_task(result, "forgetting")
        (10.0, 20.0)
    """
    tasks = len(result.matrix)
    value = result.metrics[metric]
    return value * tasks / (tasks - 1) if metric == "forgetting" and tasks > 1 else value


BASE = Change("nothing", _set())
"""The unchanged run."""

CHANGES: tuple[Change, ...] = (
    # Backbone and split of the data.
    Change("the first backbone for all seeds", _first_backbone, _is_ablated),
    Change("another backbone", _other_backbone),
    Change("a random start", _random_start, _is_ablated),
    Change("classes in another order", _other_class_order, _is_ablated),
    Change("the searched tasks trained too", _all_tasks, _is_ablated),
    # The factor 1/2 of a penalty, and the batch in the Fisher information.
    Change("strength x 2", _scale_strength(lambda spec: 2.0), _has_strength),
    Change("strength / 2", _scale_strength(lambda spec: 0.5), _has_strength),
    Change("strength x batch", _scale_strength(lambda spec: spec.batch), _has_strength),
    Change("strength / batch", _scale_strength(lambda spec: 1 / spec.batch), _has_strength),
    # Definitions, and what the paper does not specify: it gives no learning rate for plain fine-tuning.
    Change("absolute scores", _set(method="si-absolute"), lambda method: method == "si"),
    Change("learning rate x 3", _scale_lr(3.0), lambda method: method == "plain"),
    Change("learning rate / 3", _scale_lr(1 / 3), lambda method: method == "plain"),
    Change("a gradient from 256 old samples", _set(method="a-gem-256"), lambda method: method == "a-gem"),
    Change("fresh heads", _set(heads="fresh"), _is_ablated),
    Change("momentum 0", _set(momentum=0.0), _is_ablated),
    Change("weight decay 1e-4", _set(weight_decay=1e-4), _is_ablated),
    Change("batch 32", _set(batch=32), _is_ablated),
    # The precision of matrix products on a GPU, and the measure of forgetting.
    Change("products in tf32 instead of bf16", _higher_precision, lambda method: method in PRECISION_METHODS),
    Change("forgetting without the last task", _set(), score=_without_last_task, trains=False),
)

SETTINGS = sum(1 + sum(change.trains and change.applies_to(method) for change in CHANGES) for method in ROWS)
"""Settings of a data set: 13 methods, 7 of them with 9 to 14 changes; with one backbone or none there is less."""


@dataclass(frozen=True)
class Effect:
    """The effect of a change on a metric.

    Attributes:
        change: the name of the change.
        before, after: means over the seeds that finished; None if none did.
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
        twenty that seems to have an effect.
        """
        before, after = self.cell_before, self.cell_after
        if self.after is None:
            return "does not finish"
        if self.before is None:
            return "finishes, and agrees" if after is not None and after.probably_agrees else "finishes"
        if self.shift is None or math.isnan(self.shift.low):
            return "not decided"
        if not _excludes_zero(self.shift):
            return "no significant effect"
        if before is None or after is None:
            return "higher" if self.shift.mean > 0 else "lower"
        if before.probably_agrees:
            return "still agrees" if after.probably_agrees else "moves away"
        if after.probably_agrees:
            sure = self.strict_shift is not None and _excludes_zero(self.strict_shift)
            return "explains it" if sure else "may explain it"
        if before.difference * after.difference < 0:
            return "overshoots"
        return "moves towards" if abs(after.difference) < abs(before.difference) else "moves away"


Effects = Mapping[MethodKey, Mapping[str, Sequence[Effect]]]
"""Effects by condition and method, then by metric; the first effect of each list is that of no change."""


def _excludes_zero(bounds: Interval) -> bool:
    return bounds.low > 0 or bounds.high < 0


def run(context: PaperContext) -> TargetResult:
    """Test every change of every method on every data set in the first regime, at the paper's settings."""
    conditions = context.scale.first_conditions()
    specs = {(condition, method): _specs(context, condition, method) for condition in conditions for method in ROWS}
    known = context.run([spec for changes in specs.values() for seeds in changes.values() for spec in seeds])
    effects: dict[MethodKey, dict[str, list[Effect]]] = {}
    for key, changes in specs.items():
        runs = {name: [known[spec] for spec in seeds] for name, seeds in changes.items()}
        effects[key] = {metric: _effects(key, runs, metric) for metric in CELL_METRICS}
    reasons = {
        (*key, metric): _reason(tested)
        for key, by_metric in effects.items()
        for metric, tested in by_metric.items()
        if _differs(tested)
    }
    tables = [_table(condition, effects) for condition in conditions]
    return TargetResult("reasons", _text(effects, reasons), tables, list(known.values()), reasons=reasons)


def _specs(context: PaperContext, condition: Condition, method: str) -> dict[str, list[RunSpec]]:
    """Return the runs of each change that applies, one for each seed; the unchanged runs first."""
    setting = paper_setting(context.scale, condition, method, "explicit-ewc" if method == "plain" else method)
    base = [context.spec(condition, method, seed, setting) for seed in range(context.scale.seeds)]
    specs = {}
    for change in (BASE, *CHANGES):
        changed = [change.spec(context, condition, spec) for spec in base] if change.applies_to(method) else []
        if changed and None not in changed:
            specs[change.name] = [spec for spec in changed if spec is not None]
    return specs


def _effects(key: MethodKey, runs: Mapping[str, Sequence[Result]], metric: str) -> list[Effect]:
    """Return the effect of each change on a metric; the first is that of no change."""
    base = _scores(BASE, runs[BASE.name], metric)
    before = confidence_interval(list(base.values())) if base else None
    tested = [c for c in (BASE, *CHANGES) if c.name in runs and (c.trains or metric == "forgetting")]
    strict_level = 0.05 / max(1, len(tested) - 1)
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


def _differs(effects: Sequence[Effect]) -> bool:
    """Return whether our mean differs from the paper's before anything is changed."""
    cell = effects[0].cell_before
    return cell is not None and cell.probably_agrees is False


def _reason(effects: Sequence[Effect]) -> str:
    changes = effects[1:]
    for verdict, prefix in (("explains it", "explained by"), ("may explain it", "perhaps explained by")):
        names = [f"{e.change} ({format_difference(e.shift)})" for e in changes if e.verdict == verdict]
        if names:
            return f"{prefix} {' or '.join(names)}"
    reason = f"not explained by any of {pluralize(len(changes), 'single change')}"
    # These verdicts have a cell.
    closer = [
        (e.cell_after, e.change) for e in changes if e.cell_after and e.verdict in ("moves towards", "overshoots")
    ]
    if not closer:
        return f"{reason}, and none moves it significantly towards the paper's"
    cell, closest = min(closer, key=lambda cell_and_change: abs(cell_and_change[0].difference))
    return f"{reason}; of those with a significant effect, {closest} comes closest, with {cell.difference:+.2f} left"


def _text(effects: Effects, reasons: Mapping[Any, str]) -> list[str]:
    text = [
        "One thing is changed at a time, at the paper's settings in the first regime. A change explains a cell if "
        "three conditions hold: our mean differs from the paper's without the change, it agrees with the change, and "
        "the effect of the change is beyond chance. The last means that the interval of the difference over seeds "
        "excludes 0, at 95 % for all changes of the cell together (Bonferroni). A change may explain a cell if its "
        "interval excludes 0 at 95 % for the change alone; this happens for one in twenty changes that have no effect. "
        "Tables show the intervals for the change alone. If the paper gives no standard deviation, ours replaces it.",
        "Classes in another order means one other order, with the searched tasks cut off in the same way. Strength x 2 "
        "and / 2 test the factor 1/2 of a penalty. Strength x batch and / batch test importance from gradients of "
        "single samples or of batches. Fresh heads start from random weights in every task instead of from the head of "
        f"the previous task. {PLAIN_SETTING_NOTE}",
    ]
    cells = [tested[0] for both in effects.values() for tested in both.values() if tested[0].cell_before is not None]
    if not cells:
        return [*text, "The paper has no numbers for these data sets: there is nothing to explain."]
    explained, perhaps = (sum(r.startswith(word) for r in reasons.values()) for word in ("explained", "perhaps"))
    text.append(
        f"Of {len(cells)} cells, {len(reasons)} differ from the paper's. A single change explains {explained} of "
        f"these, perhaps explains {perhaps}, and does not explain {len(reasons) - explained - perhaps}."
    )
    for (condition, method), by_metric in effects.items():
        parts = []
        for metric, tested in by_metric.items():
            cell = tested[0].cell_before
            if (condition, method, metric) in reasons and cell is not None:
                parts.append(f"{metric} differs by {cell.difference:+.2f}: {reasons[condition, method, metric]}")
        if parts:
            text.append(f"{condition.data}, {method}: {'; '.join(parts)}.")
        unchanged, *changed = by_metric[CELL_METRICS[0]]
        if unchanged.before is None:
            finishing = [effect.change for effect in changed if effect.after is not None]
            which = f"some did with {', '.join(finishing)}" if finishing else "none did with any change"
            text.append(f"{condition.data}, {method}: no seed finished at the paper's setting; {which}.")
    return text


def _table(condition: Condition, effects: Effects) -> ResultTable:
    rows: list[dict[str, Any]] = []
    for (tested_condition, method), by_metric in effects.items():
        if tested_condition != condition:
            continue
        by_change: dict[str, dict[str, Any]] = {}
        for metric, tested in by_metric.items():
            for effect in tested:
                row = by_change.setdefault(effect.change, {"method": method, "changed": effect.change})
                row |= _effect_values(metric, effect)
        rows += by_change.values()
    columns = ["method", "changed", *(column for metric in CELL_METRICS for column in _columns(metric))]
    return ResultTable(f"{condition}: one change at a time", columns, rows)


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
