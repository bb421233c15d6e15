"""Why cells differ from the paper's: a note for every cell, and one line for all cells with the same reason."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mooring_lab.model.plurals import pluralize
from mooring_paper.context.scale import EXPLICIT, REGULARIZERS, REPLAY, Condition
from mooring_paper.context.target_result import PaperCell, Reason, ResultTable, TargetResult, means_agree

CellKey = tuple[Condition, str, str]
"""Condition, method and metric of a cell."""

METHOD_GROUPS = (("the penalties", REGULARIZERS), ("the explicit step", EXPLICIT), ("replay", REPLAY))
"""Names for several methods."""


def _plain_reason(text: str) -> Reason:
    return Reason(text, (text,))


SETTING_EXPLAINS = _plain_reason("explained by the setting: it agrees at the paper's setting")
NOT_FINISHED = _plain_reason("no seed finished at the paper's setting, so that no change could be tested")
UNTESTED = _plain_reason("no change was tested under this condition")
OPPOSITE = "the search: at the paper's setting they differ in the opposite direction"
NO_EFFECT = "not decided: it agrees at the paper's setting, but the setting has no significant effect"


def add_table_notes(results: Sequence[TargetResult]) -> list[TargetResult]:
    """Return the results with a note below each table for every cell that differs from the paper's.

    Without the target `reasons` among the results, the notes say that nothing was tested.

    Example:
        >>> add_table_notes([TargetResult("grids", ["The search tried 112 settings."])])[0].text
        ['The search tried 112 settings.']
    """
    reasons = tested_reasons(results)
    noted = []
    for result in results:
        at_paper_setting = _cells_at_paper_setting(result)
        tables = [replace(table, notes=_notes(table, at_paper_setting, reasons)) for table in result.tables]
        noted.append(replace(result, tables=tables))
    return noted


def tested_reasons(results: Sequence[TargetResult]) -> Mapping[CellKey, Reason] | None:
    """Return the reasons of the target `reasons`; None if it is not among the results."""
    return next((result.reasons for result in results if result.name == "reasons"), None)


def difference_lines(result: TargetResult, settings: str, reasons: Mapping[CellKey, Reason] | None) -> list[str]:
    """Return one line for all cells of a table that differ for the same reason, the most frequent reason first.

    A cell that several changes explain is listed with the change that explains most cells.

    Args:
        result: the main table.
        settings: how the titles of the tables to use end.
        reasons: why cells differ at the paper's settings; None if this was not tested.
    """
    at_paper_setting = _cells_at_paper_setting(result)
    tables = [table for table in result.tables if table.title.endswith(settings)]
    differing = [cell for table in tables for cell in table.cells if cell.differs]
    if reasons is None:
        return [_untested(differing)] if differing else []
    causes = {}
    for cell in differing:
        key = (cell.condition, cell.method, cell.metric)
        causes[key] = _explanation(cell, at_paper_setting.get(key), reasons.get(key, UNTESTED)).causes
    frequency = Counter(cause for names in causes.values() for cause in names)
    groups: dict[str, list[PaperCell]] = defaultdict(list)
    for cell in differing:
        names = causes[cell.condition, cell.method, cell.metric]
        groups[max(names, key=lambda name: frequency[name])].append(cell)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [f"**{cause[0].upper()}{cause[1:]}** ({pluralize(len(c), 'cell')}): {_members(c)}." for cause, c in ordered]


def _members(cells: Sequence[PaperCell]) -> str:
    """Return the cells by condition and metric, with the range of their differences."""
    groups: dict[Condition, dict[str, list[PaperCell]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        groups[cell.condition][cell.metric].append(cell)
    parts = []
    for condition, by_metric in groups.items():
        metrics = []
        for metric, members in by_metric.items():
            low, high = (f"{bound(cell.difference for cell in members):+.2f}" for bound in (min, max))
            by = low if low == high else f"{low} to {high}"
            metrics.append(f"{metric} of {name_methods([cell.method for cell in members])} by {by}")
        parts.append(f"{condition.regime.name}, {condition.data}: {', '.join(metrics)}")
    return "; ".join(parts)


def name_methods(methods: Sequence[str]) -> str:
    """Return the names of methods, with one name for a group that is complete.

    Example:
        >>> name_methods(["plain", "explicit-ewc", "explicit-mas", "explicit-si", "explicit-rwalk", "er"])
        'plain, er, the explicit step'
    """
    complete = [(name, group) for name, group in METHOD_GROUPS if set(group) <= set(methods)]
    grouped = {method for _, group in complete for method in group}
    return ", ".join([*(method for method in methods if method not in grouped), *(name for name, _ in complete)])


def _cells_at_paper_setting(result: TargetResult) -> dict[CellKey, PaperCell]:
    cells = [cell for table in result.tables for cell in table.cells if cell.at_paper_setting]
    return {(cell.condition, cell.method, cell.metric): cell for cell in cells}


def _untested(differing: Sequence[PaperCell]) -> str:
    differ = "differs" if len(differing) == 1 else "differ"
    return f"{pluralize(len(differing), 'cell')} {differ} from the paper; `mooring paper reasons` tests why."


def _notes(
    table: ResultTable, at_paper_setting: Mapping[CellKey, PaperCell], reasons: Mapping[CellKey, Reason] | None
) -> list[str]:
    differing = [cell for cell in table.cells if cell.differs]
    if differing and reasons is None:
        return [_untested(differing)]
    notes: dict[str, list[str]] = {}
    for cell in differing:
        key = (cell.condition, cell.method, cell.metric)
        explanation = _explanation(cell, at_paper_setting.get(key), (reasons or {}).get(key, UNTESTED))
        notes.setdefault(cell.method, []).append(f"{cell.metric} differs by {cell.difference:+.2f}: {explanation.text}")
    return [f"{method}: {'; '.join(parts)}." for method, parts in notes.items()]


def _explanation(cell: PaperCell, at_paper_setting: PaperCell | None, reason: Reason) -> Reason:
    """Return why a cell differs; the reasons were tested at the paper's setting."""
    if cell.at_paper_setting:
        return reason
    if at_paper_setting is None:
        return NOT_FINISHED if reason == UNTESTED else reason
    other = at_paper_setting.ours
    if other == cell.ours:  # both settings are the same
        return reason
    difference = f"{at_paper_setting.difference:+.2f}"
    if not at_paper_setting.differs:
        if means_agree(cell.ours, other.mean, other.std, other.count) is False:
            return SETTING_EXPLAINS
        text = f"at the paper's setting by {difference}, within chance, but the setting has no significant effect"
        return Reason(text, (NO_EFFECT,))
    if at_paper_setting.difference * cell.difference < 0:
        return Reason(f"in the opposite direction at the paper's setting, by {difference} ({reason.text})", (OPPOSITE,))
    return Reason(f"at the paper's setting by {difference}, {reason.text}", reason.causes)
