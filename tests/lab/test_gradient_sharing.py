"""Until a pull acts, methods move a network in the same way: that is computed once, and no result shows it."""

from dataclasses import replace

import pytest

from lab.small import class_stream, gpu, spec_for
from lab.test_checkpoint import continued, near, never_stopped, stopped_at, told
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.gradient_sharing import GradientSharing
from mooring.lab.methods import METHODS, find_method
from mooring.lab.model.spec import RunSpec

STREAM = class_stream(tasks=3, images=8)
SHARING = ["plain", "ewc", "si", "explicit-rwalk", "random", "proximal-ewc", "balanced-ewc", "imm-mode", "l2-sp"]


def every(methods, seeds=(0, 1), **rest) -> list[RunSpec]:
    return [spec_for(name, STREAM, seed, **{"batch": 4, "epochs": 1, **rest}) for name in methods for seed in seeds]


def widths(specs: list[RunSpec], monkeypatch, **rest) -> dict[int, set[int]]:
    """Of how many runs gradients were computed, by task."""
    seen: dict[int, set[int]] = {}
    forward = Fleet._forward

    def counted(fleet: Fleet, indices, task):
        seen.setdefault(fleet.position.task, set()).add(len(indices))
        return forward(fleet, indices, task)

    monkeypatch.setattr(Fleet, "_forward", counted)
    Fleet(specs, STREAM, **rest).run()
    return seen


NETWORKS = ["mlp", "lab.test_checkpoint:normalised", "lab.test_checkpoint:convolving", "lab.test_checkpoint:dropping"]


@pytest.mark.parametrize("network", NETWORKS)
def test_methods_end_as_they_would_alone(network):
    specs = every(SHARING, network=network)
    alone = {key: value for spec in specs for key, value in told(Fleet([spec], STREAM).run()).items()}
    near(never_stopped(specs, STREAM)[0], alone, specs)
    assert len(set(alone.values())) == len(specs)


def test_one_gradient_serves_all_that_are_alike_in_the_first_task(monkeypatch):
    found = widths(every(SHARING), monkeypatch)
    assert found == {0: {4}, 1: {18}, 2: {18}}  # two seeds, and two that hold on to the start from the first step on


def test_other_numbers_go_another_way(monkeypatch):
    specs = every(["plain", "explicit-si"])
    other = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}
    specs += [replace(specs[0], **{name: value}) for name, value in other.items()]
    assert widths(specs, monkeypatch)[0] == {5}


@pytest.mark.parametrize("method", ["mas", "er", "a-gem", "budget-kronecker"])
def test_who_looks_at_more_than_a_gradient_is_computed_alone(method):
    assert GradientSharing.of(every([method, method])).rows == ()


def test_every_method_is_either_plain_in_its_first_task_or_not_taken_for_it():
    """With its first task alone, whatever a method shares with plain fine-tuning it ends with, too."""
    stream = replace(STREAM, tasks=STREAM.tasks[:1])
    plain = Fleet([spec_for("plain", stream)], stream)
    expected = plain.run()[0].matrix
    for name in METHODS:
        specs = [spec_for("plain", stream), spec_for(name, stream)]
        method = find_method(name)
        same = (method.data, method.frozen, method.memory) == ("task", "never", None)
        if same and GradientSharing.of(specs).rows == (0,):
            assert Fleet(specs[1:], stream).run()[0].matrix == expected, name


def test_runs_that_are_lost_are_lost_together():
    specs = [replace(spec, lr=1e200) if spec.seed else spec for spec in every(["plain", "ewc", "explicit-si"])]
    found = Fleet(specs, STREAM).run()
    assert {result.spec.seed for result in found if result.status == "unstable"} == {1}
    assert len({(result.reason, result.steps) for result in found if result.spec.seed}) == 1


@pytest.mark.parametrize("stop", range(0, 9, 2))
def test_stopped_anywhere_and_continued_with_all_or_some(stop, tmp_path):
    specs = every(SHARING[:5])
    expected, _ = never_stopped(specs, STREAM)
    stopped_at(specs, STREAM, tmp_path / "fleet", stop)
    assert continued(specs, STREAM, tmp_path / "fleet") == expected  # to the last bit
    for some in (specs[3:], specs[1::2], specs[5:6]):
        near(continued(some, STREAM, tmp_path / "fleet"), expected, some)


@gpu
@pytest.mark.parametrize("network", ["cnn6", "resnet18-third"])
@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_the_same_on_a_gpu(network, dtype, monkeypatch):
    """In a recorded step too; tiles, and with them the last bits, hang on how many runs there are."""
    specs = every(["plain", "ewc", "explicit-si", "explicit-rwalk"], network=network, dtype=dtype, lr=0.001, epochs=5)
    shared = {result.spec: result for result in Fleet(specs, STREAM, device="cuda").run()}
    monkeypatch.setattr(GradientSharing, "of", lambda *told: GradientSharing())
    for apart in Fleet(specs, STREAM, device="cuda").run():
        assert shared[apart.spec].losses[0] == pytest.approx(apart.losses[0], rel=0.02)
