"""A probe takes a few steps of a real fleet, times the last ones, and leaves no trace."""

import gc
import weakref
from dataclasses import replace
from itertools import count

import pytest
import torch

from laboratory.small import class_stream, domain_stream, spec_for
from mooring_lab.engines import device_memory as memory
from mooring_lab.engines import sizing
from mooring_lab.engines.sizing import PROBE_STEPS, TIMED_STEPS, SizeProbe, probe_size
from mooring_lab.fleet.fleet import Fleet

STREAM = class_stream(tasks=2, images=100)
METHODS = ["plain", "explicit-ewc", "si", "er", "a-gem", "joint", "frozen-after-first", "explicit-mas"]


@pytest.mark.parametrize("method", METHODS)
def test_probe_takes_a_few_steps_of_every_method_and_times_the_last_ones(method):
    clock = count()
    probe = probe_size([spec_for(method, STREAM, seed) for seed in range(3)], STREAM, now=lambda: next(clock))
    assert probe == SizeProbe(3, 1 / TIMED_STEPS, next(clock) - 1)
    assert next(clock) - 1 < PROBE_STEPS


def refuse_results(fleet):
    raise AssertionError("a probe needs no results")


class Spied(Fleet):
    created: list["weakref.ref[Fleet]"]
    steps_of_task: dict[int, int]

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        Spied.created.append(weakref.ref(self))
        self.measured.finish = refuse_results

    def _step(self, task, *more):
        Spied.steps_of_task[task] = Spied.steps_of_task.get(task, 0) + 1
        super()._step(task, *more)


@pytest.fixture
def spied(monkeypatch):
    Spied.created, Spied.steps_of_task = [], {}
    monkeypatch.setattr(sizing, "Fleet", Spied)
    return Spied


@pytest.mark.parametrize(
    "stream",
    [class_stream(1, 30), class_stream(3, 400), class_stream(2, 5), domain_stream(2, 400)],
    ids=["one task", "three tasks", "few images", "one head"],
)
def test_probe_is_short_for_every_stream_and_leaves_no_fleet(spied, stream):
    probe = probe_size([spec_for("si", stream, seed) for seed in range(2)], stream)
    assert probe.runs == 2
    assert 0 < probe.step_seconds < probe.total_seconds
    last = min(1, len(stream.tasks) - 1)
    assert spied.steps_of_task[last] == PROBE_STEPS
    assert sum(spied.steps_of_task.values()) <= 2 * PROBE_STEPS + PROBE_STEPS
    assert [fleet() for fleet in spied.created] == [None]


def test_probe_preserves_the_global_random_state(spied, monkeypatch):
    monkeypatch.setattr(spied, "_begin_task", lambda self, task: torch.rand(1))
    before = torch.get_rng_state()
    assert probe_size([spec_for("explicit-random", STREAM, seed) for seed in range(2)], STREAM).runs == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_diverging_run_does_not_diverge_in_a_probe():
    wild = [replace(spec_for("ewc", STREAM, seed), lr=100.0, strength=1e30) for seed in range(3)]
    assert probe_size(wild, STREAM).runs == 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=repr)
def test_probe_out_of_memory_returns_none_and_holds_nothing(spied, monkeypatch, error):
    monkeypatch.setattr(Spied, "_step", lambda *args: (_ for _ in ()).throw(error))
    assert probe_size([spec_for("plain", STREAM)], STREAM) is None
    error.__traceback__ = None  # pytest holds the error itself
    gc.collect()
    assert [fleet() for fleet in spied.created] == [None]


def test_other_error_in_a_probe_is_raised(spied, monkeypatch):
    monkeypatch.setattr(Spied, "_step", lambda *args: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        probe_size([spec_for("plain", STREAM)], STREAM)


def test_missing_memory_on_a_cpu_is_recognized_by_its_message():
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60)
    assert memory.is_out_of_memory(real.value)
    assert memory.is_out_of_memory(MemoryError())
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not memory.is_out_of_memory(KeyError("can't allocate memory"))
