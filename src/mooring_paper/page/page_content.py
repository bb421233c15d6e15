"""The content of the page as Markdown, in its order: verdict, main table, what differs and why, details."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from mooring_lab.model.results import Result
from mooring_lab.report.numbers import MISSING
from mooring_lab.report.picture import Drawing
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.page import verdict
from mooring_paper.page.compact_tables import NOT_ALL_SEEDS, changes_table, claims_tables, compact_table, settings_table
from mooring_paper.page.protocol_table import protocol_table
from mooring_paper.page.provenance import backbones_table, missing_data_lines, training_summary
from mooring_paper.published.numbering import ITEMS
from mooring_paper.tables.accuracy_tables import AS_PUBLISHED, CODE_WIDTHS, OUR_SETTINGS, PAPER_SETTINGS
from mooring_paper.targets import TARGETS, lacks_data

NOT_SENTENCES = ("#", "```", "![")
"""How headings, code and figures begin."""


@dataclass(frozen=True)
class FoldedBlock:
    """Blocks that a reader unfolds.

    Attributes:
        title: the line that is always shown.
        blocks: what is below it.
    """

    title: str
    blocks: Sequence["Block"]

    def markdown(self) -> str:
        """Return a `details` element with Markdown in it, which GitHub and MkDocs render."""
        opening = f'<details markdown="1">\n<summary>{escape(self.title, quote=False)}</summary>'
        return f"{opening}\n\n{join_blocks(self.blocks)}\n\n</details>"


Block = str | ResultTable | FoldedBlock
"""Markdown, such as a paragraph or a list; a table; or blocks that a reader unfolds."""


def join_blocks(blocks: Sequence[Block]) -> str:
    """Return blocks as Markdown.

    Example:
        >>> join_blocks(["A sentence.", FoldedBlock("More", ["Another one."])]).splitlines()
        ['A sentence.', '', '<details markdown="1">', '<summary>More</summary>', '', 'Another one.', '', '</details>']
    """
    return "\n\n".join(block if isinstance(block, str) else block.markdown() for block in blocks)


def bullet_list(items: Sequence[str]) -> list[Block]:
    """Return a list of texts as a block; nothing if there are none."""
    return ["\n".join(f"- {item}" for item in items)] if items else []


def flatten(blocks: Sequence[Block]) -> Iterator[str | ResultTable]:
    """Yield the blocks without folding."""
    for block in blocks:
        yield from flatten(block.blocks) if isinstance(block, FoldedBlock) else (block,)


Figures = Mapping[str, Mapping[str, Drawing]]
"""The drawings of each target by the name of their PNG files."""

MINIATURE_NOTE = "A miniature on the embedded digits: it shows that every target works, and nothing about the paper."
LEGEND = (
    "Ours / the paper's, in percent; each method at {settings}. **≠**: they differ by more than the bounds and by more "
    f"than chance. {NOT_ALL_SEEDS}: not all seeds finished; {MISSING}: none did."
)
SETTINGS_IN_WORDS = {
    PAPER_SETTINGS: "the paper's learning rate and strength",
    OUR_SETTINGS: "the setting of our search",
}
NO_NUMBER_NOTE = "Controls have no second number: the paper does not report them."
SETTINGS_LEGEND = (
    'Learning rate and strength, ours / the paper\'s. "=" means that both are equal; a rate that alone is equal is '
    "written once."
)
NO_DIFFERENCE = "No cell differs."
CHANGES_NOTE = (
    "Each change was made alone, and the row was computed again. A change explains a difference if our mean moves "
    "significantly, and accuracy and forgetting of the row then both agree with the paper's. "
    '"Perhaps": only without a correction for the number of changes. The target `reasons` below lists the changes.'
)
FILES_NOTE = (
    "[findings.json](findings.json) has every number, also those of the long tables that are not on this page; "
    "[runs.json](runs.json) has a row for each run."
)


def page_blocks(
    results: Sequence[TargetResult], context: PaperContext, figures: Figures, runs: Sequence[Result], *, command: str
) -> list[Block]:
    """Return the blocks of the page; parts whose targets were not run are left out.

    Args:
        results: the results of targets.
        context: the source of their runs.
        figures: the drawings of each target.
        runs: all runs.
        command: the command that repeats the reproduction.
    """
    by_name = {result.name: result for result in results}
    blocks: list[Block] = [MINIATURE_NOTE] if "digits" in context.scale.streams else []
    blocks += [*verdict.answer(results), *bullet_list(verdict.verdict_sentences(results))]
    if main := by_name.get("table1"):
        compared = _compare(main, results, "Table 1, ours and the paper's", verdict.main_settings(main))
        blocks += ["## Table 1 beside the paper's", *compared] if compared else []
    backbones = backbones_table(context)
    blocks += ["## Details", *_details(results, figures)]
    dtypes = {run.spec.dtype for result in results if result.name != "reasons" for run in result.results}
    recipes = {str(row.get("recipe") or "not recorded") for row in backbones.rows}
    protocol = protocol_table(context.scale, dtypes, recipes)
    blocks.append(FoldedBlock("Protocol: the paper, the authors' code, and what is done here", [protocol]))
    details: list[Block] = [training_summary(runs), f"```\n{command}\n```", *bullet_list(missing_data_lines(context))]
    by_seed = ["Seed k starts from backbone k of its network, modulo their number:", backbones]
    details += [*(by_seed if context.backbones else ["Every run starts from random weights."]), FILES_NOTE]
    blocks.append(FoldedBlock("Runs, backbones, and how to repeat it", details))
    blocks.append(FoldedBlock("The paper's own numbers: which target is which", [_item_table(context)]))
    return blocks


def page_findings(blocks: Sequence[Block]) -> TargetResult:
    """Return every sentence and table of the page as a result, so that `findings.json` has all of its numbers.

    Example:
        >>> page_findings(["## Title", "A sentence.", FoldedBlock("More", bullet_list(["one", "two"]))]).text
        ['A sentence.', 'one', 'two']
    """
    flat = list(flatten(blocks))
    texts = [block for block in flat if isinstance(block, str) and not block.startswith(NOT_SENTENCES)]
    sentences = [line.removeprefix("- ") for text in texts for line in text.splitlines()]
    return TargetResult("page", sentences, [block for block in flat if isinstance(block, ResultTable)])


def _compare(result: TargetResult, results: Sequence[TargetResult], title: str, settings: str) -> list[Block]:
    """Return the compact table at some settings, its legend and what differs; nothing if there is no such table."""
    table = compact_table(result, title, settings)
    if table is None:
        return []
    main = settings == verdict.main_settings(result)
    legend = LEGEND.format(settings=SETTINGS_IN_WORDS[settings]) + ("" if main else f" {NO_NUMBER_NOTE}")
    if not verdict.cells_at(result, settings):
        return [table, legend]
    reasons = verdict.tested_reasons(results)
    lines = verdict.difference_lines(result, settings, reasons)
    heading = ["## What differs, and why", *([CHANGES_NOTE] if reasons and lines else [])] if main else []
    remarks = bullet_list(result.text) if main else []
    return [table, legend, *remarks, *heading, *bullet_list(lines or [NO_DIFFERENCE])]


def _details(results: Sequence[TargetResult], figures: Figures) -> Iterator[Block]:
    """Yield a folded block for each target: its sentences, its table and its figures."""
    for result in results:
        tables: list[Block] = []
        match result.name:
            case "table1" if verdict.main_settings(result) != OUR_SETTINGS:
                tables = _compare(result, results, "Table 1 at our settings", OUR_SETTINGS)
            case "grids" if (table := settings_table(result)).rows:
                tables = [SETTINGS_LEGEND, table]
            case "resnet":
                tables = _second_table(result)
            case "stand-in" if result.tables:
                (claims,) = claims_tables(replace(result, tables=result.tables[-1:]))
                tables = [*_stack(compact_table(result, "Caltech-101", OUR_SETTINGS)), f"**{claims.title}**", claims]
            case "as-published":
                settings = (AS_PUBLISHED, CODE_WIDTHS)
                tables = [block for end in settings for block in _stack(compact_table(result, f"Table {end}", end))]
            case "claims":
                tables = [block for table in claims_tables(result) for block in (f"**{table.title}**", table)]
            case "reasons":
                tables = [changes_table(result)]
        where = ", at the settings of our search" if result.name == "table1" else ""
        if tables or result.name != "table1":
            drawn = _figure_blocks(figures[result.name])
            text = [] if result.name == "table1" else result.text  # which is below the main table
            yield FoldedBlock(f"{result.name}: {TARGETS[result.name].summary}{where}", [*text, *tables, *drawn])


def _stack(table: ResultTable | None) -> list[Block]:
    """Return a table with its title; nothing if there is none."""
    return [] if table is None else [f"**{table.title}**", table]


def _second_table(result: TargetResult) -> list[Block]:
    settings = verdict.main_settings(result)
    table, cells = compact_table(result, "The second network", settings), verdict.cells_at(result, settings)
    count = [f"{verdict.agreement(cells)} cells agree with the paper."] if cells else []
    return [] if table is None else [*count, table]


def _item_table(context: PaperContext) -> ResultTable:
    """Return the map from the numbers of the paper to targets and functions; neighbours that are equal share a row."""
    rows: list[dict[str, str]] = []
    for item in ITEMS:
        here = "; ".join(f"`{name}`" for name in (item.target, item.function) if name)
        here += ", not run" if lacks_data(item, context.scale.missing_data) else ""
        row = {"in the paper": item.name, "what": item.subject, "here": here, "remark": item.remark}
        if rows and [*rows[-1].values()][1:] == [*row.values()][1:]:
            rows[-1]["in the paper"] = f"{rows[-1]['in the paper'].split(' to ')[0]} to {item.number}"
        else:
            rows.append(row)
    return ResultTable("The paper's own numbers", ("in the paper", "what", "here", "remark"), rows)


def _figure_blocks(drawings: Mapping[str, Drawing]) -> Iterator[str]:
    """Yield figures with their captions, without the sentences of the caption before: they are read together."""
    before = set[str]()
    for file, drawing in drawings.items():
        parts = re.split(r"(?<=\.) ", drawing.caption)
        caption = " ".join(part for part in parts if part not in before)
        yield f"![{drawing.title}]({file})\n\n{caption}".rstrip()
        before = set(parts)
