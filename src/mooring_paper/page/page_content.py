"""The content of the page, in its order: verdict, main table, what differs and why, another backbone, details."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mooring_lab.model.results import Result
from mooring_lab.report.numbers import MISSING
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.page.backbone_levels import Findings, compare_levels, unmatched_claims
from mooring_paper.page.blocks import (
    Block,
    BulletList,
    CodeBlock,
    FigureBlock,
    FoldedBlock,
    Heading,
    Paragraph,
    TableBlock,
)
from mooring_paper.page.compact_tables import (
    NOT_ALL_SEEDS,
    changes_table,
    claims_tables,
    compact_table,
    settings_table,
)
from mooring_paper.page.difference_notes import difference_lines, tested_reasons
from mooring_paper.page.provenance import (
    BACKBONES_TITLE,
    backbone_level,
    backbones_table,
    missing_data_lines,
    protocol_lines,
    training_summary,
)
from mooring_paper.page.verdict import agreement, cells_at, main_settings, verdict_sentences
from mooring_paper.published.numbering import ITEMS
from mooring_paper.tables.accuracy_tables import OUR_SETTINGS, PAPER_SETTINGS
from mooring_paper.targets import TARGETS, lacks_data

PAGE = "page"
"""The entry of `findings.json` with every sentence and table of the page."""


@dataclass(frozen=True)
class OtherReproduction:
    """A reproduction to compare with.

    Attributes:
        findings: the content of its `findings.json`.
        page: its page, relative to the folder of this one; empty if it is too far away.
    """

    findings: Findings
    page: str = ""


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
    "Each change was made alone, and the cell was computed again. A change explains a cell if our mean moves "
    'significantly and then agrees with the paper\'s. "Perhaps": only without a correction for the number of changes. '
    "The target `reasons` below lists the changes."
)


def page_blocks(
    results: Sequence[TargetResult],
    context: PaperContext,
    figures: Mapping[str, Sequence[FigureBlock]],
    runs: Sequence[Result],
    *,
    command: str,
    other: OtherReproduction | None = None,
) -> list[Block]:
    """Return the blocks of the page; parts whose targets were not run are left out.

    Args:
        results: the results of targets.
        context: the source of their runs.
        figures: the figures of each target.
        runs: all runs.
        command: the command that repeats the reproduction.
        other: a reproduction from other backbones, to compare with.
    """
    by_name = {result.name: result for result in results}
    blocks: list[Block] = [Paragraph(MINIATURE_NOTE)] if "digits" in context.scale.streams else []
    blocks += [Paragraph(sentence, "lede") for sentence in verdict_sentences(results)]
    if "table1" in by_name:
        blocks += _main_table(by_name["table1"], results)
    backbones = backbones_table(context)
    if other is not None:
        blocks += _levels({result.name: result.to_json() for result in results}, backbones, other)
    blocks += [Heading("Details"), *_details(results, by_name, figures)]
    protocol = BulletList(protocol_lines(context, results, backbones))
    blocks.append(FoldedBlock("Protocol: what follows the paper and what does not", [protocol]))
    blocks.append(_made(context, runs, command, backbones))
    blocks.append(FoldedBlock("The paper's own numbers: which target is which", [TableBlock(_item_table(context))]))
    return blocks


def page_findings(blocks: Sequence[Block]) -> TargetResult:
    """Return every sentence and table of the page as a result, so that `findings.json` has all of its numbers."""
    text: list[str] = []
    tables: list[ResultTable] = []
    for block in _flatten(blocks):
        match block:
            case Paragraph():
                text.append(block.text)
            case BulletList():
                text += block.items
            case TableBlock():
                tables.append(block.table)
    return TargetResult(PAGE, text, tables)


def _flatten(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        if isinstance(block, FoldedBlock):
            yield from _flatten(block.blocks)
        else:
            yield block


def _backbones_in(findings: Findings) -> ResultTable:
    tables = findings.get(PAGE, {}).get("tables", ())
    rows = next((table["rows"] for table in tables if table["title"] == BACKBONES_TITLE), ())
    return ResultTable(BACKBONES_TITLE, (), rows)


def _levels(here: Findings, backbones: ResultTable, other: OtherReproduction) -> list[Block]:
    """Return the part about a reproduction from other backbones."""
    text, tables = compare_levels(here, other.findings)
    starts = [backbone_level(table) for table in (backbones, _backbones_in(other.findings))]
    if all(starts):
        text.insert(0, f"Here runs start from {starts[0]}, there from {starts[1]}.")
    if other.page:
        text.append(f"[The page of the other reproduction]({other.page})")
    blocks: list[Block] = [Heading("What another backbone changes"), *_paragraphs(text)]
    for table in tables:
        blocks += [Paragraph(f"**{table.title}**"), TableBlock(table, stacked=True)]
    if unmatched := unmatched_claims(here, other.findings):
        blocks.append(FoldedBlock("Claims that only one of the two tests", [BulletList(unmatched)]))
    return blocks


def _main_table(result: TargetResult, results: Sequence[TargetResult]) -> list[Block]:
    settings = main_settings(result)
    table = compact_table(result, "Table 1, ours and the paper's", settings)
    if table is None:
        return []
    blocks: list[Block] = [
        Heading("Table 1 beside the paper's"),
        TableBlock(table, stacked=True),
        Paragraph(LEGEND.format(settings=SETTINGS_IN_WORDS[settings]), "hint"),
    ]
    if cells_at(result, settings):
        reasons = tested_reasons(results)
        lines = difference_lines(result, settings, reasons) or [NO_DIFFERENCE]
        note = [Paragraph(CHANGES_NOTE)] if reasons and lines != [NO_DIFFERENCE] else []
        blocks += [Heading("What differs, and why"), *note, BulletList(lines)]
    return blocks


def _table_at_our_settings(result: TargetResult, results: Sequence[TargetResult]) -> list[Block]:
    """Return the main table at the settings of our search; nothing if the page begins with it."""
    table = compact_table(result, "Table 1 at our settings", OUR_SETTINGS)
    if table is None or main_settings(result) == OUR_SETTINGS:
        return []
    legend = f"{LEGEND.format(settings=SETTINGS_IN_WORDS[OUR_SETTINGS])} {NO_NUMBER_NOTE}"
    lines = difference_lines(result, OUR_SETTINGS, tested_reasons(results)) or [NO_DIFFERENCE]
    return [TableBlock(table, stacked=True), Paragraph(legend, "hint"), BulletList(lines)]


def _details(
    results: Sequence[TargetResult], by_name: Mapping[str, TargetResult], figures: Mapping[str, Sequence[FigureBlock]]
) -> Iterator[Block]:
    """Return a folded block for each target."""
    for result in results:
        blocks: list[Block] = []
        match result.name:
            case "table1":
                if not (blocks := _table_at_our_settings(result, results)):
                    continue
            case "grids":
                table = settings_table(result)
                compared: list[Block] = [Paragraph(SETTINGS_LEGEND, "hint"), TableBlock(table)] if table.rows else []
                blocks = [*_paragraphs(result.text[:1]), *compared]
            case "resnet":
                blocks = _second_table(result)
            case "claims":
                for table in claims_tables(result):
                    blocks += [Paragraph(f"**{table.title}**"), TableBlock(table)]
            case "reasons":
                blocks = [TableBlock(changes_table(result))]
            case _:
                # The claims say in fewer words what sentences of their sources say.
                covered = "claims" in by_name and result.name in TARGETS["claims"].needs
                sentences = () if covered else _paragraphs(result.text)
                blocks = [*sentences, *_without_repetition(figures[result.name])]
        where = ", at the settings of our search" if result.name == "table1" else ""
        yield FoldedBlock(f"{result.name}: {TARGETS[result.name].summary}{where}", blocks)


def _second_table(result: TargetResult) -> list[Block]:
    settings = main_settings(result)
    table, cells = compact_table(result, "The second network", settings), cells_at(result, settings)
    count = [Paragraph(f"{agreement(cells)} cells agree with the paper.")] if cells else []
    return [] if table is None else [*count, TableBlock(table, stacked=True)]


def _made(context: PaperContext, runs: Sequence[Result], command: str, backbones: ResultTable) -> FoldedBlock:
    """Return what was trained, from which backbones, and how to repeat it."""
    start = "Seed k starts from backbone k of its network, modulo their number:"
    blocks: list[Block] = [Paragraph(training_summary(runs)), CodeBlock(command)]
    if missing := missing_data_lines(context):
        blocks.append(BulletList(missing))
    blocks += [Paragraph(start), TableBlock(backbones)] if context.weights else []
    blocks += [] if context.weights else [Paragraph("Every run starts from random weights.")]
    files = "[findings.json](findings.json) has every number, also those of the long tables that are not on this page; "
    blocks.append(Paragraph(f"{files}[runs.json](runs.json) has a row for each run."))
    return FoldedBlock("Runs, backbones, and how to repeat it", blocks)


def _item_table(context: PaperContext) -> ResultTable:
    """Return the map from the numbers of the paper to targets and functions; neighbours that are equal share a row."""
    rows: list[dict[str, str]] = []
    for item in ITEMS:
        here = "; ".join(f"`{name}`" for name in (item.target, item.function) if name)
        here += ", not run" if lacks_data(item, context.scale.missing_data) else ""
        row = {"in the paper": item.name, "what": item.subject, "here": here}
        if rows and [*rows[-1].values()][1:] == [*row.values()][1:]:
            rows[-1]["in the paper"] = f"{rows[-1]['in the paper'].split(' to ')[0]} to {item.number}"
        else:
            rows.append(row)
    return ResultTable("The paper's own numbers", ("in the paper", "what", "here"), rows)


def _without_repetition(figures: Sequence[FigureBlock]) -> list[FigureBlock]:
    """Return figures whose captions have no sentence of the figure before; figures of one target are read together."""
    shortened, before = [], set[str]()
    for figure in figures:
        sentences = re.split(r"(?<=\.) ", figure.caption)
        caption = " ".join(sentence for sentence in sentences if sentence not in before)
        shortened.append(replace(figure, caption=caption))
        before = set(sentences)
    return shortened


def _paragraphs(texts: Sequence[str]) -> list[Block]:
    return [Paragraph(text) for text in texts]
