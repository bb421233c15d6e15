"""The rows of runs.json: their layout, and that nothing is lost that cells and claims need."""

import json
import math

import pytest

from mooring_lab.model.results import Result, Stability
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import by_class, digits
from mooring_paper.context.scale import MINIATURE
from mooring_paper.run_rows import STABILITY_FIELDS, runs_json

VERSIONS = {"device": "NVIDIA H200", "torch": "2.0", "python": "3.11", "mooring": "0.1"}


@pytest.fixture(scope="module")
def stream():
    return by_class(digits(), per_task=5)


@pytest.fixture
def row_of(stream):
    """Return the rows of results, and the header."""

    def rows(*results):
        content = json.loads(runs_json(results, {stream.fingerprint: stream}, MINIATURE))
        return content["runs"], content

    return rows


@pytest.fixture
def run(stream):
    def make(method="plain", seed=0, *, part="trained", outcome=None, **fields):
        spec = RunSpec(f"digits, {part}", stream.fingerprint, method, seed, **fields)
        usual = {"status": "finished", "reason": "", "untrained": [20.0, 20.0], "matrix": [], "versions": VERSIONS}
        return Result(spec, **{**usual, **(outcome or {})})

    return make


def test_runs_are_one_line_each_without_usual_and_missing_values(run, stream):
    runs = [run("explicit-rwalk", seed, init="cd" * 16, lr=0.001, dtype="tf32") for seed in range(3)]
    runs.append(run(momentum=0.0, strength=1e-5, dtype="tf32"))
    text = runs_json(runs, {stream.fingerprint: stream}, MINIATURE).decode()
    rows = [json.loads(line.rstrip(",")) for line in text.splitlines() if line.startswith('{"key"')]
    assert len(rows) == len(runs)
    assert [row.get("momentum") for row in rows] == [None, None, None, 0.0]
    content = json.loads(text)
    assert rows == content["runs"]
    assert content["usual"]["momentum"] == 0.9
    assert content["backbones"] == ["cd" * 16]
    assert {row.get("init") for row in rows} == {"cdcdcdcd", None}
    assert not {"memory", "reason", "correct", "stability", "cka"} & rows[0].keys()
    assert json.loads(runs_json([], {}, MINIATURE))["runs"] == []


def test_accuracies_of_the_tasks_so_far_are_recovered_exactly(run, stream, row_of):
    sizes = [len(task.test) for task in stream.tasks]
    correct = [[101, 17], [99, 160]]
    matrix = [[100 * count / size for count, size in zip(row, sizes, strict=True)] for row in correct]
    [row], content = row_of(run(outcome={"matrix": matrix}))
    assert row["correct"] == [[101], [99, 160]]
    assert content["streams"]["digits, trained"]["test"] == sizes
    assert content["streams"]["digits, trained"]["data"] == stream.fingerprint
    assert [[100 * n / size for n, size in zip(r, sizes, strict=False)] for r in row["correct"]] == [
        matrix[0][:1],
        matrix[1],
    ]


def test_stability_and_layers_have_names_in_the_header(run, row_of):
    stability = [Stability(1, 1 / 3, 12.0, 4, 5, 6, 7, 2), Stability(2, math.inf, 1e-40, 1, 2, 3, 4, 0)]
    layers = {"backbone.1": 2 / 3, "backbone.3": math.nan}
    outcome = {"stability": stability, "importance": layers, "cka": layers, "steps": 7}
    rows, content = row_of(run("ewc", strength=1.0, outcome=outcome), run("ewc", part="searched", outcome=outcome))
    assert tuple(content["stability"]) == STABILITY_FIELDS
    first, second = (dict(zip(STABILITY_FIELDS, entry, strict=True)) for entry in rows[0]["stability"])
    assert (first["largest"], first["diverge"], first["negative"]) == (0.333333333, 7, 2)
    assert (second["largest"], second["safe_strength"]) == (None, 1e-40)
    assert content["layers"] == {"mlp": {"importance": list(layers), "cka": list(layers)}}
    assert rows[0]["importance"] == rows[0]["cka"] == [0.666666667, None]
    assert rows[0]["steps"] == 7
    assert not {"importance", "cka"} & rows[1].keys()


def test_header_has_the_grids_and_regimes(row_of):
    _, content = row_of()
    scale = content["scale"]
    assert scale["regimes"]["30-epochs"] == {"epochs": 3, "batch": 20}
    assert (scale["lrs"], scale["seeds"], scale["streams"]) == ([0.03, 0.01], 2, ["digits"])
