"""benchmarks/recompute.py: it agrees with a miniature reproduction, finds changes, and uses no library code."""

import ast
import copy
import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from mooring.cli import main
from mooring.paper.published import published_numbers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOURCES = [BENCHMARKS / "recompute.py", *sorted((BENCHMARKS / "recomputation").glob("*.py"))]


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """Return the folder of a miniature that is compared with the paper's numbers for CIFAR-100, and these numbers."""
    root = tmp_path_factory.mktemp("recompute")
    numbers = copy.deepcopy(published_numbers._all_numbers())
    for table in (numbers, numbers["hyperparameters"]):
        table["mlp"] = {regime: {"digits": cells["cifar100"]} for regime, cells in table["cnn6"].items()}
    published = root / "published.json"
    published.write_text(json.dumps(numbers))
    command = ["paper", "all", "--miniature", "--quiet", "--study", root / "p.sqlite", "--out", root / "out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_numbers, "_all_numbers", lambda: numbers)
        patch.setattr(sys, "argv", ["mooring", *map(str, command)])
        assert main() == 0
    return root / "out", published


@pytest.fixture
def recompute(reproduced, monkeypatch, capsys):
    """Return a function that runs the script on a folder, and returns its status and its JSON."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("recompute")
    monkeypatch.setattr(importlib.import_module("recomputation.run_records"), "PUBLISHED", reproduced[1])

    def run(folder):
        status = script.main([str(folder), "--json"])
        return status, json.loads(capsys.readouterr().out)

    run.main = script.main
    return run


@pytest.fixture
def changed(reproduced, tmp_path):
    """Return a function that copies the folder, changes one of its two files and returns the copy."""

    def change(name, edit):
        for file in ("runs.json", "findings.json"):
            shutil.copy(reproduced[0] / file, tmp_path / file)
        content = json.loads((tmp_path / name).read_text())
        edit(content)
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path

    return change


def findings_of(folder, target):
    return next(entry for entry in json.loads((folder / "findings.json").read_text()) if entry["target"] == target)


def claims_in(findings):
    entry = next(entry for entry in findings if entry["target"] == "claims")
    return [row for table in entry["tables"] for row in table["rows"]]


def places(result):
    return [disagreement["where"] for disagreement in result["disagreements"]]


def test_every_cell_and_claim_of_a_reproduction_agrees(reproduced, recompute, capsys):
    folder = reproduced[0]
    tables = [table for name in ("grids", "table1", "resnet") for table in findings_of(folder, name)["tables"]]
    cells = sum((len(table["columns"]) - 1) * len(table["rows"]) for table in tables)
    claims = len(claims_in(json.loads((folder / "findings.json").read_text())))
    assert any(row["accuracy agrees"] is False for table in tables for row in table["rows"] if "verdict" in row)
    status, result = recompute(folder)
    assert (result["disagreements"], status) == ([], 0)
    assert (result["cells"], result["claims"]) == (cells, claims)
    assert recompute.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{cells} cells and {claims} claims recomputed, 0 disagree\n"


def test_one_more_correct_image_is_reported_in_the_cells_of_its_run(recompute, changed):
    def edit(content):
        row = next(
            row
            for row in content["runs"]
            if (row["stream"], row["method"], row["epochs"]) == ("digits, trained", "joint", 1)
        )
        row["correct"][-1][0] += 3 if row["correct"][-1][0] < 50 else -3

    status, result = recompute(changed("runs.json", edit))
    assert status == 1
    cell = "table1, mlp, 1-epoch, digits, at our settings, joint, accuracy"
    assert cell in places(result)
    assert {"joint" in place for place in places(result)} == {True}
    [disagreement] = [found for found in result["disagreements"] if found["where"] == cell]
    written, recomputed = float(disagreement["written"].split()[0]), disagreement["recomputed"][0]
    assert abs(written - recomputed) == pytest.approx(100 * 3 / 60 / 3 / 2, abs=0.006)  # of 60 images, 3 tasks, 2 seeds


def test_changed_run_of_the_search_is_reported_as_another_choice(recompute, changed):
    def edit(content):
        grid = [row for row in content["runs"] if row["stream"] == "digits, searched" and row["method"] == "joint"]
        best = max(grid, key=lambda row: sum(row["correct"][-1]))
        best["correct"][-1] = [0, 0]

    status, result = recompute(changed("runs.json", edit))
    assert status == 1
    assert any(re.fullmatch(r"grids, mlp, .*, digits, joint, lr", place) for place in places(result))


def test_every_claim_has_its_verdict_and_its_numbers_compared(recompute, changed):
    def edit(findings):
        for row in claims_in(findings):
            row["verdict"] = "perhaps"
            row["ours"] = f"99999 {row['ours']}"

    status, result = recompute(changed("findings.json", edit))
    assert status == 1
    for kind in ("verdict", "ours"):
        assert sum(place.endswith(kind) for place in places(result)) == result["claims"]


def test_claim_without_a_definition_is_a_disagreement(recompute, changed):
    def edit(findings):
        claims_in(findings)[0]["claim"] = "Everything is fine."

    status, result = recompute(changed("findings.json", edit))
    assert status == 1
    [disagreement] = result["disagreements"]
    assert (disagreement["where"], disagreement["recomputed"]) == ("Everything is fine.", "not recomputed")


def test_missing_row_of_a_table_is_a_disagreement(recompute, changed):
    def edit(findings):
        table = next(entry for entry in findings if entry["target"] == "resnet")["tables"][0]
        del table["rows"][0]

    status, result = recompute(changed("findings.json", edit))
    assert status == 1
    [disagreement] = result["disagreements"]
    assert (disagreement["written"], disagreement["recomputed"]) == ("no row", "a row")


def test_folder_without_all_targets_is_refused_in_one_line(recompute, changed, tmp_path, capsys):
    folder = changed("findings.json", lambda findings: findings.pop(0))
    assert recompute.main([str(folder)]) == 2
    assert capsys.readouterr().err == "error: findings.json lacks grids: run `mooring paper all`\n"
    assert recompute.main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_recomputation_imports_nothing_of_the_library(source):
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    packages = {name.partition(".")[0] for name in imported}
    assert packages <= {*sys.stdlib_module_names, "numpy", "scipy", "recomputation"}
