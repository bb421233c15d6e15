"""Tests that the benchmarks run in miniature on a CPU, and of what they print and write as JSON."""

import gc
import importlib
import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--network", "mlp", "--batch", "4"]
BRIEF = [*SMALL, "--steps", "13", "--repeats", "1"]


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Return a function that runs a mode of the fleet benchmark and returns its output and its JSON."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = importlib.import_module("fleet").main

    def run(*arguments):
        kept = tmp_path / "results.json"
        status = main([*map(str, arguments), "--json", str(kept)])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out, json.loads(kept.read_text()) if kept.exists() else None

    run.main, run.piece = main, lambda name: importlib.import_module(f"fleets.{name}")
    return run


@pytest.mark.faults
def test_step_is_the_default_and_prints_a_ratio_for_each_method_and_precision(bench):
    out, results = bench("--runs", 2, "--loop-runs", 1, "--dtype", "float32,float64", *BRIEF)
    assert [(row["dtype"], row["method"]) for row in results] == [
        ("float32", "plain"),
        ("float32", "explicit-ewc"),
        ("float64", "plain"),
        ("float64", "explicit-ewc"),
    ]
    assert all(row["ratio"] == row["loop_us"] / row["fleet_us"] > 0 for row in results)
    assert "2 runs of mlp, batch 4, float64" in out
    assert out.count("explicit-ewc") == 2


def test_json_without_a_file_goes_to_standard_output_alone(bench, capsys):
    assert bench.main(["step", "--runs", "2", "--methods", "plain", *BRIEF, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["ratio"] > 0
    assert "one by one" in captured.err


@pytest.mark.parametrize("network", ["mlp", "cnn6"])
def test_operations_are_three_forward_passes_minus_the_first_layers_input_gradient(bench, network):
    from mooring_lab.networks.initialization import initial_network

    stream = bench.piece("noise").noise(batch=4, steps=1)
    model, forward = initial_network(network, stream, 0), []

    def count(layer, inputs, output):
        fan_in = layer.weight[0].numel()
        forward.append(2 * fan_in * output[0].numel())

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            layer.register_forward_hook(count)
    model(torch.zeros(1, 3, 32, 32))
    work = bench.piece("ceiling").work_of(network, stream, batch=7)
    assert work.flops == 7 * (3 * sum(forward) - forward[0])
    assert work.bytes == 36 * sum(p.numel() for p in model.parameters())
    assert work.limit_us(rate=work.flops / 2.0, bandwidth=work.bytes / 3.0) == pytest.approx(5e6)


def test_tflops_are_compared_with_a_matrix_product(bench):
    out, results = bench("tflops", *BRIEF, "--runs", 2, "--matmul", 64)
    assert results[0]["tflops"] == pytest.approx(results[0]["flops"] / results[0]["fleet_us"] / 1e6)
    assert results[0]["share"] == pytest.approx(results[0]["tflops"] / results[0]["matmul_tflops"])
    assert "3 * forward - forward of the first layer" in out


@pytest.mark.faults
def test_first_separates_import_build_and_first_step(bench):
    out, results = bench("first", *SMALL, "--runs", 2, "--steps", 2)
    cases = ["a fresh process, caches empty", "a fresh process, caches kept", "a second fleet in that process"]
    assert [row["case"] for row in results] == cases
    for row in results:
        assert row["sum"] == pytest.approx(row["import"] + row["build"] + row["first_step"])
        assert row["case"] in out
    assert results[0]["import"] > results[2]["import"] == 0
    assert all(row["build"] > 0 and row["first_step"] > 0 for row in results)


def test_first_reports_a_failed_process_in_one_line(bench, capsys, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="Traceback:\nRuntimeError: no room\n", stdout="")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: failed)
    assert bench.main(["first", *SMALL]) == 2
    assert capsys.readouterr().err == "error: a fresh process failed: RuntimeError: no room\n"


@pytest.mark.faults
def test_scaling_plots_measurements_and_the_limit(bench, tmp_path):
    picture = tmp_path / "scaling.png"
    small = ["--matmul", 64, "--copy", 4096]
    _, results = bench("scaling", *BRIEF, *small, "--sizes", "1,2", "--plot", picture)
    (series,) = results["curves"]
    assert [point["runs"] for point in series["points"]] == [1, 2]
    assert all(point["steps_per_second"] == pytest.approx(1e6 / point["us"]) for point in series["points"])
    limit = results["flops"] / series["matmul_flops_per_second"] + results["bytes"] / results["copy_bytes_per_second"]
    assert series["limit_us"] == pytest.approx(1e6 * limit)
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    picture.unlink()
    (tmp_path / "kept.json").write_text(json.dumps(results))
    bench("scaling", "--draw", tmp_path / "kept.json", "--plot", picture)
    assert picture.read_bytes() == drawn


def test_scaling_starts_nothing_after_its_time_limit(bench):
    out, _ = bench("scaling", *BRIEF, "--matmul", 64, "--copy", 4096, "--sizes", "1,2", "--seconds", 0)
    assert out.count("not started") == 2


@pytest.mark.faults  # slow
def test_paper_times_the_table_and_the_grid_search_twice(bench):
    few = ["--methods", "plain,ewc,er", "--seeds", 2, "--tasks", 3, "--search-tasks", 2, "--limit", 20]
    out, results = bench("paper", *SMALL, *few, "--lrs", "0.01,0.001", "--strengths", "1,10,100")
    assert [(part["part"], part["time"]) for part in results] == [("table", 1), ("table", 2), ("grid", 1), ("grid", 2)]
    for part in results:
        phases = [(phase["phase"], phase["runs"]) for phase in part["studies"]]
        assert phases == ([("table", 6)] if part["part"] == "table" else [("search", 10), ("rest", 6)])
        assert part["runs"] == sum(count for _, count in phases) == sum(part["statuses"].values())
        assert 0 < sum(phase["seconds"] for phase in part["studies"]) <= part["seconds"]
        for phase in part["studies"]:
            assert sum(fleet["runs"] for fleet in phase["fleets"]) == phase["runs"]
    assert "1 methods x 2 learning rates x 3 strengths + 2 x 2 = 10 configurations x 2 tasks" in out


def test_the_papers_grid_has_335_configurations_and_its_table_65_runs(bench):
    from mooring_lab.methods import find_method, resolve_methods
    from mooring_lab.study.defaults import LRS, STRENGTHS

    methods = resolve_methods(bench.piece("paper").METHODS)
    assert len(methods) * 5 == 65
    strong = [name for name in methods if find_method(name).has_strength]
    assert len(LRS) * (len(STRENGTHS) * len(strong) + len(methods) - len(strong)) == 335


def test_random_images_are_split_like_cifar100(bench):
    stream = bench.piece("noise").cifar100()
    assert (len(stream.tasks), stream.outputs, stream.heads, stream.shape) == (10, 10, "per task", (3, 32, 32))
    assert {(len(task.train), len(task.test)) for task in stream.tasks} == {(5000, 1000)}


def test_peer_without_avalanche_prints_how_to_install_it(bench, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out, results = bench("peer", *BRIEF)
    assert "pip install avalanche-lib" in out
    assert not results


def test_peer_prints_the_ratio_of_avalanche_to_mooring(bench, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    theirs = SimpleNamespace(through_avalanche=lambda spec, stream, device, workers: 1e6)
    monkeypatch.setitem(sys.modules, "fleets.through_avalanche", theirs)
    _, results = bench("peer", *BRIEF, "--runs", 2)
    assert [row["method"] for row in results] == ["ewc", "si"]
    for row in results:
        assert row["avalanche_over_attach"] == pytest.approx(1e6 / row["attach_us"])
        assert row["avalanche_over_fleet"] == pytest.approx(1e6 / row["fleet_us"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dtype", "bf16"], "dtype='bf16' is for a GPU"),
        (["tflops", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["scaling", "--steps", "10"], "steps=10 is not allowed: the clock starts after 10"),
        (["scaling", "--draw", "some.json"], "--draw needs a file for the figure"),
    ],
)
def test_bad_options_are_refused_in_one_line(bench, capsys, arguments, line):
    assert bench.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {line}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_smallest_memory_options_use_at_most_four_bytes_per_parameter(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    memory = importlib.import_module("memory")
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)  # slow after many imports, and needed only on a GPU
    small = ["--side", "64", "--layers", "2", "--batch", "2", "--times", "1", "--turns", "1"]
    assert memory.main(["--dtype", "bfloat16", "--json", *small]) == 0
    rows = {row["mode"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["full"]["device"] == 10
    lean = rows["8-bit, no current"]
    assert lean["device"] + lean["host"] <= 4
    assert rows["8-bit, no current, host"]["device"] <= 2
    assert memory.main(small) == 0
    assert "full                         4.00     4.00    4.00 |  12.00  0.00" in capsys.readouterr().out


@pytest.mark.faults  # slow
def test_promised_measures_more_forgetting_than_was_estimated(tmp_path):
    kept, figure = tmp_path / "results.json", tmp_path / "figure"
    options = ["--stream", "digits", "--estimate", "Kronecker", "--nats", "0.03", "--seeds", "1"]
    script = BENCHMARKS / "promised.py"
    command = [sys.executable, "-W", "error", script, *options, "--json", kept, "--figure", figure]
    done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 2
    (row,) = json.loads(kept.read_text())
    assert row["actual"] > 10 * 0.03
    assert all(figure.with_suffix(f".{kind}").stat().st_size > 5000 for kind in ("svg", "png"))


@pytest.mark.faults  # slow
def test_saturated_prints_the_rows_of_its_page(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("saturated")
    monkeypatch.setattr(bench, "train", lambda *args, **kwargs: None)  # training takes minutes
    monkeypatch.setattr(bench, "REFERENCE_IMAGES", 2 * bench.BATCH_SIZE)
    monkeypatch.setattr(sys, "argv", ["saturated.py", "--seeds", "1"])
    bench.main()
    printed = capsys.readouterr().out.splitlines()
    page = (BENCHMARKS.parent / "docs" / "estimated-budgets.md").read_text()
    assert printed[0] in page
    assert len(printed) == 1 + len(bench.TASKS) * len(bench.SETTINGS)
    for line in printed[1:]:
        assert line[:36].rstrip() in page


def test_finetuning_cost_spends_its_budget_in_every_step(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main, kept = importlib.import_module("finetuning_cost").main, tmp_path / "results.json"
    brief = ["--tiny", "--turns", "1", "--block", "1", "--reference", "1"]
    main([*brief, "--only", "efficientnet", "--rows", "kronecker,explicit", "--json", str(kept)])
    (model,) = json.loads(kept.read_text())["models"]
    kronecker, explicit = model["rows"]
    assert all(0.98 < share <= 1 for share in kronecker["spent_of_budget"])
    assert explicit["spent_of_budget"] == []
    assert kronecker["attach_steps"] == pytest.approx(1e3 * kronecker["attach_seconds"] / model["plain_ms"])
    assert capsys.readouterr().out.count("\nkronecker ") == 1
    main(["--table", str(kept)])
    times, memory = (part.splitlines() for part in capsys.readouterr().out.split("\n\n")[2:])
    assert len(times) == len(memory) == 2 + len(model["rows"])
    assert times[2].startswith(f"| efficientnet | kronecker | {kronecker['step_ratio']:.3f} | ")
    assert f" | {kronecker['state_bytes_per_parameter']:.2f} | 0 |" in memory[2]


def test_finetuning_cost_moors_adapters_by_their_product_one_model_at_a_time(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench, kept = importlib.import_module("finetuning_cost"), tmp_path / "results.json"
    alive, counts = weakref.WeakSet(), []

    class Counted(bench.Trainer):
        def __init__(self, *given):
            gc.collect()
            counts.append(len(alive))
            super().__init__(*given)
            alive.add(self)

    monkeypatch.setattr(bench, "Trainer", Counted)
    brief = ["--tiny", "--turns", "1", "--block", "1", "--reference", "1", "--json", str(kept)]
    bench.main([*brief, "--only", "llama-7b-lora", "--rows", "product,measured"])
    (model,) = json.loads(kept.read_text())["models"]
    assert counts == [0, 0, 0]  # the plain one, and that of each row
    assert model["trained_parameters"] < model["parameters"] / 2
    assert all(0.98 < share <= 1 for share in model["rows"][0]["spent_of_budget"])
    assert model["rows"][0]["reference_bytes"] == 0 < model["rows"][1]["reference_bytes"]


def test_finetuning_cost_of_measured_budgets_has_a_gauge(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench, kept = importlib.import_module("finetuning_cost"), tmp_path / "results.json"
    names = ["lean measured", "kronecker measured"]
    brief = ["--tiny", "--turns", "1", "--block", "1", "--reference", "1", "--json", str(kept)]
    bench.main([*brief, "--only", "gpt2", "--rows", ",".join(names)])
    (model,) = json.loads(kept.read_text())["models"]
    lean, kronecker = model["rows"]
    assert [row["row"] for row in model["rows"]] == names
    assert all(row["reference_bytes"] > 0 for row in model["rows"])
    assert lean["state_bytes"] < kronecker["state_bytes"]
    lines = capsys.readouterr().out.splitlines()
    assert {len(line) for line in lines if line.startswith(("row", *names))} == {len(bench.HEAD)}


def test_finetuning_cost_stops_in_time(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main, kept = importlib.import_module("finetuning_cost").main, tmp_path / "results.json"
    main(["--tiny", "--only", "many-tensors", "--minutes", "0", "--json", str(kept)])
    assert "many-tensors" not in capsys.readouterr().out
    assert not kept.exists()


def test_sampled_places_compares_with_all_places(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench, kept = importlib.import_module("sampled_places"), tmp_path / "results.json"
    monkeypatch.setattr(bench, "train", lambda model, *_: [p.data.mul_(1.01) for p in model.parameters()])
    monkeypatch.setattr(bench, "REFERENCE", 40)
    bench.main(["--seeds", "1", "--places", "16", "--json", str(kept)])
    results = json.loads(kept.read_text())
    assert [*results] == ["all", "16"]
    assert results["all"]["error_percent"] == pytest.approx(0, abs=1e-3)
    assert results["16"]["error_percent"] != 0
    assert len(capsys.readouterr().out.splitlines()) == 2
