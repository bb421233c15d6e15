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
    assert bench.main(["--model", model, *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["products"] == products
    assert row["ratio"] > 0
    assert row["kept_mib"] > 0
