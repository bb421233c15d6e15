"""Tests of the benchmarks of adapters: what they promise on the digits, and that they run in miniature."""

import importlib
import json
import runpy
import statistics
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="needs peft")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.faults  # slow
def test_default_keeps_old_digits_and_learns_new_ones(monkeypatch):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    finetune = runpy.run_path(str(BENCHMARKS / "adapters.py"))["finetune"]  # a folder of tests has that name too
    runs = [finetune({}, seed, 18) for seed in range(3)]
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


PEERS = ["plain LoRA", "Mooring", "O-LoRA", "LoRA-Null", "CorDA (KPM)", "OSF"]


@pytest.fixture
def peers(monkeypatch, tmp_path):
    """Return a function that runs the side by side in miniature and returns its rows."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench, log = (importlib.import_module(name) for name in ("adapter_peers", "run_log"))
    out = tmp_path / "peers.jsonl"
    small = ["--epochs", "1", "--size", "tiny", "--folder", str(tmp_path), "--out", str(out)]

    def run(*arguments):
        assert bench.main([*arguments, *small]) == 0
        return log.read_rows(out)

    run.out = out
    return run


@pytest.mark.parametrize(
    ("task", "precision"), [("digits", "float32"), pytest.param("gpt", "bf16", marks=pytest.mark.faults)]
)
def test_peers_are_measured_and_drawn(peers, tmp_path, capsys, task, precision):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    methods = PEERS if task == "digits" else list(importlib.import_module("peers.adapter_methods").DIALS["gpt"])
    figure = tmp_path / "peers.png"
    options = ["--task", task, "--precision", precision, "--seeds", "1", "--dials", "1", "--methods", *methods]
    rows = peers(*options, "--markdown", "--figure", str(figure))
    assert [row["method"] for row in rows] == methods
    assert figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert [name for name in methods if f"| {name} |" not in printed] == []
    by_method = {row["method"]: row for row in rows}
    assert len(by_method["plain LoRA"]["results"]) == 4  # for early stopping
    assert len(by_method["OSF"]["results"]) == 1
    assert by_method["Mooring"]["nats"] <= by_method["Mooring"]["dial"]
    for name in ("Mooring", "LoRA-Null"):  # both start at the base model, and hardly leave what it knows
        assert by_method[name]["results"][-1][0] == pytest.approx(by_method[name]["before"][0], rel=0.05)


def test_peers_continue_where_they_stopped_and_refuse_other_settings(peers, capsys):
    (first,) = peers("--methods", "plain LoRA", "--seeds", "1")
    with peers.out.open("a") as file:
        file.write('{"method": "OSF"')  # killed in the middle of a line
    rows = peers("--methods", "plain LoRA", "smaller rank", "--dials", "2", "--seeds", "2")
    assert rows[0] == first
    runs = [(row["method"], row["dial"], row["seed"]) for row in rows]
    assert runs == [
        ("plain LoRA", 8, 0),
        ("smaller rank", 2, 0),
        ("smaller rank", 1, 0),
        ("plain LoRA", 8, 1),
        ("smaller rank", 2, 1),
        ("smaller rank", 1, 1),
    ]
    assert "[5/5] smaller rank 1, seed 1" in capsys.readouterr().err
    assert peers("--minutes", "-1") == rows
    assert "runs are left" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        peers("--task", "gpt")
    assert "has results of {'task': 'digits', 'epochs': 1}: give another --out" in capsys.readouterr().err


def test_parts_of_peers_are_all_runs_once(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("adapter_peers")
    parser = bench.make_parser()
    parts = [bench.choices(parser.parse_args(["--task", "gpt", "--part", f"{part}/3"])) for part in range(3)]
    whole = bench.choices(parser.parse_args(["--task", "gpt"]))
    assert sorted(choice for part in parts for choice in part) == sorted(whole)


def gpt_row(method, dial, seed, *results):
    settings = {"task": "gpt", "size": "large"}
    row = {"method": method, "dial": dial, "seed": seed, "before": [-1.5, -2.5], "parameters": 25_000_000}
    return {**row, "results": [list(result) for result in results], "nats": None, "settings": settings}


def test_gpt_table_has_the_fall_in_percent_of_plain_within_the_limit(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    side = importlib.import_module("peers.side_by_side")
    rows = [gpt_row("plain LoRA", 8, seed, (-1.54, -2.4), (-1.8, -2.0 + 0.1 * seed)) for seed in range(2)]
    rows += [gpt_row("Mooring", 0.1, seed, (-1.58, -2.1 + 0.08 * seed)) for seed in range(2)]
    rows += [gpt_row("Mooring", 0.2, seed, (-1.68, -2.0 + 0.1 * seed)) for seed in range(2)]
    rows += [gpt_row("OSF", 0.9, 0, (-1.7, -2.0))]
    comparison = side.compare(rows)
    assert comparison.title == "GPT, 25 M parameters"
    best = side.best_within(comparison.of("Mooring"))
    assert best.dial == "0.1"
    assert best.learned == pytest.approx([80, 80])
    assert best.kept == pytest.approx([0.08, 0.08])
    assert side.learned_at(comparison.of("Mooring")) == pytest.approx(84)  # a fifth of the way from 80 to 100
    assert side.best_within(comparison.of("OSF")) is None
    lines = side.markdown(comparison).splitlines()
    assert lines[2] == "| Mooring | 0.1 | 0.080 ± 0.000 | 80.0 ± 0.0 | 84.0 |"
    assert lines[3].startswith("| early stopping | 1/4 | 0.040 ± 0.000 |")
    assert "| OSF | 0.9 | 0.200 | 100.0, beyond 0.1 nats | - |" in lines


def test_gpt_table_has_no_interpolation_where_no_method_has_settings_on_both_sides(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    side = importlib.import_module("peers.side_by_side")
    rows = [gpt_row("plain LoRA", 8, seed, (-1.8, -2.0)) for seed in range(2)]
    rows += [gpt_row("Mooring", 0.1, seed, (-1.58, -2.1)) for seed in range(2)]
    assert side.markdown(side.compare(rows)).splitlines() == [
        "| method | setting | rise, nats | fall, % of plain LoRA's |",
        "| --- | --- | --- | --- |",
        "| Mooring | 0.1 | 0.080 ± 0.000 | 80.0 ± 0.0 |",
        "| plain LoRA | 8 | 0.300 ± 0.000 | 100.0 ± 0.0, beyond 0.1 nats |",
    ]


@pytest.mark.parametrize("name", ["digits", "large", "largest"])
def test_tables_of_the_page_are_those_of_the_stored_runs(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    side, log = (importlib.import_module(name) for name in ("peers.side_by_side", "run_log"))
    rows = log.read_rows(BENCHMARKS.parent / "docs" / "figures" / f"adapter-peers-{name}.jsonl")
    assert side.markdown(side.compare(rows)) in (BENCHMARKS.parent / "docs" / "adapters.md").read_text()


def test_upper_border_of_points_is_concave_and_falls(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    border = importlib.import_module("upper_hull").upper_right
    assert border([(0, 4), (1, 3), (2, 1), (1, 1), (0.5, 3.2)]) == [(0, 4), (1, 3), (2, 1)]
    assert border([(0, 1), (1, 2)]) == [(1, 2)]


def test_shared_decompositions_leave_the_base_as_it_is(monkeypatch):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tasks, methods = (importlib.import_module(f"peers.adapter_{name}") for name in ("task", "methods"))
    task = tasks.digits_task(0, 1)
    before = {name: p.clone() for name, p in task.base.state_dict().items()}
    for method, dial in (("OSF", 0.5), ("LoRA-Null", 10), ("CorDA (KPM)", 1), ("O-LoRA", 1)):
        torch.manual_seed(0)
        first = methods.METHODS[method](task, 0, dial)
        torch.manual_seed(0)
        assert methods.METHODS[method](task, 0, dial) == first  # from what the first run has shared
    assert all(torch.equal(before[name], p) for name, p in task.base.state_dict().items())
