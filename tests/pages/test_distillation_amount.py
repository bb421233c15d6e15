"""Tests of the benchmark of the amount of distillation, and of its tables in docs/budget.md."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from mooring import Budget
from mooring.hold import distil

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = (ROOT / "docs" / "budget.md").read_text()
RUNS = [json.loads(line) for line in (ROOT / "docs" / "figures" / "distillation-amount.jsonl").read_text().splitlines()]


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("distillation_amount")


def test_schedule_holds_inside_its_block_alone(bench):
    batches = [torch.zeros(20, 3), torch.zeros(20, 3)]
    before = distil.distillation_schedule
    with bench.distilling("a fifth of a batch in every second step"):
        parts, every = distil.distillation_schedule(torch.nn.Linear(3, 2), batches)
    assert ([len(part) for part in parts], every) == ([4] * 10, 2)
    assert distil.distillation_schedule is before


def test_default_distils_the_digits_in_every_second_step_because_of_an_odd_batch(bench, monkeypatch):
    schedule, seen = distil.distillation_schedule, []

    def observe(model, batches, **options):
        parts, every = schedule(model, batches, **options)
        seen.append(([len(x) for x, _ in batches], every))
        return parts, every

    monkeypatch.setattr(distil, "distillation_schedule", observe)
    bench.Digits(None, 1).run(Budget(0.1), 0)
    assert seen == [([20] * 9 + [19], 2)]


def test_runs_in_miniature_fill_the_tables_and_are_not_repeated(bench, monkeypatch, tmp_path, capsys):
    kept = {name: bench.SCHEDULES[name] for name in ("half a batch in every second step", "none")}
    monkeypatch.setattr(bench, "SCHEDULES", kept)
    monkeypatch.setattr(bench, "AMOUNT", {"digits": (0.1,)})
    monkeypatch.setattr(bench, "MIXED", {"60 digits": (0.3,)})
    out = tmp_path / "runs.jsonl"
    brief = ["--seeds", "1", "--steps", "2", "--out", str(out)]
    assert bench.main(brief) == 0
    stored, captured = out.read_text(), capsys.readouterr()
    rows = [json.loads(line) for line in stored.splitlines()]
    assert [row["method"] for row in rows] == [*kept, "unmixed", "mixed"]
    assert "[4/4] 60 digits: mixed 0.3, seed 0" in captured.err
    half, none = rows[:2]
    assert f"| half a batch in every second step | 25 % | {half['old']:.1f} / {half['new']:.1f} |" in captured.out
    assert f"| none | 0 | {none['old']:.1f} / {none['new']:.1f} |" in captured.out
    assert f"| 0.3 | {rows[2]['held_out']:.3f} | " in captured.out
    assert bench.main(brief) == 0
    assert out.read_text() == stored


def test_adapters_run_in_miniature(bench, monkeypatch):
    pytest.importorskip("peft", reason="needs peft")
    spec = importlib.util.spec_from_file_location("adapters", BENCHMARKS / "adapters.py")  # as a folder of tests
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "adapters", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "base_of", lambda seed: module.pretrained(seed, 1))
    with bench.distilling("mixed"):
        row = bench.Adapters(1).run(Budget(0.1), 0)
    assert row.keys() == {"before", "old", "new"}
    assert all(0 < value <= 100 for value in row.values())


def test_every_cell_of_the_tables_has_five_seeds(bench):
    options = bench.make_parser().parse_args([])
    stored = [(f"{row['problem']}: {row['method']}", row["nats"], row["seed"]) for row in RUNS]
    assert options.seeds == 5
    assert sorted(stored) == sorted(bench.choices(options))


def test_tables_of_the_page_are_those_of_the_stored_runs(bench):
    assert bench.amount_table(RUNS) in PAGE
    assert bench.mixture_table(RUNS) in PAGE
