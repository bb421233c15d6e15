"""Methods of one's own, named as package.module:METHOD, end to end; and the checks that they have to pass."""

import json
import sys
from pathlib import Path

import pytest
import torch

from mooring.errors import MooringError
from mooring.rules import EWC, Importance, Penalty, Uniform
from mooring.testing import CASES
from mooring_lab.cli import main
from mooring_lab.methods import METHODS, Method, find_method, resolve_methods
from mooring_lab.streams.options import StreamOptions
from mooring_lab.study import method_checks
from mooring_lab.study.method_checks import check_method
from mooring_lab.study.store import Store
from mooring_lab.study.study import Study

SMALL = ["--limit", "20", "--tasks", "3", "--epochs", "1", "--seeds", "1", "--quiet"]
SOURCE = """from mooring.rules import EWC
from mooring_lab.methods import Method
from mooring.rules import Proximal

GENTLE = Method("gentle", "a method", lambda seed: EWC(), Proximal, strength={}, dial=(1.0, 10.0))
NUMBER = 5
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes the module `mine` with a strength, as it is found by a new process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write_module(strength: float, folder: str = ".") -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(SOURCE.format(strength))
        monkeypatch.delitem(sys.modules, "mine", raising=False)

    return write_module


def stored() -> set[tuple[str, float | None]]:
    specs = [result.spec for result in Store("mooring.sqlite").results()]
    return {(spec.method.partition("@")[0], spec.strength) for spec in specs}


def test_compare_tune_and_frontier_take_a_method_by_its_module(write, capsys):
    write(10.0)
    methods = ["--methods", "plain,mine:GENTLE"]
    assert main(["compare", *SMALL, *methods, "--baseline", "mine:GENTLE"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "vs mine:GENTLE [95 %]" in lines[1]
    assert [line.split("  ")[0] for line in lines[2:4]] == ["plain", "mine:GENTLE 10"]
    assert main(["compare", *SMALL, *methods, "--strength", "mine:GENTLE=3"]) == 0
    assert main(["frontier", *SMALL, *methods, "--search-seeds", "1", "--json"]) == 0
    assert main(["tune", *SMALL, *methods, "--search-tasks", "1", "--lrs", "0.1", "--strengths", "2"]) == 0
    assert stored() == {("plain", None), *(("mine:GENTLE", strength) for strength in (1.0, 2.0, 3.0, 10.0))}


def test_study_file_reads_a_method_next_to_it(write, tmp_path, capsys):
    write(10.0, "studies")
    (tmp_path / "studies" / "study.toml").write_text(
        """methods = ["plain", "mine:GENTLE"]
seeds = 1
[stream]
limit = 20
tasks = 2
[train]
epochs = 1
lr = 0.05
[method."mine:GENTLE"]
strength = [2.0, 4.0]
lr = 0.1
"""
    )
    assert main(["run", "studies/study.toml", "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"].partition("@")[0], row["lr"], row["strength"]) for row in rows] == [
        ("plain", 0.05, None),
        ("mine:GENTLE", 0.1, 2.0),
        ("mine:GENTLE", 0.1, 4.0),
    ]


def test_method_that_was_changed_is_trained_again(write):
    counts = []
    for text in ("10.0", "10.0", "10.00"):
        write(text)
        study = Study("mooring.sqlite")
        study.compare(stream=StreamOptions("digits", tasks=2, limit=20), methods="mine:GENTLE", seeds=1, epochs=1)
        counts.append(len(study.results()))
    assert counts == [1, 1, 2]


def test_tables_and_the_page_name_a_method_without_its_hash_while_it_has_one_version(write, capsys):
    write(10.0)
    methods = ["--methods", "plain,mine:GENTLE"]
    for command in (
        ["compare", "--report", "page", "--baseline", "mine:GENTLE"],
        ["frontier", "--search-seeds", "1"],
        ["tune", "--search-tasks", "1", "--lrs", "0.1", "--strengths", "2"],
    ):
        assert main([command[0], *SMALL, *methods, *command[1:]]) == 0
        output = capsys.readouterr().out
        assert "mine:GENTLE" in output
        assert "@" not in output
    page = Path("page/index.html").read_text()
    shown, stored_settings = page.split('id="made"')
    assert "mine:GENTLE@" not in shown.split('id="numbers"')[0]
    assert "vs mine:GENTLE" in shown
    assert ">own</span>" in shown
    assert "mine:GENTLE@" in stored_settings


def test_two_versions_of_a_method_in_one_table_have_their_hashes(write, capsys):
    for text in ("10.0", "10.00"):
        write(text)
        assert main(["compare", *SMALL, "--methods", "plain,mine:GENTLE"]) == 0
        assert "mine:GENTLE 10 " in capsys.readouterr().out
    versions = {result.spec.method for result in Store("mooring.sqlite").results()} - {"plain"}
    assert len(versions) == 2
    assert main(["show", "--baseline", min(versions)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"vs {min(versions)} [95 %]" in lines[1]
    assert {line.split(" ")[0] for line in lines[2:5]} == {"plain", *versions}
    assert main(["report", "--to", "page"]) == 0
    shown = Path("page/index.html").read_text().split('id="numbers"')[0]
    assert all(version in shown for version in versions)


def test_imported_method_has_the_name_of_its_module_and_is_not_among_all(write):
    write(10.0)
    method = find_method("mine:GENTLE")
    assert method.name.startswith("mine:GENTLE@")
    assert find_method(method.name) is method
    assert resolve_methods("mine:GENTLE,mine:GENTLE") == [method.name]
    assert resolve_methods("all") == list(METHODS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:NOBODY", "method 'mine:NOBODY' cannot be imported: module 'mine' has no attribute 'NOBODY'"),
        ("nowhere:METHOD", "method 'nowhere:METHOD' cannot be imported: No module named 'nowhere'"),
        ("mine:NUMBER", "'mine:NUMBER' is a int: give a mooring_lab.methods.Method"),
        ("mine:GENTLE@0badc0de", "'mine:GENTLE' was changed since a run of it was stored: name it without @0badc0de"),
    ],
)
def test_method_that_cannot_be_imported_is_refused_in_one_line(write, capsys, name, message, tmp_path):
    write(10.0)
    with pytest.raises(MooringError) as error:
        resolve_methods(name)
    assert str(error.value) == message
    assert main(["compare", "--methods", name]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "mooring.sqlite").exists()


# Checks


class Jumpy(Uniform):
    """A score that depends on the global random state."""

    def update(self, state, it):
        state["current"].add_(torch.rand(()).double().to(state["current"].dtype))


class Pooled(Importance):
    """A score that is not elementwise: the mean over a parameter, and over all runs of a fleet."""

    def update(self, state, it):
        state["current"].add_(it.g.square().mean())


def problems(monkeypatch, method: Method) -> dict[str, str]:
    monkeypatch.setattr(method_checks, "CHECKED_CASES", CASES[1:2])
    monkeypatch.setitem(METHODS, method.name, method)
    return {outcome.check: outcome.problem for outcome in check_method(method.name) if not outcome.passed}


def penalized(name: str, importance, strength: float = 0.1) -> Method:
    return Method(name, "a method", importance, Penalty, strength, dial=(strength,))


def test_method_that_pulls_nothing_is_found(monkeypatch):
    differences = problems(monkeypatch, penalized("feeble", lambda seed: EWC(), 0.0))
    message = "the weights equal those of plain: it pulls nothing, or its strength is too small"
    assert differences["training differs from plain"] == message
    assert "the pull has no effect" in differences["pull: conformance suite"]


def test_method_that_depends_on_the_other_runs_of_its_fleet_is_found(monkeypatch):
    differences = problems(monkeypatch, penalized("pooled", lambda seed: Pooled()))
    assert "two runs stacked, and each run alone" in differences["importance: conformance suite"]
    assert differences["a run in a fleet equals the run alone"].startswith("weights ")


def test_method_that_does_not_repeat_is_found(monkeypatch):
    differences = problems(monkeypatch, penalized("jumpy", lambda seed: Jumpy()))
    assert differences["a seed gives the same run twice"].startswith("weights ")


def test_strength_that_is_refused_is_found(monkeypatch):
    method = Method("dialled", "a method", lambda seed: EWC(), Penalty, 0.1, dial=(-1.0,))
    assert problems(monkeypatch, method) == {
        "every strength of its dial is accepted": "strength=-1.0 is not allowed: give a number from 0"
    }


def test_command_prints_every_check_and_fails_if_one_does(write, capsys, monkeypatch):
    assert main(["methods", "--check", "plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "plain"
    assert [line.split("  ")[-1].strip() for line in lines[2:]] == ["passed"] * 3
    monkeypatch.setattr(method_checks, "CHECKED_CASES", CASES[1:2])
    monkeypatch.setitem(METHODS, "dialless", Method("dialless", "a method", lambda seed: EWC(), Penalty, 0.1))
    assert main(["methods", "--check", "dialless", "--json"]) == 1
    outcomes = json.loads(capsys.readouterr().out)
    failed = [outcome["check"] for outcome in outcomes if not outcome["passed"]]
    assert failed == ["every strength of its dial is accepted"]
