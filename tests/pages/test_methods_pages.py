"""The pages of methods: every method has a part of one form, with commands that run and the defaults of the code."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import mooring
from mooring_lab.cli import main
from mooring_lab.methods import METHODS, find_method
from mooring_lab.methods.registry import default_strength
from pages.test_documents import PARTS, slug

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("methods.md", "penalties-and-outputs.md", "replay.md", "merging.md", "projections.md")
MINIATURE = ("--tasks", "2", "--limit", "20", "--epochs", "1", "--seeds", "1", "--memory", "10", "--quiet")


def parts_of(page):
    """Return the sections of a page that describe methods, by their anchors."""
    sections = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return {slug(title): text for title, text in sections if "**What it is.**" in text}


SECTIONS = {f"{page}#{anchor}": text for page in PAGES for anchor, text in parts_of(page).items()}


def rows():
    """Return the names of each row of the table of all methods, and the section that the row links to."""
    table = (DOCS / "methods.md").read_text().split("| methods |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        names, _, described = row.strip("| ").split(" | ")
        target = re.fullmatch(r"\[.+\]\((.*#.+)\)", described)[1]
        yield re.findall(r"`(.+?)`", names), target if target[0] != "#" else f"methods.md{target}"


def commands(section):
    """Return the commands of a section's quick start."""
    block = re.search(r"\*\*Quick start\.\*\*\n\n```\n(.*?)```", section, re.DOTALL)[1]
    return [shlex.split(line) for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def test_every_method_of_the_registry_is_in_one_row():
    names = [name for row, _ in rows() for name in row]
    assert sorted(names) == sorted(METHODS)


def test_every_row_links_to_a_part_whose_quick_start_trains_one_of_its_methods():
    for names, target in rows():
        trained = {name for words in commands(SECTIONS[target]) for name in option(words, "--methods").split(",")}
        assert trained & set(names), names


def option(words, name):
    return words[words.index(name) + 1]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_part_has_the_same_form(section):
    text = SECTIONS[section]
    assert tuple(re.findall(r"^\*\*([A-Z][\w ]+)\.\*\*", text, re.MULTILINE)) == PARTS
    assert "```math\n" in text


@pytest.mark.parametrize("section", SECTIONS)
def test_options_have_the_defaults_of_the_code(section):
    table = SECTIONS[section].split("**Options.**")[1].split("**Reference.**")[0]
    strengths = r"^\| `--strength (\S+)=NUMBERS` \| (\S+) \| (\S+) \| (.+?) \|"
    for name, *shown in re.findall(strengths, table, re.MULTILINE):
        method = find_method(name)
        digits, elsewhere = (default_strength(method, paper=paper) for paper in (False, True))
        dial = f"{min(method.dial):g} to {max(method.dial):g}"
        assert shown == [f"{digits:g}", f"{elsewhere:g}", dial], name
    trained = {name for words in commands(SECTIONS[section]) for name in option(words, "--methods").split(",")}
    memories = {METHODS[name].memory for name in trained} - {None}
    assert set(re.findall(r"^\| `--memory` \| (\d+) \| \1 \|", table, re.MULTILINE)) == {str(n) for n in memories}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_quick_start_runs_in_miniature(section, tmp_path, capsys, monkeypatch):
    for number, words in enumerate(commands(SECTIONS[section])):
        study = str(tmp_path / f"{number}.sqlite")
        monkeypatch.setattr(sys, "argv", [*words, *MINIATURE, "--study", study])  # the last of an option counts
        assert main() == 0, capsys.readouterr().err
        printed = capsys.readouterr().out
        for name in option(words, "--methods").split(","):
            assert re.search(rf"^{re.escape(name)} ", printed, re.MULTILINE), name


LINES = [line for page in PAGES for line in re.findall(r"`(mooring\.attach\([^`]*\))`", (DOCS / page).read_text())]


@pytest.mark.parametrize("line", [line for line in LINES if "model" in line])
def test_every_line_for_your_own_loop_attaches(line):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = eval(line, {"mooring": mooring, "model": model, "optimizer": optimizer})
    assert isinstance(moor, mooring.Mooring)
