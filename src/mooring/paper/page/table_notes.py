"""The notes below each table: why its cells differ from the paper's, and what was not tested."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mooring.lab.model.plurals import pluralize
from mooring.paper.context.cell import PaperCell, means_agree
from mooring.paper.context.scale import Condition
from mooring.paper.context.target_result import ResultTable, TargetResult

__all__ = ["add_table_notes"]

CellKey = tuple[Condition, str, str]
"""Condition, method and metric of a cell."""


def add_table_notes(results: Sequence[TargetResult]) -> list[TargetResult]:
    """Return the results with a note below each table for every cell that differs from the paper's.

    Args:
        results: results of any targets; without `reasons` among them the notes say that nothing was tested.

    Example:
        >>> add_table_notes([TargetResult("grids", ["The search tried 112 settings."])])[0].text
        ['The search tried 112 settings.']
    """
    reasons = next((result.reasons for result in results if result.name == "reasons"), None)
    noted = []
    for result in results:
        cells = [cell for table in result.tables for cell in table.cells if cell.at_paper_setting]
        at_paper_setting = {(cell.condition, cell.method, cell.metric): cell for cell in cells}
        tables = [replace(table, notes=_notes(table, at_paper_setting, reasons)) for table in result.tables]
        noted.append(replace(result, tables=tables))
    return noted


def _notes(
    table: ResultTable, at_paper_setting: Mapping[CellKey, PaperCell], reasons: Mapping[CellKey, str] | None
) -> list[str]:
    """Return a line for each method with a cell that differs."""
    differing = [cell for cell in table.cells if cell.probably_agrees is False]
    if differing and reasons is None:
        differ = "differs" if len(differing) == 1 else "differ"
        return [f"{pluralize(len(differing), 'cell')} {differ} from the paper; `mooring paper reasons` tests why."]
    notes: dict[str, list[str]] = {}
    for cell in differing:
        key = (cell.condition, cell.method, cell.metric)
        explanation = _explanation(cell, at_paper_setting.get(key), (reasons or {}).get(key) or _untested(cell))
        notes.setdefault(cell.method, []).append(f"{cell.metric} differs by {cell.difference:+.2f}: {explanation}")
    return [f"{method}: {'; '.join(parts)}." for method, parts in notes.items()]


def _explanation(cell: PaperCell, at_paper_setting: PaperCell | None, reason: str) -> str:
    """Return why a cell differs; the reasons were tested at the paper's setting."""
    if cell.at_paper_setting:
        return reason
    if at_paper_setting is None:
        return "not tested: no seed finished at the paper's setting"
    other = at_paper_setting.ours
    if other == cell.ours:  # both settings are the same
        return reason
    difference = f"{at_paper_setting.difference:+.2f}"
    if at_paper_setting.probably_agrees:
        if means_agree(cell.ours, other.mean, other.std, other.count) is False:
            return "explained by the setting: it agrees at the paper's setting"
        return f"at the paper's setting by {difference}, within chance, but the setting has no significant effect"
    if at_paper_setting.difference * cell.difference < 0:
        return f"in the opposite direction at the paper's setting, by {difference} ({reason})"
    return f"at the paper's setting by {difference}, {reason}"


def _untested(cell: PaperCell) -> str:
    return f"not tested with {cell.condition.network} in {cell.condition.regime.name}"
