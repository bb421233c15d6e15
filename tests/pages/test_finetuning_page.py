"""docs/finetuning.md: the table of the small language model has the figures of the measured results beside it."""

import json
import re
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_table_of_the_small_model_has_the_measured_figures():
    runs = json.loads((DOCS / "figures" / "finetuning.json").read_text())["runs"]
    section = (DOCS / "finetuning.md").read_text().split("## A GPT that learns a second domain")[1].split("### ")[0]
    rows = re.findall(
        r"^\| (?!---)(.+?) \| ([\d.]+) \| (\S+) \| ([\d.]+) \| ([\d.]+) \| (\d+) % \|$", section, re.MULTILINE
    )
    assert len(rows) == len(runs)
    falls = [run["curve"][0]["prose"] - run["curve"][-1]["prose"] for run in runs]
    for (name, *cells), run, fall in zip(rows, runs, falls, strict=True):
        first, last = run["curve"][0]["code"], run["curve"][-1]
        expected = [f"{last['code']:.3f}", f"{last['code'] - first:+.3f}", f"{last['prose']:.3f}", f"{fall:.3f}"]
        assert cells == [*expected, f"{100 * fall / falls[0]:.0f}"], name


def test_rows_of_a_table_have_as_many_cells_as_its_head():
    lines = (DOCS / "finetuning.md").read_text().splitlines()
    tables = [(above.count("|"), line.count("|")) for above, line in pairwise(lines) if above[:1] == line[:1] == "|"]
    assert len(tables) > 20
    assert all(above == own for above, own in tables)
