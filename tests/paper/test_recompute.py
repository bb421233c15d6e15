"""benchmarks/recompute.py: it agrees with a reproduction, finds every change, and uses no library code."""

import ast
import contextlib
import copy
import importlib
import io
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from mooring_lab.cli import main
from mooring_lab.model.results import Result, Stability
from mooring_lab.streams.options import StreamOptions
from mooring_lab.study.defaults import LRS, STRENGTHS
from mooring_lab.study.study import Study
from mooring_paper import paper_command
from mooring_paper.context.scale import MINIATURE
from mooring_paper.published import published_numbers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOURCES = [BENCHMARKS / "recompute.py", *sorted((BENCHMARKS / "recomputation").glob("*.py"))]
STREAMS = {name: StreamOptions("digits", limit=limit) for name, limit in (("cifar100", 60), ("flowers102", 50))}
GRIDS = {"lrs": LRS[1:4], "strengths": STRENGTHS[::3]}
SEEDS = {"seeds": 5, "max_seeds": 20}
STAND_INS = {"caltech101": StreamOptions("digits", limit=40)}
LARGE = replace(MINIATURE, second_network="resnet18-third", streams=STREAMS, stand_ins=STAND_INS, **GRIDS, **SEEDS)


def run_paper(root, scale):
    """Run `mooring paper all` at a scale, with the paper's numbers for cnn6 as those for mlp; return both paths."""
    numbers = copy.deepcopy(published_numbers._all_numbers())
    for table in (numbers, numbers["hyperparameters"]):
        table["mlp"] = {regime: {**cells, "digits": cells["cifar100"]} for regime, cells in table["cnn6"].items()}
    (root / "published.json").write_text(json.dumps(numbers))
    command = ["paper", "all", "--miniature", "--quiet", "--study", root / "p.sqlite", "--out", root / "out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_numbers, "_all_numbers", lambda: numbers)
        patch.setattr(paper_command, "MINIATURE", scale)
        patch.setattr(sys, "argv", ["mooring", *map(str, command)])
        with contextlib.redirect_stdout(io.StringIO()):
            assert main() == 0
    return root / "out", root / "published.json"


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    """A miniature reproduction."""
    return run_paper(tmp_path_factory.mktemp("miniature"), MINIATURE)


@pytest.fixture(scope="module")
def invented(tmp_path_factory):
    """A reproduction with as many data sets, networks and seeds as the paper and random results: nothing is trained."""

    def results(study, specs, streams, weights, *, reject=False):
        return [invent(spec, streams[spec.data], reject=reject) for spec in specs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Study, "run", results)
        return run_paper(tmp_path_factory.mktemp("invented"), LARGE)


def invent(spec, stream, *, reject):
    """Return a random result; strong penalties are unstable or rejected."""
    random = Random(f"{spec.key} {reject}")
    tasks, sizes, penalty = len(stream.tasks), [len(task.test) for task in stream.tasks], spec.strength is not None
    too_strong = penalty and spec.strength * spec.lr > random.choice((0.3, 3.0, 30.0))
    status = ("rejected" if reject else "unstable") if too_strong else "finished"
    if random.random() < 0.003 or (spec.method, spec.stream, spec.seed) == ("rwalk", "flowers102, trained", 0):
        status = "unstable"  # so that a pair is missing
    done = {"finished": tasks, "rejected": 1, "unstable": random.randrange(tasks)}[status]
    level = 0.6 + 0.05 * spec.method.startswith("explicit") + 0.2 * random.random()

    def correct(after, task):
        return round(sizes[task] * (level - 0.03 * max(0, after - task) * random.random()))

    matrix = [[100 * correct(row, k) / size for k, size in enumerate(sizes[: row + 2])] for row in range(done)]
    counts = [[random.choice((0, 0, 7)) for _ in range(3)] for _ in range(done)]
    layers = {f"backbone.{depth}": random.random() / (1 + depth) for depth in range(5)}
    return Result(
        spec,
        status,
        "" if status == "finished" else "invented",
        [20.0] * tasks,
        matrix,
        stability=[
            Stability(1 + task, 0.5, 30.0 + random.random(), 5, 1000, extrapolate, diverge + negative, negative)
            for task, (extrapolate, diverge, negative) in enumerate(counts if penalty else [])
        ],
        importance=layers if status == "finished" else {},
        cka=layers if status == "finished" else {},
        steps=sum(math.ceil(len(task.train) / spec.batch) * spec.epochs for task in stream.tasks[:done])
        + (0 if status == "finished" else random.randrange(20)),
    )


@pytest.fixture
def recompute(monkeypatch, capsys):
    """Return a function that runs the script on a folder and returns its status and its JSON."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script, records = (importlib.import_module(name) for name in ("recompute", "recomputation.run_records"))

    def run(folder, published):
        monkeypatch.setattr(records, "PUBLISHED", published)
        status = script.main([str(folder), "--json"])
        return status, json.loads(capsys.readouterr().out)

    run.main = script.main
    return run


@pytest.fixture
def recompute_changed(invented, recompute, tmp_path):
    """Return a function that changes one of the two files and recomputes."""

    def change(name, edit):
        for file in ("runs.json", "findings.json"):
            shutil.copy(invented[0] / file, tmp_path / file)
        content = json.loads((tmp_path / name).read_text())
        edit(content)
        (tmp_path / name).write_text(json.dumps(content))
        status, result = recompute(tmp_path, invented[1])
        assert status == 1
        return result

    return change


def tables_of(findings, target):
    return next(entry for entry in findings if entry["target"] == target)["tables"]


def claims_in(findings):
    tables = [table for name in ("claims", "stand-in") for table in tables_of(findings, name)]
    return [row for table in tables if "claim" in table["columns"] for row in table["rows"]]


def places(result):
    return [disagreement["where"] for disagreement in result["disagreements"]]


@pytest.mark.faults
@pytest.mark.parametrize("reproduction", ["miniature", "invented"])
def test_every_cell_and_claim_of_a_reproduction_agrees(reproduction, recompute, request, capsys):
    folder, published = request.getfixturevalue(reproduction)
    findings = json.loads((folder / "findings.json").read_text())
    names = ("grids", "table1", "resnet", "as-published", "stand-in")
    tables = [table for name in names for table in tables_of(findings, name) if "claim" not in table["columns"]]
    cells = sum((len(table["columns"]) - 1) * len(table["rows"]) for table in tables)
    status, result = recompute(folder, published)
    assert (result["disagreements"], status) == ([], 0)
    assert (result["cells"], result["claims"]) == (cells, len(claims_in(findings)))
    assert recompute.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{cells} cells and {result['claims']} claims recomputed, 0 disagree\n"


@pytest.mark.faults  # slow
def test_invented_reproduction_has_every_kind_of_verdict(invented):
    findings = json.loads((invented[0] / "findings.json").read_text())
    claims = claims_in(findings)
    assert {row["verdict"] for row in claims} == {"holds", "does not hold", "not decided"}
    assert {"5", "20"} <= {row["seeds"] for row in claims}
    assert any(" of 16 pairs" in row["holds when"] for row in claims)  # some pairs did not finish
    there = [row["at the paper's settings"] for row in claims]
    assert {text.rpartition(": ")[2] for text in there} == {"", "holds", "does not hold", "not decided"}
    assert any("Replay with fresh heads" in row["claim"] for row in claims)
    assert tables_of(findings, "as-published")
    rows = [row for table in tables_of(findings, "table1") for row in table["rows"]]
    assert {row["accuracy agrees"] for row in rows} == {True, False, None}
    assert any(row["verdict"] for row in rows)


@pytest.mark.faults  # slow
def test_changed_accuracy_is_reported_in_the_cells_of_its_run(recompute_changed):
    def edit(content):
        where = {"stream": "cifar100, trained", "method": "joint", "epochs": 1, "seed": 0, "network": "mlp"}
        row = next(row for row in content["runs"] if where.items() <= row.items())
        row["correct"][-1][0] -= 6  # of 60 images

    result = recompute_changed("runs.json", edit)
    cell = "table1, mlp, 1-epoch, cifar100, at our settings, joint"
    assert places(result)[0] == f"{cell}, accuracy"
    assert {place.rpartition(", ")[0] for place in places(result)} == {cell}
    disagreement = result["disagreements"][0]
    written, recomputed = float(disagreement["written"].split()[0]), disagreement["recomputed"][0]
    assert written - recomputed == pytest.approx(100 * 6 / 60 / 3 / 5, abs=0.005)  # of 3 tasks and 5 seeds


@pytest.mark.faults  # slow
def test_changed_run_of_the_search_is_reported_as_another_choice(recompute_changed):
    def edit(content):
        where = {"stream": "flowers102, searched", "method": "joint", "epochs": 3}
        grid = [row for row in content["runs"] if where.items() <= row.items() and row["status"] == "finished"]
        for row in grid:
            row["correct"][-1] = [40 if row["lr"] == 0.003 else 0, 0]

    choice = "grids, mlp, 30-epochs, flowers102, joint, lr"
    result = recompute_changed("runs.json", edit)
    assert choice in places(result)
    [disagreement] = [row for row in result["disagreements"] if row["where"] == choice]
    assert disagreement["recomputed"] == "0.003"


@pytest.mark.faults  # slow
def test_changed_layers_and_stability_are_reported_in_the_claims_that_read_them(recompute_changed):
    def edit(content):
        for row in content["runs"]:
            row["importance"] = row.get("importance", [])[::-1]
            row["cka"] = [value / 2 for value in row.get("cka", [])]
            row["stability"] = [[*entry[:-3], 0, 0, 0] for entry in row.get("stability", [])]

    changed = places(recompute_changed("runs.json", edit))
    for claim in (
        "Deeper layers get less importance.",
        "Penalties let deep layers change more than early ones.",
        "A few violations are sufficient.",
        "Negative importance destabilises training.",
    ):
        assert f"{claim} ours" in changed
    assert not any(place.startswith(("grids", "table1", "resnet")) for place in changed)


@pytest.mark.faults  # slow
def test_every_claim_has_its_verdict_and_its_numbers_compared(recompute_changed):
    def edit(findings):
        for row in claims_in(findings):
            row["verdict"] = "perhaps"
            row["ours"] = f"99999 {row['ours']}"

    result = recompute_changed("findings.json", edit)
    for column in ("verdict", "ours"):
        assert sum(place.endswith(f". {column}") for place in places(result)) == result["claims"]


@pytest.mark.faults  # slow
@pytest.mark.parametrize("column", ["paper's", "holds when", "seeds", "at the paper's settings"])
def test_claims_have_what_they_say_about_pairs_and_seeds_compared(recompute_changed, column):
    def edit(findings):
        for row in claims_in(findings):
            if row["claim"] == "The explicit step is more accurate than its penalty with mlp.":
                row[column] = {"holds when": "over 99 pairs (all)"}.get(column, "99")

    claim = "The explicit step is more accurate than its penalty with mlp."
    assert places(recompute_changed("findings.json", edit)) == [f"{claim} {column}"]


@pytest.mark.faults  # slow
def test_claim_without_a_definition_is_a_disagreement(recompute_changed):
    def edit(findings):
        claims_in(findings)[0]["claim"] = "Everything is fine."

    [disagreement] = recompute_changed("findings.json", edit)["disagreements"]
    assert (disagreement["where"], disagreement["recomputed"]) == ("Everything is fine.", "not recomputed")


@pytest.mark.faults  # slow
def test_missing_row_of_a_table_is_a_disagreement(recompute_changed):
    def edit(findings):
        del tables_of(findings, "resnet")[0]["rows"][0]

    [disagreement] = recompute_changed("findings.json", edit)["disagreements"]
    assert (disagreement["written"], disagreement["recomputed"]) == ("no row", "a row")


@pytest.mark.faults  # slow
def test_folder_without_all_targets_is_refused_in_one_line(invented, recompute, tmp_path, capsys):
    shutil.copy(invented[0] / "runs.json", tmp_path)
    (tmp_path / "findings.json").write_text("[]")
    assert recompute.main([str(tmp_path)]) == 2
    assert recompute.main([str(tmp_path / "nowhere")]) == 2
    lacking, nowhere = capsys.readouterr().err.splitlines()
    assert lacking.startswith("error: findings.json lacks grids, table1, ")
    assert "is not a folder of `mooring paper all`" in nowhere


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
