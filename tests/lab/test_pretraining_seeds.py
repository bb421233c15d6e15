"""Backbones of several seeds at once: each is what it is alone, whatever stops it, and steps are fit to be recorded."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.small import gpu
from lab.test_pretraining import SMALL, STREAM, StoppedError, content
from mooring.errors import MooringError
from mooring.lab.fleet.augment import drawn
from mooring.lab.fleet.gpu.cuda_graphs import EAGER, Recorder
from mooring.lab.networks.initialization import read_weights
from mooring.lab.streams.slices import limit_images, merge_tasks
from mooring.lab.study import pretraining
from mooring.lab.study.pretraining import Pretraining, pretrain

SEEDS = Pretraining(network="mlp", epochs=3, lr=0.05, batch=32, seed=2, seeds=3, shifts=1)
NETWORKS = ["mlp", "resnet18-third", "lab.test_pretraining:normalised", "lab.test_pretraining:dropping"]


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("network", NETWORKS)
def test_each_seed_becomes_what_it_becomes_alone(network, tmp_path):
    """To 1e-6 in float32 for the mlp; deep networks are compared in float64, where less than that is lost."""
    settings = replace(SEEDS, network=network, epochs=2, dtype="float32" if network == "mlp" else "float64")
    stream = SMALL if network == "mlp" else limit_images(STREAM, 20)
    taught = pretrain(stream, settings, tmp_path / "b.safetensors")
    assert [(each.seed, each.path.name) for each in taught] == [(seed, f"b-{seed}.safetensors") for seed in (2, 3, 4)]
    for each in taught:
        [alone] = pretrain(stream, replace(settings, seed=each.seed, seeds=1), tmp_path / "alone")
        found, expected = read_weights(each.path).tensors, read_weights(alone.path).tensors
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert content(each.path)[0] == content(alone.path)[0]  # what is told about it too
        assert each.accuracy == alone.accuracy
    assert len({read_weights(each.path).fingerprint for each in taught}) == 3


def test_flips_and_shifts_are_drawn_by_seed_and_epoch_over_the_whole_range():
    told = {"images": 500, "flips": True, "shifts": 2}
    both = drawn([0, 1], 0, **told)
    assert torch.equal(both[:, 1:], drawn([1], 0, **told))
    assert not torch.equal(both[:, 0], both[:, 1])
    assert not torch.equal(both, drawn([0, 1], 1, **told))
    assert [each.unique().tolist() for each in both] == [[0, 1], [-2, -1, 0, 1, 2], [-2, -1, 0, 1, 2]]
    assert not torch.equal(both[1], both[2])


@pytest.mark.parametrize("network", ["mlp", "lab.test_pretraining:normalised", "lab.test_pretraining:dropping"])
def test_several_that_were_stopped_and_continued_equal_never_stopped_bit_for_bit(network, tmp_path):
    settings = replace(SEEDS, network=network)

    def stop(which: str, done: int, total: int | None) -> None:
        if done == 2 * 4:
            raise StoppedError

    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    pretrain(SMALL, settings, tmp_path / "whole" / "b.safetensors")
    with pytest.raises(StoppedError):
        pretrain(SMALL, settings, tmp_path / "stopped" / "b.safetensors", report=stop)
    assert written(tmp_path / "stopped") == ["b.safetensors.partial"]
    said: list[int] = []
    path = tmp_path / "stopped" / "b.safetensors"
    pretrain(SMALL, settings, path, report=lambda which, done, total: said.append(done))
    assert said[0] == 4
    assert (
        written(tmp_path / "stopped") == written(tmp_path / "whole") == [f"b-{seed}.safetensors" for seed in (2, 3, 4)]
    )
    for name in written(tmp_path / "whole"):
        assert content(tmp_path / "stopped" / name) == content(tmp_path / "whole" / name)


def test_another_number_of_seeds_starts_again(tmp_path):
    def stop(which: str, done: int, total: int | None) -> None:
        if done == 3 * 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        pretrain(SMALL, SEEDS, tmp_path / "b", report=stop)
    said: list[int] = []
    pretrain(SMALL, replace(SEEDS, seeds=2), tmp_path / "b", report=lambda which, done, total: said.append(done))
    assert said[0] == 0
    assert written(tmp_path) == ["b-2", "b-3"]


def test_a_kill_between_two_backbones_loses_neither(tmp_path, monkeypatch):
    really = os.replace

    def kill(source, target):
        if str(target).endswith("b-3"):
            raise KeyboardInterrupt
        really(source, target)

    monkeypatch.setattr("mooring.lab.model.atomic_files.os.replace", kill)
    with pytest.raises(KeyboardInterrupt):
        pretrain(SMALL, SEEDS, tmp_path / "b")
    assert written(tmp_path) == ["b-2", "b.partial"]
    monkeypatch.undo()
    said: list[int] = []
    pretrain(SMALL, SEEDS, tmp_path / "b", report=lambda which, done, total: said.append(done))
    assert said == []  # every epoch was done
    assert written(tmp_path) == ["b-2", "b-3", "b-4"]


@pytest.mark.parametrize("steps", ["many", "one"])
def test_a_seed_whose_loss_is_not_finite_is_named_in_one_line_and_nothing_is_written(steps, tmp_path):
    settings = replace(SEEDS, lr=1e30, epochs=1, batch=1 if steps == "many" else 10_000, weight_decay=1e30)
    with pytest.raises(MooringError, match="the loss of seed 2 is not finite in epoch 1: lower the") as error:
        pretrain(SMALL, settings, tmp_path / "b")
    assert "\n" not in str(error.value)
    assert not written(tmp_path)


def test_memory_that_ran_out_is_one_line_that_says_what_to_give_less_of(tmp_path, monkeypatch):
    def full(*told: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr("mooring.lab.study.pretraining._Lesson._step", full)
    with pytest.raises(MooringError, match="memory ran out with seeds=3, batch=32: give fewer") as error:
        pretrain(SMALL, SEEDS, tmp_path / "b")
    assert "\n" not in str(error.value)


class NoLook(TorchDispatchMode):
    """Refuses what waits for a device: reading a value, or a size that depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert str(func) not in ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default")
        assert not any(isinstance(arg, torch.Tensor) and arg.dtype is torch.bool for arg in _indices(func, args))
        return func(*args, **(kwargs or {}))


def _indices(func, args) -> list[torch.Tensor]:
    return list(args[1]) if str(func) == "aten.index.Tensor" else []


@pytest.mark.parametrize("network", ["mlp", "resnet18-third"])
def test_a_step_looks_at_nothing_and_finds_everything_where_it_was(network, monkeypatch):
    """So it can be recorded: it reads and writes the same memory from epoch to epoch, and never waits."""
    settings = replace(SEEDS, network=network, epochs=2, batch=6, schedule="cosine")
    lesson = pretraining._Lesson(merge_tasks(limit_images(STREAM, 12)), settings.on("cpu"), "cpu")
    seen = []

    def run(self: Recorder, kind: object, left: int, step) -> None:
        with NoLook():
            step()
        told = [tensor for part in lesson.parts().values() for tensor in part.values()]
        places = [lesson.bad, lesson.sgd.lr, lesson.feed.fresh, lesson.feed.begin, lesson.batches.images]
        seen.append([tensor.data_ptr() for tensor in (*told, *places)])

    monkeypatch.setattr(Recorder, "run", run)
    for epoch in range(2):
        lesson.teach(epoch, None)
    assert len(seen) == 8
    assert all(each == seen[EAGER - 1] for each in seen[EAGER - 1 :])


@gpu
@pytest.mark.parametrize("network", ["mlp", "cnn6", "resnet18-third"])
def test_on_a_gpu_steps_are_recorded_and_give_what_a_cpu_gives(network, tmp_path):
    settings = replace(SEEDS, network=network, epochs=4, dtype="float64", lr=0.01, batch=24)
    stream, notes = limit_images(STREAM, 60), []
    here = pretrain(stream, settings, tmp_path / "here")
    there = pretrain(stream, settings, tmp_path / "there", device="cuda", note=notes.append)
    assert notes == []
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(
            read_weights(one.path).tensors, read_weights(other.path).tensors, rtol=1e-7, atol=1e-7
        )


@gpu
@pytest.mark.parametrize("dtype", ["auto", "bf16", "float32"])
@pytest.mark.parametrize("network", ["cnn6", "resnet18-third"])
def test_on_a_gpu_every_step_of_a_usual_size_is_played_back_and_leads_where_it_would_have_gone(network, dtype):
    told = {"network": network, "epochs": 1, "batch": 64, "seeds": 2, "flips": False, "shifts": 1, "lr": 0.002}
    lessons = [
        pretraining._Lesson(merge_tasks(STREAM), Pretraining(**told, dtype=dtype).on("cuda"), "cuda") for _ in "ab"
    ]
    begun = {name: p.detach().clone() for name, p in lessons[0].stack.parameters.items()}
    lessons[1].recorder.on = False
    same_sums = torch.backends.cudnn.flags(
        enabled=True, deterministic=True
    )  # else two that record nothing part ways too
    with same_sums, pretraining.computing(lessons[0].settings.dtype):
        for lesson in lessons:
            lesson.teach(0, None)
    assert lessons[0].recorder.failed == ""
    assert 64 in lessons[0].recorder.graphs
    assert not lessons[1].recorder.graphs
    one, other = ({name: p.detach() for name, p in lesson.stack.parameters.items()} for lesson in lessons)
    for run in (0, 1):
        way = sum(float((one[name][run] - begun[name][run]).square().sum()) for name in one)
        apart = sum(float((one[name][run] - other[name][run]).square().sum()) for name in one)
        assert 0 < way < float("inf")
        assert apart < 1e-4 * way  # a hundredth of the way: sums may be taken in another order each time
