"""Fleets are as large as an estimate says that memory allows, up to a limit."""

import pytest
import torch

from laboratory.small import class_stream
from mooring_lab.engines import device_memory as memory
from mooring_lab.engines.engine import LocalEngine
from mooring_lab.engines.runner import RunContext
from mooring_lab.engines.sizing import MAX_RUNS, estimate_run_bytes, fleet_sizes
from mooring_lab.fleet.grouping import group_into_fleets, split_evenly
from mooring_lab.model.spec import RunSpec
from mooring_lab.study.study import Study

STREAM = class_stream(tasks=2, images=100)
STREAMS = {STREAM.fingerprint: STREAM}


def runs_of(number: int, method: str = "plain", **more) -> list[RunSpec]:
    return [RunSpec("digits", STREAM.fingerprint, method, seed, **more) for seed in range(number)]


def test_half_of_the_free_memory_is_used_and_runs_are_divided_evenly():
    run_bytes = estimate_run_bytes(runs_of(1)[0], STREAM)
    sizes = fleet_sizes(STREAMS, "cpu", lambda: 2 * (50 * run_bytes) + run_bytes)
    assert sizes(runs_of(200)) == 50
    assert [len(fleet) for fleet in group_into_fleets(runs_of(120), sizes)] == [40, 40, 40]


def test_runs_train_one_by_one_if_memory_holds_less_than_one():
    assert fleet_sizes(STREAMS, "cpu", lambda: 0)(runs_of(10)) == 1


def test_larger_dtypes_and_batches_take_more_memory():
    plain, double, batch = (
        estimate_run_bytes(runs_of(1, **more)[0], STREAM) for more in ({}, {"dtype": "float64"}, {"batch": 40})
    )
    assert double == 2 * plain
    assert batch > plain


@pytest.mark.parametrize("device", MAX_RUNS)
def test_nominal_memory_and_limit_do_not_depend_on_the_machine(device):
    sizes = fleet_sizes(STREAMS, device)
    assert sizes(runs_of(10_000)) == MAX_RUNS[device]
    assert 1 <= sizes(runs_of(500, batch=20_000)) < MAX_RUNS[device]


def test_memory_is_asked_for_once():
    asked = []
    sizes = fleet_sizes(STREAMS, "cpu", lambda: asked.append("free") or 1 << 34)
    for batch in (5, 10, 10):
        sizes(runs_of(3, batch=batch))
    assert asked == ["free"]


def test_deterministic_engine_does_not_ask_for_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("mooring_lab.engines.engine.free_memory", lambda device: pytest.fail("it was measured"))
    engine = LocalEngine(RunContext(STREAMS, {}, deterministic=True), tmp_path)
    assert engine.fleet_sizes([])(runs_of(10)) == MAX_RUNS["cpu"]


def test_given_fleet_size_needs_no_estimate(tmp_path, monkeypatch):
    monkeypatch.setattr("mooring_lab.engines.sizing.estimate_run_bytes", None)
    settings = {"network": "mlp", "batch": 10, "epochs": 1, "dtype": "float64", "lr": 0.05}
    study = Study(tmp_path / "s.sqlite", fleet=4)
    (row,) = study.compare(methods="plain", seeds=6, stream=class_stream(2, 20), **settings)
    assert len(row.results) == 6


@pytest.mark.parametrize("number", [1, 2, 7, 64, 65, 1000])
@pytest.mark.parametrize("most", [1, 3, 64, 5000])
def test_parts_are_even_in_order_and_no_larger_than_they_may_be(number, most):
    runs = runs_of(number)
    split = split_evenly(runs, most)
    assert [run for part in split for run in part] == runs
    lengths = [len(part) for part in split]
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert len(split) == -(-number // most)


def test_free_memory_is_what_the_machine_says_and_a_container_allows(tmp_path):
    file = tmp_path / "memory"
    file.write_text("MemTotal:       24000000 kB\nMemFree:         1000 kB\nMemAvailable:   2048 kB\n")
    assert memory._available(file) == 2 << 20
    assert memory._available(tmp_path / "nothing") == memory.ASSUMED_FREE_BYTES
    file.write_text("3000000\n")
    assert memory._container_limit(file) == 3_000_000
    file.write_text("max\n")
    assert memory._container_limit(file) > 1 << 60
    assert 0 < memory.free_memory("cpu") < 1 << 60


def test_memory_that_torch_keeps_on_a_gpu_is_free(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5000, 9000))
    assert memory.free_memory("cuda:1") == 5000
    assert said == ["empty"]
