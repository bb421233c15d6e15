"""A trial takes a few steps of a real fleet, times the last ones, and leaves no trace."""

import gc
import weakref
from dataclasses import replace
from itertools import count

import pytest
import torch

from lab.small import class_stream, domain_stream, spec_for
from mooring.lab.engines import device_memory as memory
from mooring.lab.engines import size_probe as trial
from mooring.lab.engines.size_probe import PROBE_STEPS, TIMED_STEPS, SizeProbe, probe_size
from mooring.lab.fleet.fleet import Fleet

STREAM = class_stream(tasks=2, images=100)
METHODS = ["plain", "explicit-ewc", "si", "er", "a-gem", "joint", "frozen-after-first", "explicit-mas"]


@pytest.mark.parametrize("method", METHODS)
def test_a_trial_takes_a_few_steps_of_every_method_and_times_the_last_ones(method):
    clock = count()
    found = probe_size([spec_for(method, STREAM, seed) for seed in range(3)], STREAM, now=lambda: next(clock))
    assert found == SizeProbe(3, 1 / TIMED_STEPS, next(clock) - 1)
    assert next(clock) - 1 < PROBE_STEPS


class Spied(Fleet):
    made: list["weakref.ref[Fleet]"]
    steps_of_task: dict[int, int]

    def __init__(self, *args, **rest) -> None:
        super().__init__(*args, **rest)
        Spied.made.append(weakref.ref(self))

    def _step(self, task, *rest):
        Spied.steps_of_task[task] = Spied.steps_of_task.get(task, 0) + 1
        super()._step(task, *rest)

    def _finish(self):
        raise AssertionError("a trial needs no results")


@pytest.fixture
def spied(monkeypatch):
    Spied.made, Spied.steps_of_task = [], {}
    monkeypatch.setattr(trial, "Fleet", Spied)
    return Spied


@pytest.mark.parametrize(
    "stream",
    [class_stream(1, 30), class_stream(3, 400), class_stream(2, 5), domain_stream(2, 400)],
    ids=["one task", "three tasks", "few images", "one head"],
)
def test_a_trial_is_short_whatever_the_stream_and_nothing_is_left_of_it(spied, stream):
    found = probe_size([spec_for("si", stream, seed) for seed in range(2)], stream)
    assert found.runs == 2
    assert 0 < found.step_seconds < found.total_seconds
    last = min(1, len(stream.tasks) - 1)
    assert spied.steps_of_task[last] == PROBE_STEPS
    assert sum(spied.steps_of_task.values()) <= 2 * PROBE_STEPS + PROBE_STEPS
    assert [fleet() for fleet in spied.made] == [None]


def test_a_trial_leaves_global_random_numbers_as_they_were(spied, monkeypatch):
    monkeypatch.setattr(spied, "_begin", lambda self, task: torch.rand(1))
    before = torch.get_rng_state()
    assert probe_size([spec_for("explicit-random", STREAM, seed) for seed in range(2)], STREAM).runs == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_would_diverge_does_not_in_a_trial():
    wild = [replace(spec_for("ewc", STREAM, seed), lr=100.0, strength=1e30) for seed in range(3)]
    assert probe_size(wild, STREAM).runs == 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=repr)
def test_a_trial_out_of_memory_says_so_and_holds_nothing(spied, monkeypatch, error):
    monkeypatch.setattr(Spied, "_forward", lambda *args: (_ for _ in ()).throw(error))
    assert probe_size([spec_for("plain", STREAM)], STREAM) is None
    error.__traceback__ = None  # pytest holds the error itself
    gc.collect()
    assert [fleet() for fleet in spied.made] == [None]


def test_another_error_in_a_trial_is_not_hidden(spied, monkeypatch):
    monkeypatch.setattr(Spied, "_forward", lambda *args: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        probe_size([spec_for("plain", STREAM)], STREAM)


def test_too_little_memory_on_a_cpu_is_known_by_what_it_says():
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60)
    assert memory.is_out_of_memory(real.value)
    assert memory.is_out_of_memory(MemoryError())
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. SizeProbe to allocate 2.00 GiB"))
    assert not memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not memory.is_out_of_memory(KeyError("can't allocate memory"))
