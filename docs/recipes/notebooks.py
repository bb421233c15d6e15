"""Write each recipe as a notebook, so that its code exists once: `python docs/recipes/notebooks.py`.

A block of Python becomes a cell, with the block of text after it as its output. A block whose first line is a file
name in a comment writes that file, and a command runs in a shell.
"""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BLOCK = re.compile(r"^```(python|bash|text)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\w+\.py)\n")


def pages() -> list[Path]:
    """Return the recipes: every page here but the index."""
    return sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")


def notebook(markdown: str) -> dict[str, Any]:
    """Return a page as a notebook of format 4."""
    cells: list[dict[str, Any]] = []
    pieces = BLOCK.split(markdown)
    for words, kind, block in zip(pieces[::3], [*pieces[1::3], ""], [*pieces[2::3], ""], strict=True):
        if words.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": _lines(words.strip())})
        if kind == "text":
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": _lines(block)}]
        elif kind:
            cells.append(_code_cell(f"!{block}" if kind == "bash" else FILE.sub(r"%%writefile \1\n", block, count=1)))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}


def _code_cell(code: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": _lines(code.strip()),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    for page in pages():
        text = json.dumps(notebook(page.read_text()), indent=1, ensure_ascii=False)
        page.with_suffix(".ipynb").write_text(text + "\n")
