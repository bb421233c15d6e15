"""The blocks of a page, each as Markdown and as HTML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as html_escape
from itertools import groupby
from typing import Protocol

from markupsafe import Markup, escape

from mooring_lab.report.numbers import MISSING
from mooring_paper.context.target_result import ResultTable

_INLINE = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|\[([^\]]+)\]\(([^)\s]+)\)")
_NUMBER = re.compile(rf"[\d.,+%{MISSING}-]*")
_NUMBER_STYLE = Markup(' class="number"')
LONG_TEXT = 40
"""Characters from which a cell may be broken into lines."""


class Block(Protocol):
    """A part of a page that can be written as Markdown and as HTML."""

    def markdown(self) -> str:
        """Return the block as Markdown, without a blank line at its end."""

    def html(self) -> Markup:
        """Return the block as HTML."""


@dataclass(frozen=True)
class Heading:
    """The heading of a part."""

    text: str

    def markdown(self) -> str:
        """Return a heading of the second level."""
        return f"## {self.text}"

    def html(self) -> Markup:
        """Return a heading of the third level, which has the smaller space above it."""
        return Markup("<h3>{}</h3>").format(self.text)


@dataclass(frozen=True)
class Paragraph:
    """A text with code, bold words and links in the notation of Markdown."""

    text: str
    style: str = ""

    def markdown(self) -> str:
        """Return the text as it is."""
        return self.text

    def html(self) -> Markup:
        """Return a paragraph."""
        style = Markup(' class="{}"').format(self.style) if self.style else ""
        return Markup("<p{}>{}</p>").format(style, inline_html(self.text))


@dataclass(frozen=True)
class BulletList:
    """A list of texts."""

    items: Sequence[str]

    def markdown(self) -> str:
        """Return one line for each text."""
        return "\n".join(f"- {item}" for item in self.items)

    def html(self) -> Markup:
        """Return a list."""
        items = Markup("\n").join(Markup("<li>{}</li>").format(inline_html(item)) for item in self.items)
        return Markup("<ul>\n{}\n</ul>").format(items)


@dataclass(frozen=True)
class CodeBlock:
    """A command."""

    text: str

    def markdown(self) -> str:
        """Return a fenced block."""
        return f"```\n{self.text}\n```"

    def html(self) -> Markup:
        """Return preformatted text that scrolls."""
        return Markup('<div class="scroll" tabindex="0"><pre><code>{}</code></pre></div>').format(self.text)


@dataclass(frozen=True)
class TableBlock:
    """A table; columns named "GROUP: NAME" share a heading in HTML.

    Attributes:
        table: the table.
        stacked: whether the columns of a group are stacked into one in Markdown, where a page is narrow.
    """

    table: ResultTable
    stacked: bool = False

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return (stack_groups(self.table) if self.stacked else self.table).markdown()

    def html(self) -> Markup:
        """Return the table in a frame that scrolls, the first column as row headings."""
        texts = self.table.texts()
        numeric = [all(_NUMBER.fullmatch(text) for text in column) for column in zip(*texts, strict=True)]
        rows = Markup("\n").join(_html_row(row, numeric) for row in texts)
        frame = '<div class="scroll" role="region" aria-label="{0}" tabindex="0">\n<table>\n'
        caption = '<caption class="unseen">{0}</caption>\n<thead>\n{1}\n</thead>\n<tbody>\n{2}\n</tbody>\n'
        return Markup(frame + caption + "</table>\n</div>").format(self.table.title, self._html_head(numeric), rows)

    def _html_head(self, numeric: Sequence[bool]) -> Markup:
        parts = [column.rpartition(": ") for column in self.table.columns]
        styles = [_NUMBER_STYLE if is_number else Markup() for is_number in numeric]
        heads = zip(styles, parts, strict=True) if numeric else ((Markup(), part) for part in parts)
        names = _html_cells([Markup('<th{} scope="col">{}</th>').format(style, part[2]) for style, part in heads])
        if not any(group for group, _, _ in parts):
            return names
        groups = [(group, len(list(members))) for group, members in groupby(group for group, _, _ in parts)]
        spans = [Markup('<th colspan="{}" scope="colgroup">{}</th>').format(count, group) for group, count in groups]
        return _html_cells(spans) + Markup("\n") + names


@dataclass(frozen=True)
class FigureBlock:
    """A figure with its caption.

    Attributes:
        file: the name of its PNG file, next to the page.
        title: the line above it.
        caption: how to read it.
        alt: a description for readers who cannot see it.
        svg: the picture for the HTML page.
    """

    file: str
    title: str
    caption: str
    alt: str
    svg: Markup

    def markdown(self) -> str:
        """Return the picture and its caption, which describes it; the title stands in for the picture."""
        return f"![{self.title}]({self.file})\n\n{self.caption}".rstrip()

    def html(self) -> Markup:
        """Return the picture as a part of the page."""
        frame = '<figure>\n<h4>{0}</h4>\n<div class="scroll" role="region" aria-label="{0}" tabindex="0">{1}</div>\n'
        return Markup(frame + "<figcaption>{2}</figcaption>\n</figure>").format(self.title, self.svg, self.caption)


@dataclass(frozen=True)
class FoldedBlock:
    """Blocks that a reader unfolds."""

    title: str
    blocks: Sequence[Block]

    def markdown(self) -> str:
        """Return a `details` element with Markdown in it, which GitHub and MkDocs render."""
        opening = f'<details markdown="1">\n<summary>{html_escape(self.title, quote=False)}</summary>'
        return "\n\n".join([opening, *(block.markdown() for block in self.blocks), "</details>"])

    def html(self) -> Markup:
        """Return a `details` element."""
        content = Markup("\n").join(block.html() for block in self.blocks)
        return Markup("<details>\n<summary>{}</summary>\n{}\n</details>").format(self.title, content)


def stack_groups(table: ResultTable) -> ResultTable:
    """Return a table with one column for each group of columns, and a line in its cells for each of them.

    Example:
        >>> row = {"method": "ewc", "1-epoch: accuracy": "60.5 / 62.5", "1-epoch: forgetting": "2.1 / 2.1"}
        >>> print(stack_groups(ResultTable("t", list(row), [row])).markdown())
        | method | 1-epoch:<br>accuracy,<br>forgetting |
        | --- | --- |
        | ewc | 60.5 / 62.5<br>2.1 / 2.1 |
    """
    names: dict[str, list[int]] = {}
    for index, column in enumerate(table.columns):
        names.setdefault(column.rpartition(": ")[0] or column, []).append(index)
    heads = {
        group: f"{group}:<br>{',<br>'.join(table.columns[i].rpartition(': ')[2] for i in columns)}"
        for group, columns in names.items()
        if len(columns) > 1
    }
    rows = [
        {heads.get(group, group): "<br>".join(texts[index] for index in columns) for group, columns in names.items()}
        for texts in table.texts()
    ]
    return ResultTable(table.title, [heads.get(group, group) for group in names], rows)


def inline_html(text: str) -> Markup:
    """Return a text with code, bold words and links as HTML; a link to a Markdown page leads to its HTML page.

    Example:
        >>> inline_html("1 < 2: **see** [it](more/index.md), `a & b`")
        Markup('1 &lt; 2: <strong>see</strong> <a href="more/index.html">it</a>, <code>a &amp; b</code>')
    """
    parts, end = [], 0
    for match in _INLINE.finditer(text):
        parts.append(escape(text[end : match.start()]))
        code, bold, label, address = match.groups()
        if code:
            parts.append(Markup("<code>{}</code>").format(code))
        elif bold:
            parts.append(Markup("<strong>{}</strong>").format(bold))
        else:
            parts.append(Markup('<a href="{}">{}</a>').format(re.sub(r"\.md$", ".html", address), label))
        end = match.end()
    return Markup("").join([*parts, escape(text[end:])])


def _html_row(texts: Sequence[str], numeric: Sequence[bool]) -> Markup:
    first, *others = texts
    cells = [Markup('<th scope="row">{}</th>').format(inline_html(first))]
    for text, is_number in zip(others, numeric[1:], strict=True):
        style = _NUMBER_STYLE if is_number else Markup(' class="reason"') if len(text) > LONG_TEXT else Markup()
        cells.append(Markup("<td{}>{}</td>").format(style, inline_html(text)))
    return _html_cells(cells)


def _html_cells(cells: Sequence[Markup]) -> Markup:
    return Markup("<tr>{}</tr>").format(Markup("").join(cells))
