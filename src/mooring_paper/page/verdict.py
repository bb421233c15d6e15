"""The verdict: how many cells agree with the paper, why others differ, and how many of its claims hold."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mooring_lab.model.plurals import pluralize
from mooring_paper.context.scale import EXPLICIT, REGULARIZERS, REPLAY, Condition
from mooring_paper.context.target_result import BOUNDS, CellKey, PaperCell, TargetResult, means_agree
from mooring_paper.tables.accuracy_tables import AS_PUBLISHED, OUR_SETTINGS, PAPER_SETTINGS

MOSTLY = 0.9
"""The share of numbers and claims from which on the paper is said to reproduce."""

FAMILIES_OF_THE_TABLE = {
    "explicit step": EXPLICIT,
    "penalties": (*REGULARIZERS, "uniform", "random"),
    "plain fine-tuning": ("plain",),
    "replay": ("a-gem", "er"),
}


def answer(results: Sequence[TargetResult]) -> list[str]:
    """Return whether the paper reproduces in two sentences; nothing without the main table and the claims."""
    by_name = {result.name: result for result in results}
    if not {"table1", "claims"} <= by_name.keys() or not (cells := cells_at(by_name["table1"], PAPER_SETTINGS)):
        return []
    verdicts = _verdicts(by_name["claims"])
    agree, hold = sum(cell.differs is False for cell in cells), verdicts.count("holds")
    share = min(agree / len(cells), hold / len(verdicts))
    word = "Yes" if share >= MOSTLY else "In part" if share >= 1 - MOSTLY else "Hardly"
    families = _families(cells)
    shares = {name: sum(cell.differs is False for cell in own) / len(own) for name, own in families.items()}
    best, worst = max(shares, key=lambda name: shares[name]), min(shares, key=lambda name: shares[name])
    return [
        f"**Does the paper reproduce? {word}**: at its own settings our runs agree with {agree} of {len(cells)} "
        f"numbers of its main table, and {hold} of its {len(verdicts)} claims hold. The {best} reproduces best "
        f"({agreement(families[best])} numbers) and {worst} least ({agreement(families[worst])})."
    ]


def verdict_sentences(results: Sequence[TargetResult]) -> list[str]:
    """Return the counts: cells that agree, by family of methods, differences that are explained, claims that hold."""
    by_name = {result.name: result for result in results}
    sentences = []
    if main := by_name.get("table1"):
        sentences += _cell_sentences(main) + _explained_sentences(main, tested_reasons(results))
    if (published := by_name.get("as-published")) and (cells := cells_at(published, AS_PUBLISHED)):
        sentences.append(f"With the definitions of the authors' code, {agreement(cells)} of their cells agree.")
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
    parts = ", ".join(f"{name} {agreement(members)}" for name, members in _families(cells).items())
    return [
        f"**{agreement(cells)} cells of the main table agree with the paper**: {near} within {bounds}, "
        f"{sum(c.differs is False for c in cells) - near} more within chance (Welch's t-test at 95 %).{few}{none}",
        f"Cells that agree, by family: {parts}; at the settings of our own search, "
        f"{agreement(cells_at(result, OUR_SETTINGS))} in all.",
    ]


def _families(cells: Sequence[PaperCell]) -> dict[str, list[PaperCell]]:
    """Return the cells of each family of methods that has any."""
    families = {name: [c for c in cells if c.method in methods] for name, methods in FAMILIES_OF_THE_TABLE.items()}
    return {name: members for name, members in families.items() if members}


def _explained_sentences(result: TargetResult, reasons: Mapping[CellKey, Sequence[str]] | None) -> list[str]:
    """Return how many differences of the main table are explained for certain, perhaps, and not at all."""
    groups = {} if reasons is None else _by_cause(result, main_settings(result), reasons)
    if not groups:
        return []
    counts = Counter({cause: len(cells) for cause, cells in groups.items()})
    sure = sum(count for cause, count in counts.items() if cause.startswith("explained by"))
    perhaps = sum(count for cause, count in counts.items() if cause.startswith("perhaps"))
    total = counts.total()
    return [
        f"**{total - sure - perhaps} of {pluralize(total, 'difference')} are not explained** by any change that was "
        f"tested; {sure} are explained, and {perhaps} perhaps."
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
    verdicts = _verdicts(result)
    holds, fails, undecided = (verdicts.count(name) for name in ("holds", "does not hold", "not decided"))
    return [f"**Of {len(verdicts)} claims, {holds} hold**, {fails} do not hold, and {undecided} are not decided."]


def _verdicts(result: TargetResult) -> list[str]:
    return [row["verdict"] for table in result.tables for row in table.rows]


# Why cells differ: one line for all cells with the same reason.

METHOD_GROUPS = (("the penalties", REGULARIZERS), ("the explicit step", EXPLICIT), ("replay", REPLAY))
"""Names for several methods."""


SETTING_EXPLAINS = "explained by the setting: it agrees at the paper's setting"
NOT_FINISHED = "no seed finished at the paper's setting, so that no change could be tested"
UNTESTED = "no change was tested under this condition"
OPPOSITE = "the search: at the paper's setting they differ in the opposite direction"
NO_EFFECT = "not decided: it agrees at the paper's setting, but the setting has no significant effect"


def tested_reasons(results: Sequence[TargetResult]) -> Mapping[CellKey, Sequence[str]] | None:
    """Return the reasons of the target `reasons`; None if it is not among the results."""
    return next((result.reasons for result in results if result.name == "reasons"), None)


def difference_lines(result: TargetResult, settings: str, reasons: Mapping[CellKey, Sequence[str]] | None) -> list[str]:
    """Return one line for all cells of a table that differ for the same reason, the most frequent reason first.

    A cell that several changes explain is listed with the change that explains most cells.

    Args:
        result: the main table.
        settings: how the titles of the tables to use end.
        reasons: why cells differ at the paper's settings; None if this was not tested.
    """
    if reasons is None:
        differing = _differing(result, settings)
        differ = "differs" if len(differing) == 1 else "differ"
        untested = f"{pluralize(len(differing), 'cell')} {differ} from the paper; `mooring paper reasons` tests why."
        return [untested] if differing else []
    ordered = sorted(_by_cause(result, settings, reasons).items(), key=lambda group: -len(group[1]))
    return [f"**{cause[0].upper()}{cause[1:]}** ({pluralize(len(c), 'cell')}): {_members(c)}." for cause, c in ordered]


def _differing(result: TargetResult, settings: str) -> list[PaperCell]:
    return [cell for cell in cells_at(result, settings) if cell.differs]


def _by_cause(
    result: TargetResult, settings: str, reasons: Mapping[CellKey, Sequence[str]]
) -> dict[str, list[PaperCell]]:
    """Return the cells that differ by their cause; one with several is listed with the most frequent of them."""
    at_paper_setting = {cell.key: cell for table in result.tables for cell in table.cells if cell.at_paper_setting}
    differing = _differing(result, settings)
    causes = {cell.key: _causes(cell, at_paper_setting.get(cell.key), reasons.get(cell.key)) for cell in differing}
    frequency = Counter(cause for names in causes.values() for cause in names)
    groups: dict[str, list[PaperCell]] = defaultdict(list)
    for cell in differing:
        groups[max(causes[cell.key], key=lambda name: frequency[name])].append(cell)
    return groups


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


def _causes(cell: PaperCell, at_paper_setting: PaperCell | None, reason: Sequence[str] | None) -> Sequence[str]:
    """Return why a cell differs; the reason was tested at the paper's setting, and is None if nothing was."""
    if at_paper_setting is None:
        return reason or [NOT_FINISHED]
    other = at_paper_setting.ours
    if cell.at_paper_setting or other == cell.ours:  # both settings are the same
        return reason or [UNTESTED]
    if not at_paper_setting.differs:
        significant = means_agree(cell.ours, other.mean, other.std, other.count) is False
        return [SETTING_EXPLAINS if significant else NO_EFFECT]
    return [OPPOSITE] if at_paper_setting.difference * cell.difference < 0 else reason or [UNTESTED]
