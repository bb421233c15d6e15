"""The verdict: how many cells of the main table agree with the paper, and how many of its claims hold."""

from collections.abc import Sequence

from mooring_lab.model.plurals import pluralize
from mooring_paper.context.scale import EXPLICIT, REGULARIZERS
from mooring_paper.context.target_result import BOUNDS, PaperCell, TargetResult
from mooring_paper.tables.accuracy_tables import OUR_SETTINGS, PAPER_SETTINGS

FAMILIES_OF_THE_TABLE = {
    "explicit step": EXPLICIT,
    "penalties": (*REGULARIZERS, "uniform", "random"),
    "plain fine-tuning": ("plain",),
    "replay": ("a-gem", "er"),
}


def verdict_sentences(results: Sequence[TargetResult]) -> list[str]:
    """Return whether the paper reproduces: cells that agree, by family of methods, and claims that hold."""
    by_name = {result.name: result for result in results}
    sentences = _cell_sentences(by_name["table1"]) if "table1" in by_name else []
    return sentences + (_claim_sentences(by_name["claims"]) if "claims" in by_name else [])


def agreement(cells: Sequence[PaperCell]) -> str:
    """Return how many cells agree, as text.

    Example:
        >>> agreement([])
        '0 of 0'
    """
    return f"{sum(cell.differs is False for cell in cells)} of {len(cells)}"


def cells_at(result: TargetResult, settings: str) -> list[PaperCell]:
    """Return the cells of the tables whose titles end with `settings`."""
    return [cell for table in result.tables if table.title.endswith(settings) for cell in table.cells]


def main_settings(result: TargetResult) -> str:
    """Return how the titles of the tables end that the page begins with: at the paper's settings, if it has numbers.

    At the same settings, a difference is one of the runs and not of the search.
    """
    return PAPER_SETTINGS if cells_at(result, PAPER_SETTINGS) else OUR_SETTINGS


def _cell_sentences(result: TargetResult) -> list[str]:
    cells = cells_at(result, main_settings(result))
    if not cells:
        return ["The paper has no numbers for these data sets, so that no cell of the main table can be compared."]
    near = sum(cell.within_bounds for cell in cells)
    bounds = " or ".join(f"{bound} points of {metric}" for metric, bound in BOUNDS.items())
    undecided, absent = sum(cell.differs is None for cell in cells), _unfinished_cells(result)
    few = f" With too few seeds, {pluralize(undecided, 'cell')} cannot be judged." if undecided else ""
    none = f" In {pluralize(absent, 'more cell')} no seed of ours finished." if absent else ""
    families = {
        name: [cell for cell in cells if cell.method in methods] for name, methods in FAMILIES_OF_THE_TABLE.items()
    }
    parts = ", ".join(f"{name} {agreement(members)}" for name, members in families.items() if members)
    return [
        f"**{agreement(cells)} cells of the main table agree with the paper**: {near} within {bounds}, "
        f"{sum(c.differs is False for c in cells) - near} more within chance (Welch's t-test at 95 %).{few}{none}",
        f"Cells that agree, by family: {parts}; at the settings of our own search, "
        f"{agreement(cells_at(result, OUR_SETTINGS))} in all.",
    ]


def _unfinished_cells(result: TargetResult) -> int:
    """Return in how many cells the paper has a number and no run of ours finished."""
    tables = [table for table in result.tables if table.title.endswith(main_settings(result))]
    return sum(
        row[metric] is None and row[f"paper's {metric}"] is not None
        for table in tables
        for row in table.rows
        for metric in BOUNDS
    )


def _claim_sentences(result: TargetResult) -> list[str]:
    verdicts = [row["verdict"] for table in result.tables for row in table.rows]
    holds, fails, undecided = (verdicts.count(name) for name in ("holds", "does not hold", "not decided"))
    return [f"**Of {len(verdicts)} claims, {holds} hold**, {fails} do not hold, and {undecided} are not decided."]
