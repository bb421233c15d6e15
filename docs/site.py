"""What MkDocs does not do by itself: pages for files outside docs/, pages that the menu does not name, equations."""

import html
import io
import os
import re
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages that lie beside the README."""

OUTSIDE = re.compile(r"\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")
EQUATIONS = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml"}


def examples() -> dict[str, Path]:
    """Each example by the page that shows it."""
    found = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in LANGUAGES)
    return {f"examples/{path.stem}.md": path for path in found}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write out `examples/`, and put pages that the menu does not name under Reproduction or How to."""
    nav: list[Any] = config["nav"]
    sections = {title: pages for entry in nav for title, pages in entry.items()}
    for entry in sections["How to"]:
        if entry.get("Examples") == "examples/":
            entry["Examples"] = ["examples/index.md", *examples()]
    named = set(_leaves(nav))
    reproduction = next(entry["Reproduction"] for entry in sections["Results"] if "Reproduction" in entry)
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if name not in named:
            (reproduction if name.startswith("reproduction/") else sections["How to"]).append(name)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/."""
    for name in BESIDE:
        files.append(File.generated(config, name, content=_inside((ROOT / name).read_text(), "")))
    lines = ["# Examples", "", "Each is short enough to read whole, and the tests run each of them.", ""]
    for name, path in examples().items():
        text = path.read_text()
        what = _first_line(text)
        lines.append(f"- [{path.name}]({Path(name).name}): {what}")
        shown = f"# {path.name}\n\n```{LANGUAGES[path.suffix]}\n{text}```\n"
        files.append(File.generated(config, name, content=shown))
    files.append(File.generated(config, "examples/index.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw equations, and lead links to files outside docs/ to the pages that show them."""
    if not page.file.abs_src_path:
        return markdown
    inside = _inside(markdown, f"docs/{Path(page.file.src_uri).parent.as_posix()}")
    return EQUATIONS.sub(lambda match: "".join(map(equation, match[1].splitlines())), inside)


def equation(tex: str) -> str:
    """Return one line of TeX as inline SVG in the colour of the text, so that no script or font is fetched.

    The fence ```math is also what GitHub draws. Every line of a fence is an equation of its own.
    """
    drawn = io.StringIO()
    with rc_context({"mathtext.fontset": "cm", "svg.fonttype": "path", "svg.hashsalt": "equation"}):
        math_to_image(f"${tex}$", drawn, format="svg", prop=FontProperties(size=15))
    svg = drawn.getvalue()
    svg = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, flags=re.DOTALL)  # the white ground
    words = f'role="img" aria-label="{html.escape(tex)}" fill="currentColor"'
    return f'<p class="equation"><svg {words} {" ".join(svg.split())}</p>\n\n'


def _inside(markdown: str, folder: str) -> str:
    def led(match: re.Match[str]) -> str:
        target, anchor = match.groups()
        if "://" in target:
            return match[0]
        there = os.path.normpath(f"{folder}/{target}" if folder else target)
        if there == "README.md":
            there = "docs/index.md"
        elif there.startswith("examples/"):
            there = f"docs/{Path(there).with_suffix('.md').as_posix()}"
        elif there in BESIDE:
            there = f"docs/{there}"
        elif folder:
            return match[0]
        return f"]({os.path.relpath(there, folder or 'docs')}{anchor})"

    return OUTSIDE.sub(led, markdown)


def _first_line(text: str) -> str:
    """What a file says it is for: its docstring's first line, or its first comment."""
    return text.splitlines()[0].strip('"# ')


def _leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [leaf for each in inner for leaf in _leaves(each)]
