"""Render a figure as SVG, as PNG and as a part of the page."""

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from mooring_lab.report.style import THEMED

_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


@dataclass(frozen=True)
class Drawing:
    """A figure and its texts.

    Attributes:
        name: the end of its file names, after the slug of the section.
        title: the line above it.
        caption: how to read it.
        alt: a description for readers who cannot see it.
        figure: the matplotlib figure; None if its files are kept as they are.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure | None


@dataclass(frozen=True)
class Picture:
    """A rendered drawing.

    Attributes:
        name: the name of its files, without the ending.
        title: the title of the drawing.
        caption: the caption of the drawing.
        svg: the content of the SVG file.
        png: the content of the PNG file, 150 dots per inch.
        inline: the SVG for the page, with the colours of the page and ids of its own.
    """

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes
    inline: Markup


def render_drawing(drawing: Drawing, slug: str) -> Picture:
    """Render a drawing; the bytes are the same every time."""
    assert drawing.figure is not None
    name = f"{slug}-{drawing.name}"
    svg, png = io.BytesIO(), io.BytesIO()
    drawing.figure.savefig(svg, format="svg", metadata=_NO_METADATA)
    drawing.figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    inline = _inline(svg.getvalue(), name, drawing.alt)
    return Picture(name, drawing.title, drawing.caption, svg.getvalue(), png.getvalue(), inline)


def _inline(svg: bytes, name: str, alt: str) -> Markup:
    """Return the SVG without metadata and styles, and with ids that are unique in the page."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            # The style has one rule, for all elements: in a page it would apply to the whole page.
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: _adapt(key, value, name) for key, value in element.attrib.items()}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": alt}
    # ElementTree escapes texts and attribute values, such as names of methods.
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _adapt(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key.endswith("href") and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    value = _REFERENCE.sub(rf"url(#{name}-\1)", value)
    for colour, variable in THEMED.items():
        value = value.replace(colour, variable)
    return value
