"""Every mode of the fleet benchmark runs in miniature on a CPU, and says in lines and in JSON what it found."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = ["--network", "mlp", "--batch", "4"]
BRIEF = [*SMALL, "--steps", "13", "--repeats", "1"]


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Runs a mode; what it printed, and the JSON it wrote."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = importlib.import_module("fleet").main

    def run(*arguments):
        kept = tmp_path / "found.json"
        status = main([*map(str, arguments), "--json", str(kept)])
        told = capsys.readouterr()
        assert status == 0, told.err
        return told.out, json.loads(kept.read_text()) if kept.exists() else None

    run.main, run.piece = main, lambda name: importlib.import_module(f"fleets.{name}")
    return run


def test_step_is_the_default_and_prints_a_ratio_for_each_method_and_precision(bench):
    out, found = bench("--runs", 2, "--loop-runs", 1, "--dtype", "float32,float64", *BRIEF)
    assert [(row["dtype"], row["method"]) for row in found] == [
        ("float32", "plain"),
        ("float32", "explicit-ewc"),
        ("float64", "plain"),
        ("float64", "explicit-ewc"),
    ]
    assert all(row["ratio"] == row["loop_us"] / row["fleet_us"] > 0 for row in found)
    assert "2 runs of mlp, batch 4, float64" in out
    assert out.count("explicit-ewc") == 2


def test_json_without_a_file_is_all_there_is_on_standard_output(bench, capsys):
    assert bench.main(["step", "--runs", "2", "--methods", "plain", *BRIEF, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)[0]["ratio"] > 0
    assert "one by one" in told.err


@pytest.mark.parametrize("network", ["mlp", "cnn6"])
def test_operations_are_three_times_the_forward_pass_less_what_the_first_layer_saves(bench, network):
    from mooring.lab.networks.initialization import initial_network

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


def test_tflops_are_beside_those_of_a_matrix_product(bench):
    out, found = bench("tflops", *BRIEF, "--runs", 2, "--matmul", 64)
    assert found[0]["tflops"] == pytest.approx(found[0]["flops"] / found[0]["fleet_us"] / 1e6)
    assert found[0]["share"] == pytest.approx(found[0]["tflops"] / found[0]["matmul_tflops"])
    assert "3 * forward - forward of the first layer" in out


@pytest.mark.faults
def test_first_tells_import_building_and_first_step_apart(bench):
    out, found = bench("first", *SMALL, "--runs", 2, "--steps", 2)
    cases = ["a fresh process, caches empty", "a fresh process, caches kept", "a second fleet in that process"]
    assert [row["case"] for row in found] == cases
    for row in found:
        assert row["sum"] == pytest.approx(row["import"] + row["build"] + row["first_step"])
        assert row["case"] in out
    assert found[0]["import"] > found[2]["import"] == 0
    assert all(row["build"] > 0 and row["first_step"] > 0 for row in found)


def test_first_says_in_one_line_why_a_process_failed(bench, capsys, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="Traceback:\nRuntimeError: no room\n", stdout="")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: failed)
    assert bench.main(["first", *SMALL]) == 2
    assert capsys.readouterr().err == "error: a fresh process failed: RuntimeError: no room\n"


def test_scaling_draws_what_it_measured_and_the_limit(bench, tmp_path):
    picture = tmp_path / "scaling.png"
    small = ["--matmul", 64, "--copy", 4096]
    _, found = bench("scaling", *BRIEF, *small, "--sizes", "1,2", "--plot", picture)
    (curve,) = found["curves"]
    assert [point["runs"] for point in curve["points"]] == [1, 2]
    assert all(point["steps_per_second"] == pytest.approx(1e6 / point["us"]) for point in curve["points"])
    limit = found["flops"] / curve["matmul_flops_per_second"] + found["bytes"] / found["copy_bytes_per_second"]
    assert curve["limit_us"] == pytest.approx(1e6 * limit)
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    picture.unlink()
    (tmp_path / "kept.json").write_text(json.dumps(found))
    bench("scaling", "--draw", tmp_path / "kept.json", "--plot", picture)
    assert picture.read_bytes() == drawn


def test_scaling_begins_nothing_when_its_time_is_over(bench):
    out, _ = bench("scaling", *BRIEF, "--matmul", 64, "--copy", 4096, "--sizes", "1,2", "--seconds", 0)
    assert out.count("not begun") == 2


def test_paper_times_the_table_and_the_grid_search_twice(bench):
    few = ["--methods", "plain,ewc,er", "--seeds", 2, "--tasks", 3, "--search-tasks", 2, "--limit", 20]
    out, found = bench("paper", *SMALL, *few, "--lrs", "0.01,0.001", "--strengths", "1,10,100")
    assert [(part["part"], part["time"]) for part in found] == [("table", 1), ("table", 2), ("grid", 1), ("grid", 2)]
    for part in found:
        phases = [(phase["phase"], phase["runs"]) for phase in part["studies"]]
        assert phases == ([("table", 6)] if part["part"] == "table" else [("search", 10), ("rest", 6)])
        assert part["runs"] == sum(count for _, count in phases) == sum(part["statuses"].values())
        assert 0 < sum(phase["seconds"] for phase in part["studies"]) <= part["seconds"]
        for phase in part["studies"]:
            assert sum(fleet["runs"] for fleet in phase["fleets"]) == phase["runs"]
    assert "1 methods x 2 learning rates x 3 strengths + 2 x 2 = 10 configurations x 2 tasks" in out


def test_the_papers_grid_has_335_configurations_and_its_table_65_runs(bench):
    from mooring.lab.methods import find_method, resolve_methods
    from mooring.lab.study.defaults import LRS, STRENGTHS

    methods = resolve_methods(bench.piece("paper").METHODS)
    assert len(methods) * 5 == 65
    strong = [name for name in methods if find_method(name).has_strength]
    assert len(LRS) * (len(STRENGTHS) * len(strong) + len(methods) - len(strong)) == 335


def test_random_images_are_cut_as_cifar100_is(bench):
    stream = bench.piece("noise").cifar100()
    assert (len(stream.tasks), stream.outputs, stream.heads, stream.shape) == (10, 10, "per task", (3, 32, 32))
    assert {(len(task.train), len(task.test)) for task in stream.tasks} == {(5000, 1000)}


def test_peer_without_avalanche_says_how_to_install_it(bench, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out, found = bench("peer", *BRIEF)
    assert "pip install avalanche-lib" in out
    assert not found


def test_peer_prints_avalanche_over_ours(bench, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    theirs = SimpleNamespace(through_avalanche=lambda spec, stream, device, workers: 1e6)
    monkeypatch.setitem(sys.modules, "fleets.through_avalanche", theirs)
    _, found = bench("peer", *BRIEF, "--runs", 2)
    assert [row["method"] for row in found] == ["ewc", "si"]
    for row in found:
        assert row["avalanche_over_attach"] == pytest.approx(1e6 / row["attach_us"])
        assert row["avalanche_over_fleet"] == pytest.approx(1e6 / row["fleet_us"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dtype", "bf16"], "dtype='bf16' is for a GPU"),
        (["tflops", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["scaling", "--steps", "10"], "steps=10 is not allowed: the clock starts after 10"),
        (["scaling", "--draw", "some.json"], "--draw needs somewhere to draw to"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(bench, capsys, arguments, line):
    assert bench.main(arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {line}")
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_the_leanest_forms_keep_at_most_four_bytes_for_each_parameter(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    memory = importlib.import_module("memory")
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)  # slow where much was imported; for a GPU's memory
    small = ["--side", "64", "--layers", "2", "--batch", "2", "--times", "1", "--turns", "1"]
    assert memory.main(["--dtype", "bfloat16", "--json", *small]) == 0
    rows = {row["mode"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["full"]["device"] == 10
    lean = rows["8-bit, no current"]
    assert lean["device"] + lean["host"] <= 4
    assert rows["8-bit, no current, host"]["device"] <= 2
    assert memory.main(small) == 0
    assert "full                         4.00     4.00    4.00 |  12.00  0.00" in capsys.readouterr().out
