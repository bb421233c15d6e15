"""The blocks of a page and their Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mooring_lab.report.picture import Drawing
from mooring_paper.context.target_result import ResultTable

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


def titled_tables(tables: Sequence[ResultTable]) -> list[Block]:
    """Return tables, each below its title."""
    return [block for table in tables for block in (f"**{table.title}**", table)]


def figure_block(drawing: Drawing, file: str, caption: str) -> str:
    """Return a picture and its caption, which describes it; the title stands in for the picture."""
    return f"![{drawing.title}]({file})\n\n{caption}".rstrip()


def flatten(blocks: Sequence[Block]) -> Iterator[str | ResultTable]:
    """Yield the blocks without folding."""
    for block in blocks:
        yield from flatten(block.blocks) if isinstance(block, FoldedBlock) else (block,)


def sentences(blocks: Sequence[Block]) -> list[str]:
    """Return the paragraphs and list items of blocks.

    Example:
        >>> sentences(["## Title", "A sentence.", *bullet_list(["one", "two"])])
        ['A sentence.', 'one', 'two']
    """
    texts = [block for block in flatten(blocks) if isinstance(block, str) and not block.startswith(NOT_SENTENCES)]
    return [line.removeprefix("- ") for text in texts for line in text.splitlines()]
