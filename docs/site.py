"""What MkDocs does not do by itself: pages for files outside docs/, a place for pages that the menu does not name."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages that lie beside the README."""

OUTSIDE = re.compile(r"\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")
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
    """Lead links to files outside docs/ to the pages that show them."""
    return (
        _inside(markdown, f"docs/{Path(page.file.src_uri).parent.as_posix()}") if page.file.abs_src_path else markdown
    )


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
