"""In the first task, before any pull acts, runs of several methods share one gradient without changing results."""

from dataclasses import replace

import pytest

from laboratory.small import class_stream, gpu, spec_for
from laboratory.test_checkpoint import assert_close_results, resumed, stop_at, uninterrupted, without_time
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.gradient_sharing import GradientSharing
from mooring_lab.methods import METHODS, find_method
from mooring_lab.model.spec import RunSpec

STREAM = class_stream(tasks=3, images=8)
SHARING = ["plain", "ewc", "si", "explicit-rwalk", "random", "proximal-ewc", "balanced-ewc", "imm-mode", "l2-sp"]


def specs_for(methods, seeds=(0, 1), **settings) -> list[RunSpec]:
    return [spec_for(name, STREAM, seed, **{"batch": 4, "epochs": 1, **settings}) for name in methods for seed in seeds]


def gradient_counts(specs: list[RunSpec], monkeypatch) -> dict[int, set[int]]:
    """Train a fleet and return how many gradients its steps computed, by task."""
    counts: dict[int, set[int]] = {}
    fleet = Fleet(specs, STREAM)
    forward = fleet.passes.losses

    def counted(indices, task):
        counts.setdefault(fleet.position.task, set()).add(len(indices))
        return forward(indices, task)

    monkeypatch.setattr(fleet.passes, "losses", counted)
    fleet.run()
    return counts


NETWORKS = [
    "mlp",
    "laboratory.test_checkpoint:normalised",
    "laboratory.test_checkpoint:convolving",
    "laboratory.test_checkpoint:dropping",
]


@pytest.mark.parametrize("network", NETWORKS)
def test_runs_that_share_gradients_equal_the_runs_alone(network):
    specs = specs_for(SHARING, network=network)
    alone = {key: value for spec in specs for key, value in without_time(Fleet([spec], STREAM).run()).items()}
    assert_close_results(uninterrupted(specs, STREAM)[0], alone, specs)
    assert len(set(alone.values())) == len(specs)


def test_first_task_computes_one_gradient_per_seed(monkeypatch):
    counts = gradient_counts(specs_for(SHARING), monkeypatch)
    assert counts == {0: {4}, 1: {18}, 2: {18}}  # two seeds, and l2-sp, which anchors at the initial weights


def test_runs_with_other_hyperparameters_do_not_share(monkeypatch):
    specs = specs_for(["plain", "explicit-si"])
    other = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}
    specs += [replace(specs[0], **{name: value}) for name, value in other.items()]
    assert gradient_counts(specs, monkeypatch)[0] == {5}


@pytest.mark.parametrize("method", ["mas", "er", "a-gem", "der++", "budget-kronecker"])
def test_methods_that_read_more_than_gradients_do_not_share(method):
    assert GradientSharing.of(specs_for([method, method])).rows == ()


def test_methods_that_share_with_plain_equal_plain_on_one_task():
    stream = replace(STREAM, tasks=STREAM.tasks[:1])
    plain = Fleet([spec_for("plain", stream)], stream)
    expected = plain.run()[0].matrix
    for name in METHODS:
        specs = [spec_for("plain", stream), spec_for(name, stream)]
        method = find_method(name)
        same = method.plugin is None
        if same and GradientSharing.of(specs).rows == (0,):
            assert Fleet(specs[1:], stream).run()[0].matrix == expected, name


def test_runs_that_share_gradients_fail_together():
    specs = [replace(spec, lr=1e200) if spec.seed else spec for spec in specs_for(["plain", "ewc", "explicit-si"])]
    results = Fleet(specs, STREAM).run()
    assert {result.spec.seed for result in results if result.status == "unstable"} == {1}
    assert len({(result.reason, result.steps) for result in results if result.spec.seed}) == 1


@pytest.mark.parametrize("stop", range(0, 9, 2))
def test_fleet_resumed_with_all_or_some_runs_equals_uninterrupted(stop, tmp_path):
    specs = specs_for(SHARING[:5])
    expected, _ = uninterrupted(specs, STREAM)
    stop_at(specs, STREAM, tmp_path / "fleet", stop)
    assert resumed(specs, STREAM, tmp_path / "fleet") == expected  # to the last bit
    for selected in (specs[3:], specs[1::2], specs[5:6]):
        assert_close_results(resumed(selected, STREAM, tmp_path / "fleet"), expected, selected)


@gpu
@pytest.mark.parametrize("network", ["cnn6", "resnet18-third"])
@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_sharing_on_a_gpu_gives_the_same_losses(network, dtype, monkeypatch):
    """Also in captured steps. The tiles, and with them the last bits, depend on the number of runs."""
    specs = specs_for(
        ["plain", "ewc", "explicit-si", "explicit-rwalk"], network=network, dtype=dtype, lr=0.001, epochs=5
    )
    shared = {result.spec: result for result in Fleet(specs, STREAM, device="cuda").run()}
    monkeypatch.setattr(GradientSharing, "of", lambda *args: GradientSharing())
    for separate in Fleet(specs, STREAM, device="cuda").run():
        assert shared[separate.spec].losses[0] == pytest.approx(separate.losses[0], rel=0.02)
