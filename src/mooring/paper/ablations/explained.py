"""Under each table, why its cells differ from the paper's: what was tested, and what was not."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mooring.lab.model.plurals import pluralize
from mooring.paper.context.cell import Cell, agrees
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import Case

__all__ = ["explained"]

Reasons = Mapping[tuple[Case, str, str], str]


def explained(findings: Sequence[Finding]) -> list[Finding]:
    """The same findings, their tables with a note for every cell that differs from the paper's.

    Args:
        findings: of any targets; without `reasons` among them nothing was tested, and the notes say so.

    Example:
        >>> explained([Finding("grids", ["112 settings were tried."])])[0].text
        ['112 settings were tried.']
    """
    reasons = next((finding.reasons for finding in findings if finding.name == "reasons"), None)
    told = []
    for finding in findings:
        cells = [cell for table in finding.tables for cell in table.cells if cell.at_papers]
        at_papers = {(cell.case, cell.method, cell.metric): cell for cell in cells}
        tables = [replace(table, notes=_notes(table, at_papers, reasons)) for table in finding.tables]
        told.append(replace(finding, tables=tables))
    return told


def _notes(table: Table, at_papers: Mapping[tuple[Case, str, str], Cell], reasons: Reasons | None) -> list[str]:
    """A line for each method with a cell that differs."""
    off = [cell for cell in table.cells if cell.near is False]
    if off and reasons is None:
        return [f"{pluralize(len(off), 'cell')} not as in the paper; `mooring paper reasons` tests why."]
    notes: dict[str, list[str]] = {}
    for cell in off:
        key = (cell.case, cell.method, cell.metric)
        reason = _reason(cell, at_papers.get(key), (reasons or {}).get(key))
        notes.setdefault(cell.method, []).append(f"{cell.metric} differs by {cell.difference:+.2f}: {reason}")
    return [f"{method}: {'; '.join(parts)}." for method, parts in notes.items()]


def _reason(cell: Cell, at_papers: Cell | None, reason: str | None) -> str:
    if cell.at_papers:
        return reason or _untested(cell)
    if at_papers is None:
        return "not tested: no seed finished at the paper's setting"
    if at_papers.ours == cell.ours:  # the same setting
        return reason or _untested(cell)
    moved = agrees(cell.ours, at_papers.ours.mean, at_papers.ours.std, at_papers.ours.count) is False
    there = f"{at_papers.difference:+.2f}"
    if at_papers.near and moved:
        return "explained by the setting: at the paper's it agrees"
    if at_papers.near:
        return f"at the paper's setting by {there}, which chance allows, but the setting does not surely move it"
    if at_papers.difference * cell.difference < 0:
        return f"at the paper's setting the other way, by {there} ({reason or _untested(cell)})"
    return f"at the paper's setting by {there}, {reason or _untested(cell)}"


def _untested(cell: Cell) -> str:
    return f"not tested with {cell.case.network} in {cell.case.regime.name}"
