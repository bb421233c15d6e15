"""docs/projections.md: its tables are written here from the stored numbers, and its benchmarks run.

The three streams are those of the frontier's page. A finer choice is in projections.json, as `mooring frontier --json`
prints it.
"""

import importlib
import json

import pytest
import torch

from mooring_lab.model.metrics import paired_difference
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams import digits
from pages.stored_streams import DOCS, MEASURED, OURS, STREAMS, Chosen, interval, method_table, number

PAGE = (DOCS / "projections.md").read_text()
FINER = json.loads((DOCS / "figures" / "projections.json").read_text())["finer"]
PROJECTIONS = ("gpm", "nscl", "owm", "ftp", "tpgm")
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
SHOWN = ("joint", OURS, *PROJECTIONS, "plain")


def finer_sweep(stream, name):
    """Return a method of the finer choice."""
    stored = FINER[stream]
    assert set(stored["search_seeds"]).isdisjoint(stored["seeds"])
    (sweep,) = (method for method in stored["methods"] if method["method"] == name)
    return sweep


def finer_row(stream):
    cells, (budget, owm) = [], (finer_sweep(stream, name) for name in (OURS, "owm"))
    for sweep in (budget, owm):
        accuracy = sweep["best"]["metrics"]["accuracy"]
        row = Chosen(sweep["best"]["strength"], accuracy["mean"], accuracy["std"])
        cells += [number(row.strength), row.cell]
    ours = [budget["accuracies"][seed] for seed in owm["accuracies"]]
    return f"| {stream} | {' | '.join(cells)} | {interval(paired_difference(list(owm['accuracies'].values()), ours))} |"


def finer_table():
    head = f"| stream | nats | `{OURS}` | `{ALPHA}` | `owm` | `owm` ahead by |\n| --- | --- | --- | --- | --- | --- |"
    return "\n".join([head, finer_row("permutations"), finer_row("rotations")])


@pytest.mark.parametrize("stream", STREAMS)
def test_table_of_a_stream_is_what_was_stored(stream):
    rows = sorted(MEASURED[stream].methods.items(), key=lambda item: -item[1].accuracy)
    assert method_table({name: row for name, row in rows if name in SHOWN}) in PAGE


def test_table_of_the_finer_choice_is_what_was_stored():
    assert finer_table() in PAGE


def test_variant_with_a_cut_frees_the_directions_of_small_inputs(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    variant = importlib.import_module("projection_variants").CUT.plugin.make(0.1)
    basis, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    moment = basis @ torch.diag(torch.tensor([0.0, 0.5, 4.0], dtype=torch.float64)) @ basis.T  # of 10 samples
    torch.testing.assert_close(variant.update({}, moment, 10)["projection"], basis[:, :2] @ basis[:, :2].T)


@pytest.fixture
def benchmark_named(monkeypatch):
    """Return a function that imports a script of the benchmarks."""
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    return importlib.import_module


def test_free_directions_of_the_first_layer_are_small_eigenvalues_of_the_pixels(
    benchmark_named, tmp_path, capsys, monkeypatch
):
    bench, file = benchmark_named("free_directions"), tmp_path / "free.jsonl"
    monkeypatch.setattr(bench, "CASES", [("permutations", "nscl", 1000.0)])
    assert bench.main(["--seeds", "1", "--tasks", "2", "--epochs", "1", "--json", str(file)]) == 0
    row = json.loads(file.read_text())
    images = normalize_pixels(digits().train.images, torch.float64).flatten(1)
    inputs = torch.cat([images, torch.ones(len(images), 1, dtype=torch.float64)], 1)
    values = torch.linalg.eigvalsh(inputs.T @ inputs)
    smallest = values[values > 1e-9 * values[-1]].min()
    expected = int((values <= 1000 * smallest).sum())
    assert row["layers"]["backbone.1"] == {"inputs": 65, "free": [[expected]]}
    assert f"permutations, nscl 1000, backbone.1: {expected} to {expected} of 65" in capsys.readouterr().out


def test_processor_time_is_measured_in_every_turn(benchmark_named, tmp_path, capsys):
    file = tmp_path / "time.json"
    brief = ["--runs", "1", "--tasks", "2", "--turns", "1"]
    assert benchmark_named("projection_time").main([*brief, "--json", str(file)]) == 0
    (turn,) = json.loads(file.read_text())["turns"]
    assert turn.keys() == {"plain", "ftp", "tpgm"}
    assert f"tpgm {turn['tpgm']:8.2f} s" in capsys.readouterr().out
