"""Draw the badges of the README from pyproject.toml, so that nothing is fetched: `python docs/pictures/badges.py`."""

import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "assets" / "badges"
CHARACTER = 7
"""Width of a character in pixels, at 11 pixels of height."""

TEMPLATE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img">
<title>{label}: {value}</title>
<rect width="{width}" height="20" rx="3" fill="#3f51b5"/>
<path d="M3 0H{split}V20H3A3 3 0 0 1 0 17V3A3 3 0 0 1 3 0Z" fill="#444"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{left}" y="14">{label}</text><text x="{right}" y="14">{value}</text>
</g>
</svg>
"""


def values() -> dict[str, str]:
    """Return the value of each badge by its label."""
    project = (ROOT / "pyproject.toml").read_text()
    version = (ROOT / "src" / "mooring" / "__init__.py").read_text()
    return {
        "version": re.findall(r'^__version__ = "(.+)"', version, re.MULTILINE)[0],
        "python": re.findall(r'^requires-python = "(.+)"', project, re.MULTILINE)[0],
        "torch": re.findall(r'^dependencies = \["torch(.+)"\]', project, re.MULTILINE)[0],
        "license": re.findall(r'^license = "(.+)"', project, re.MULTILINE)[0],
    }


def draw(label: str, value: str) -> str:
    """Return a badge as SVG."""
    split = (len(label) + 2) * CHARACTER
    width = split + (len(value) + 2) * CHARACTER
    places = {"split": split, "width": width, "left": split / 2, "right": (split + width) / 2}
    return TEMPLATE.format(label=escape(label), value=escape(value), **places)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for label, value in values().items():
        (FOLDER / f"{label}.svg").write_text(draw(label, value))
