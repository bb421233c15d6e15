"""What moves a cell: every run once more with one thing changed, to test why ours differs from the paper's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooring.lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.paper.ablations.changes import BASE, CHANGES, Change
from mooring.paper.claims.claim import told
from mooring.paper.context.cell import METRICS, Cell, cell
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import ROWS, Case, Scale
from mooring.paper.context.seed_rows import first_cases
from mooring.paper.figures.importance_by_layer import setting
from mooring.paper.published.published_numbers import PLAINS

__all__ = ["METHODS", "Effect", "count", "run"]

METHODS = ROWS
"""All of the main table."""

Place = tuple[Case, str]
"""A data set and a method."""


@dataclass(frozen=True)
class Effect:
    """What a change does to a metric.

    Attributes:
        change: what is changed.
        before, after: over the seeds that finished; None where none did.
        shift: after minus before, seed by seed; None where no seed finished with and without the change.
        strict: the same at a confidence that counts how many changes were tried on the cell.
        base, then: the cells without and with it; None where the paper has no number.
    """

    change: str
    before: Interval | None
    after: Interval | None
    shift: Interval | None
    strict: Interval | None
    base: Cell | None
    then: Cell | None

    @property
    def verdict(self) -> str:
        """Whether it brings ours to the paper's, beyond chance.

        A change whose interval holds 0 has no sure effect, and explains nothing. One whose strict interval holds 0 may
        be the one in twenty that seems to have an effect.
        """
        if self.after is None:
            return "does not finish"
        if self.before is None:
            return "finishes, and agrees" if self.then is not None and self.then.near else "finishes"
        if self.shift is None or math.isnan(self.shift.low):
            return "not decided"
        if not _beyond(self.shift):
            return "no sure effect"
        if self.base is None or self.then is None:
            return "higher" if self.shift.mean > 0 else "lower"
        if self.base.near:
            return "still agrees" if self.then.near else "moves away"
        if self.then.near:
            return "explains it" if self.strict is not None and _beyond(self.strict) else "may explain it"
        if self.base.difference * self.then.difference < 0:
            return "overshoots"
        return "moves towards" if abs(self.then.difference) < abs(self.base.difference) else "moves away"


def _beyond(found: Interval) -> bool:
    """Whether an interval does not hold 0."""
    return found.low > 0 or found.high < 0


def count(scale: Scale) -> int:
    """How many models it trains at most; with one backbone, or none, there is less to change.

    Example:
        >>> from mooring.paper.context.scale import PAPER
        >>> count(PAPER)  # 13 methods, 7 of them with 9 to 14 changes, 5 seeds, 3 data sets
        1575
    """
    each = sum(1 + sum(change.trains and change.fits(method) for change in CHANGES) for method in METHODS)
    return each * scale.seeds * len(scale.streams)


def run(lab: Laboratory) -> Finding:
    """Every change of every method on every data set in the first regime, at the paper's settings."""
    wanted = {(case, method): _specs(lab, case, method) for case in first_cases(lab.scale) for method in METHODS}
    specs = [spec for changed in wanted.values() for some in changed.values() for spec in some]
    known = lab.run(specs)
    found: dict[Place, dict[str, list[Effect]]] = {}
    for place, changed in wanted.items():
        runs = {name: [known[spec] for spec in some] for name, some in changed.items()}
        found[place] = {metric: _effects(place, runs, metric) for metric in METRICS}
    reasons = {(*place, m): _reason(some) for place, both in found.items() for m, some in both.items() if _off(some)}
    tables = [_table(case, found) for case in first_cases(lab.scale)]
    return Finding("reasons", _said(found, reasons), tables, list(known.values()), reasons=reasons)


def _specs(lab: Laboratory, case: Case, method: str) -> dict[str, list[RunSpec]]:
    """The runs of each change that there is, one for each seed; those without any first."""
    at = setting(lab.scale, case, method, "explicit-ewc" if method == "plain" else method)
    base = [lab.spec(case, method, seed, at) for seed in range(lab.scale.seeds)]
    made = {}
    for change in (BASE, *CHANGES):
        some = [change.spec(lab, case, spec) for spec in base] if change.fits(method) else [None]
        if None not in some:
            made[change.name] = [spec for spec in some if spec is not None]
    return made


def _effects(place: Place, runs: Mapping[str, Sequence[Result]], metric: str) -> list[Effect]:
    """What each change does to a metric; the first is no change."""
    base = _scores(BASE, runs[BASE.name], metric)
    before = confidence_interval(list(base.values())) if base else None
    tried = [each for each in (BASE, *CHANGES) if each.name in runs and (each.trains or metric == "forgetting")]
    chance = 0.05 / max(1, len(tried) - 1)
    found = []
    for change in tried:
        scores = _scores(change, runs[change.name], metric)
        after = confidence_interval(list(scores.values())) if scores else None
        both = [seed for seed in scores if seed in base]
        pairs = ([scores[seed] for seed in both], [base[seed] for seed in both])
        shift, strict = (paired_difference(*pairs, 1 - p) if both else None for p in (0.05, chance))
        cells = (cell(*place, metric, before), cell(*place, metric, after))
        found.append(Effect(change.name, before, after, shift, strict, *cells))
    return found


def _scores(change: Change, results: Sequence[Result], metric: str) -> dict[int, float]:
    return {r.spec.seed: change.score(r, metric) for r in results if r.status == "finished"}


def _off(effects: Sequence[Effect]) -> bool:
    """Whether ours is not the paper's before anything is changed."""
    base = effects[0]
    return base.base is not None and base.base.near is False


def _reason(effects: Sequence[Effect]) -> str:
    """What was found about a cell that differs, in a few words."""
    changed = effects[1:]
    for verdict, word in (("explains it", "explained by"), ("may explain it", "perhaps explained by")):
        if named := [f"{each.change} ({told(each.shift)})" for each in changed if each.verdict == verdict]:
            return f"{word} {' or '.join(named)}"
    nearer = [effect for effect in changed if effect.verdict in ("moves towards", "overshoots")]
    text = f"no reason found among {pluralize(len(changed), 'single change')}"
    if not nearer:
        return f"{text}, and none surely moves it towards the paper's"
    closest = min(nearer, key=_distance)
    left = "" if closest.then is None else f", with which {closest.then.difference:+.2f} is left"
    return f"{text}; of those that surely move it {closest.change} comes closest{left}"


def _distance(effect: Effect) -> float:
    return math.inf if effect.then is None else abs(effect.then.difference)


def _said(found: Mapping[Place, Mapping[str, Sequence[Effect]]], reasons: Mapping[Any, str]) -> list[str]:
    text = [
        "One thing is changed at a time, at the paper's settings in the first regime. A change explains a cell where "
        "ours differs from the paper's without it, agrees with it, and is moved by it beyond chance: the interval of "
        "the difference over seeds does not hold 0, at 95 % for all changes of the cell together (Bonferroni). It may "
        "explain it where that is so at 95 % for the change alone, as it would be for one change in twenty that does "
        "nothing. Tables show the latter. Where the paper gives no standard deviation, ours stands for it.",
        "Another order of classes is one other order; its tasks for the search are cut off in the same way. Strengths "
        "x 2 and / 2 stand for the factor 1/2 of a penalty; x batch and / batch for importance from the gradients of "
        "single samples or of batches. Fresh heads start at random in every task, and not from the head of the task "
        f"before. {PLAINS}",
    ]
    cells = [effects[0] for both in found.values() for effects in both.values() if effects[0].base is not None]
    if not cells:
        return [*text, "The paper has no numbers for these data sets: there is nothing to explain."]
    explained, perhaps = (sum(r.startswith(word) for r in reasons.values()) for word in ("explained", "perhaps"))
    text.append(
        f"Of {len(cells)} cells {len(reasons)} differ from the paper's; {explained} of these are explained by a single "
        f"change, {perhaps} perhaps, {len(reasons) - explained - perhaps} are not."
    )
    for (case, method), both in found.items():
        parts = []
        for metric, effects in both.items():
            base = effects[0].base
            if (case, method, metric) in reasons and base is not None:
                parts.append(f"{metric} differs by {base.difference:+.2f}: {reasons[case, method, metric]}")
        if parts:
            text.append(f"{case.data}, {method}: {'; '.join(parts)}.")
        if both[METRICS[0]][0].before is None:
            finishing = [effect.change for effect in both[METRICS[0]][1:] if effect.after is not None]
            which = f"some did with {', '.join(finishing)}" if finishing else "none did with a change"
            text.append(f"{case.data}, {method}: no seed finished at the paper's setting; {which}.")
    return text


def _table(case: Case, found: Mapping[Place, Mapping[str, Sequence[Effect]]]) -> Table:
    rows: list[dict[str, Any]] = []
    for (where, method), both in found.items():
        if where != case:
            continue
        by_name: dict[str, dict[str, Any]] = {}
        for metric, effects in both.items():
            for effect in effects:
                row = by_name.setdefault(effect.change, {"method": method, "changed": effect.change})
                row |= _shown(metric, effect)
        rows += by_name.values()
    columns = ["method", "changed", *(column for metric in METRICS for column in _columns(metric))]
    return Table(f"{case}: one thing changed at a time", columns, rows)


def _columns(metric: str) -> list[str]:
    return [metric, f"{metric} changes by", f"{metric} from the paper's", f"{metric}: what it does"]


def _shown(metric: str, effect: Effect) -> dict[str, Any]:
    base = effect.change == BASE.name
    values = (
        None if effect.after is None else str(effect.after),
        None if base or effect.shift is None else told(effect.shift),
        None if effect.then is None else round(effect.then.difference, 2),
        _standing(effect) if base else effect.verdict,
    )
    return dict(zip(_columns(metric), values, strict=True))


def _standing(effect: Effect) -> str | None:
    """How ours stands before anything is changed."""
    if effect.base is None or effect.base.near is None:
        return None
    return "agrees" if effect.base.near else "differs"
