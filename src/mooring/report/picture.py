"""A figure as files and as a part of the page."""

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from mooring.report.style import THEMED

__all__ = ["Drawing", "Picture", "picture"]

_NOTHING = {"Creator": None, "Date": None, "Format": None, "Type": None}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


@dataclass(frozen=True)
class Drawing:
    """A figure and what is said about it.

    Attributes:
        name: of its files, after the section's slug.
        title: what stands above it.
        caption: how to read it.
        alt: what it shows, for who cannot see it.
        figure: of matplotlib.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


@dataclass(frozen=True)
class Picture:
    """A drawing, rendered.

    Attributes:
        name: of its files, without their ending.
        title: as the drawing's.
        caption: as the drawing's.
        svg: a file that stands alone.
        png: the same in pixels, 150 to the inch.
        inline: the SVG for the page: in the page's colours, its ids its own.
    """

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes
    inline: Markup


def picture(drawing: Drawing, slug: str) -> Picture:
    """Render, to the same bytes every time."""
    name = f"{slug}-{drawing.name}"
    svg, png = io.BytesIO(), io.BytesIO()
    drawing.figure.savefig(svg, format="svg", metadata=_NOTHING)
    drawing.figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    return Picture(
        name, drawing.title, drawing.caption, svg.getvalue(), png.getvalue(), _inline(svg.getvalue(), name, drawing.alt)
    )


def _inline(svg: bytes, name: str, alt: str) -> Markup:
    """Without what belongs to a file of its own, and with ids that no other figure of the page has."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            # Its one rule is for everything: in a page it would reach every element.
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: _adapted(key, value, name) for key, value in element.attrib.items()}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": alt}
    # Every part of it was escaped by the writer: names of methods are text and attribute values here.
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _adapted(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key.endswith("href") and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    value = _REFERENCE.sub(rf"url(#{name}-\1)", value)
    for colour, variable in THEMED.items():
        value = value.replace(colour, variable)
    return value
