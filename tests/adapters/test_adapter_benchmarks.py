"""Tests of the benchmarks of adapters: what they promise on the digits, and that they run in miniature."""

import importlib
import importlib.util
import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="needs peft")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.faults  # slow
def test_default_keeps_old_digits_and_learns_new_ones():
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    spec = importlib.util.spec_from_file_location("adapter_benchmark", BENCHMARKS / "adapters.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bases = [bench.pretrained(seed, 12) for seed in range(3)]
    runs = [bench.finetune(base, {}, seed, 18) for seed, base in enumerate(bases)]
    old, new = (statistics.mean(values) for values in zip(*runs, strict=True))
    assert old >= 89
    assert new >= 86


@pytest.mark.parametrize(("model", "products"), [("gpt2", 8), ("llama", 14)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cost_of_a_step_is_measured(monkeypatch, capsys, model, products):
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("adapter_cost")
    options = ["--tiny", "--turns", "1", "--warmup", "1", "--block", "2", "--rank", "4", "--targets", "all", "--json"]
    options += ["--budgets", "no distillation", "default"]
    assert bench.main(["--model", model, *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["budget"] for row in rows] == ["no distillation", "default"]
    for row in rows:
        assert row["products"] == products
        assert row["ratio"] > 0
        assert row["kept_mib"] > 0


PEERS = ["Mooring", "O-LoRA", "LoRA-Null", "CorDA (KPM)", "OSF"]


@pytest.mark.parametrize("task", ["digits", pytest.param("gpt", marks=pytest.mark.faults)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_peers_are_measured_and_drawn(monkeypatch, tmp_path, task):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("adapter_peers")
    methods = PEERS if task == "digits" else list(bench.METHODS)
    out, figure = tmp_path / "peers.json", tmp_path / "peers.png"
    small = ["--seeds", "1", "--dials", "1", "--epochs", "1", "--size", "tiny", "--folder", str(tmp_path)]
    assert bench.main(["--task", task, "--methods", *methods, *small, "--json", str(out), "--figure", str(figure)]) == 0
    results = json.loads(out.read_text())
    assert [point["method"] for point in results["points"]] == methods
    assert figure.read_bytes().startswith(b"\x89PNG")
    moored, null = results["points"][0], next(p for p in results["points"] if p["method"] == "LoRA-Null")
    for point in (moored, null):  # both start at the base model, and hardly leave what it knows
        assert point["kept"][0] == pytest.approx(results["before"]["kept"], rel=0.05)


def test_frontier_is_the_upper_hull(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("adapter_peers")
    assert bench.frontier([(0, 4), (1, 3), (2, 1), (1, 1), (0.5, 3.2)]) == [(0, 4), (1, 3), (2, 1)]
    assert bench.frontier([(0, 1), (1, 2)]) == [(1, 2)]
