"""Tests of the map from the paper's own numbers to targets, and of the command that takes them."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from mooring.errors import MooringError
from mooring_lab.cli import main
from mooring_paper.context.scale import PAPER
from mooring_paper.published.numbering import ITEM_NAMES, ITEMS, find_item
from mooring_paper.targets import TARGETS, select_targets

COUNTS = {"figure": 10, "table": 6, "equation": 14, "algorithm": 1}
"""Numbered items of the paper, appendix included."""


def test_map_has_every_number_of_the_paper_in_order():
    for kind, count in COUNTS.items():
        assert [item.number for item in ITEMS if item.kind == kind] == list(range(1, count + 1))
    assert {item.kind for item in ITEMS} == set(COUNTS)


def test_every_item_leads_to_a_target_or_a_function_that_exists():
    for item in ITEMS:
        assert item.target or item.function, item.name
        assert not item.target or item.target in TARGETS
        assert set(item.data) <= set(PAPER.streams)
        if item.function:
            module, _, name = item.function.rpartition(".")
            assert callable(getattr(import_module(module), name))
    assert all(item.target and item.data for item in ITEMS if item.kind in ("figure", "table"))


def test_functions_are_those_of_the_architecture_page():
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    named = dict(re.findall(r"^\| (Equation \d) \| `([\w.]+)` \|", page, re.MULTILINE))
    assert len(named) == 8
    assert {item.name: item.function for item in ITEMS if item.name in named} == named


@pytest.mark.parametrize("name", ["fig3", "figure3", "Figure 3", "fig. 3", "fig-3"])
def test_a_number_is_found_under_every_spelling(name):
    assert find_item(name).name == "Figure 3"
    assert [target.name for target in select_targets([name])] == ["fig-importance"]


def test_target_names_come_before_numbers():
    assert [target.name for target in select_targets(["table1"])] == ["table1"]


@pytest.mark.parametrize("name", ["fig0", "fig11", "table7", "eq15", "alg2", "section 3", "figure"])
def test_an_unknown_number_lists_what_is_allowed(name):
    with pytest.raises(
        MooringError, match=r"allowed: grids, .*all, fig1 to fig10, table1 to table6, eq1 to eq14, alg1"
    ):
        select_targets([name])


def test_allowed_numbers_are_those_of_the_items():
    for short, kind in (("fig", "figure"), ("table", "table"), ("eq", "equation"), ("alg", "algorithm")):
        last = max(item.number for item in ITEMS if item.kind == kind)
        assert f"{short}1{f' to {short}{last}' if last > 1 else ''}" in ITEM_NAMES


def test_a_figure_of_missing_data_is_refused():
    with pytest.raises(MooringError, match=r"Figure 9, Figure 3 on Caltech-256, needs caltech256: put it into --data"):
        select_targets(["fig9"], ["caltech256"])
    assert [target.name for target in select_targets(["fig10"], ["caltech256"])] == ["fig-cka"], "it has Flowers too"


def test_command_says_what_a_formula_is_without_data(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["paper", "eq7"]) == 2
    assert capsys.readouterr().err == (
        "error: Equation 7, the explicit step, is a formula without runs: mooring.backends.eager.apply_pull computes "
        "it\n"
    )
    assert not list(tmp_path.iterdir())


def test_command_runs_the_target_of_a_number(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["paper", "equation 4", "--miniature", "--out", "page"]) == 0
    assert capsys.readouterr().out.startswith("effective-lr: ")
    assert "<summary>effective-lr: the unrolled form" in (tmp_path / "page" / "index.md").read_text()
