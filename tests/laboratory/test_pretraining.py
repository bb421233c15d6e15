"""Pre-training: backbones learn, resume bit for bit after an interruption, and initialize networks that fit them."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy

from laboratory.small import class_stream, optimizer_by_hand, spec_for
from mooring.errors import MooringError
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.model.order import seeded_generator, task_order
from mooring_lab.networks.initialization import initial_network, read_weights
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams import Stream, by_class, digits
from mooring_lab.streams.slices import limit_images, merge_tasks
from mooring_lab.study.pretraining import Pretraining, pretrain

STREAM = by_class(digits(), 5)
SMALL = limit_images(STREAM, 60)
HERE = "laboratory.test_pretraining"
STEPS = 4  # of an epoch of SMALL in batches of 32
QUICK = Pretraining(network="mlp", epochs=3, lr=0.05, batch=32, seed=2)


def trained_by_hand(stream: Stream, settings: Pretraining) -> torch.nn.Module:
    """Train with torch's optimizer; mirror and shift one image at a time."""
    stream = merge_tasks(stream)
    model = initial_network(settings.network, stream, settings.seed)
    optimizer = optimizer_by_hand(settings.spec(settings.seed), model.parameters())
    model.train()
    for epoch in range(settings.epochs):
        share = epoch / settings.epochs
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1 if share < 5 / 12 else 0.1 if share < 10 / 12 else 0.01)
        order = task_order(settings.seed, 0, epoch, stream.tasks[0].train)
        mirrored = (torch.rand(len(order), generator=seeded_generator(settings.seed, "flips", epoch)) < 0.5).tolist()
        largest, random = settings.shifts, seeded_generator(settings.seed, "shifts", epoch)
        shifts = torch.randint(-largest, largest + 1, (2, len(order)), generator=random).T.tolist()
        for begin in range(0, len(order), settings.batch):
            batch = order[begin : begin + settings.batch]
            images = [
                shifted(torch.flip(image, [-1]) if settings.flips and mirrored[begin + place] else image, largest, *by)
                for place, (image, by) in enumerate(zip(stream.train.images[batch], shifts[begin:], strict=False))
            ]
            optimizer.zero_grad()
            cross_entropy(model(normalize_pixels(torch.stack(images)), 0), stream.train.labels[batch]).backward()
            optimizer.step()
    return model


def shifted(image: torch.Tensor, far: int, down: int, right: int) -> torch.Tensor:
    """Cut the shifted image out of the image with a black frame."""
    framed = torch.nn.functional.pad(image, [far] * 4)
    high, wide = image.shape[1:]
    return framed[:, far - down : far - down + high, far - right : far - right + wide]


def content(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return the metadata and the bytes of every tensor."""
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name).numpy().tobytes() for name in opened.keys()}  # noqa: SIM118
        return opened.metadata(), tensors


def test_accuracy_on_the_digits_is_well_above_chance(tmp_path):
    settings = Pretraining(network="mlp", epochs=6, lr=0.1, batch=32, flips=False)
    [backbone] = pretrain(STREAM, settings, tmp_path / "backbone.safetensors")
    assert backbone.accuracy > 90  # chance is 10
    with safe_open(tmp_path / "backbone.safetensors", framework="pt") as opened:
        metadata = json.loads(opened.metadata()["mooring"])
        assert not any("head" in name for name in opened.keys())  # noqa: SIM118
    expected = {"network": "mlp", "epochs": 6, "accuracy": round(backbone.accuracy, 2)}
    assert expected.items() <= metadata.items()


AUGMENTATIONS = [(True, 0), (False, 0), (False, 1), (True, 3)]


@pytest.mark.parametrize(
    ("network", "flips", "shifts", "optimizer", "lr"),
    [
        *((network, *moves, "sgd", 0.05) for network in ("mlp", f"{HERE}:normalised") for moves in AUGMENTATIONS),
        (
            "mlp",
            True,
            1,
            "adamw",
            1e-3,
        ),  # a bias before a normalization has gradients of rounding, which Adam scales up
    ],
)
def test_pretraining_equals_a_loop_written_by_hand(network, flips, shifts, optimizer, lr, tmp_path):
    """Compare in float32, to 1e-5 after 36 steps with the rates lr, lr / 10 and lr / 100."""
    settings = Pretraining(network, epochs=12, lr=lr, batch=50, seed=4, weight_decay=0.01, optimizer=optimizer)
    settings = replace(settings, flips=flips, shifts=shifts)
    [backbone] = pretrain(SMALL, settings, tmp_path / "backbone")
    model, everything = trained_by_hand(SMALL, settings), merge_tasks(SMALL)
    weights = read_weights(tmp_path / "backbone").tensors
    torch.testing.assert_close(weights, dict(model.backbone.state_dict()), rtol=1e-4, atol=1e-5)
    model.eval()
    logits = model(normalize_pixels(everything.test.images[everything.tasks[0].test]), 0)
    right = (logits.argmax(1) == everything.test.labels[everything.tasks[0].test]).double().mean()
    assert backbone.accuracy == pytest.approx(100 * right.item(), abs=1.0)


def test_flips_change_the_weights_and_mirror_half_of_the_images(tmp_path):
    plain, flipped = (Pretraining(network="mlp", epochs=1, flips=flips) for flips in (False, True))
    for name, settings in (("plain", plain), ("flipped", flipped)):
        pretrain(SMALL, settings, tmp_path / name)
    assert not torch.equal(*(read_weights(tmp_path / name).tensors["1.weight"] for name in ("plain", "flipped")))
    drawn = torch.cat([torch.rand(60, generator=seeded_generator(0, "flips", epoch)) < 0.5 for epoch in range(50)])
    assert abs(drawn.double().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(3000)


class StoppedError(Exception):
    pass


def test_progress_is_reported_from_the_first_step_on(tmp_path):
    reports: list[tuple[int, int | None]] = []
    pretrain(SMALL, QUICK, tmp_path / "backbone", report=lambda which, done, total: reports.append((done, total)))
    assert reports[0] == (0, 3 * STEPS)
    assert reports[-1] == (3 * STEPS, 3 * STEPS)
    assert reports == sorted(reports)


@pytest.mark.parametrize("network", ["mlp", f"{HERE}:normalised", f"{HERE}:dropping"])
def test_interrupted_in_any_epoch_and_resumed_equals_uninterrupted_bit_for_bit(network, tmp_path, monkeypatch):
    settings = Pretraining(network=network, epochs=4, lr=0.05, batch=32, seed=2)
    [backbone] = pretrain(SMALL, settings, tmp_path / "whole")
    expected = content(tmp_path / "whole")
    for epoch in range(settings.epochs):

        def stop(which: str, done: int, total: int | None, at: int = epoch) -> None:
            assert total == 4 * STEPS
            if done == (at + 1) * STEPS:
                raise StoppedError  # before this epoch is saved, so that it is repeated

        path = tmp_path / f"stopped {epoch}"
        with pytest.raises(StoppedError):
            pretrain(SMALL, settings, path, report=stop)
        assert not path.exists()
        reports: list[int] = []
        [resumed] = pretrain(SMALL, settings, path, report=lambda which, done, total, s=reports: s.append(done))
        assert resumed.accuracy == backbone.accuracy
        assert reports[0] == epoch * STEPS  # earlier epochs are not repeated
        assert reports[-1] == 4 * STEPS
        assert content(path) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["whole", *(f"stopped {e}" for e in range(4))])


def test_kill_while_the_backbone_is_written_loses_nothing(tmp_path, monkeypatch):
    pretrain(SMALL, QUICK, tmp_path / "whole")
    replace_file = os.replace

    def kill(source, target):
        if str(target).endswith("backbone"):
            raise KeyboardInterrupt
        replace_file(source, target)

    monkeypatch.setattr("mooring_lab.model.atomic_files.os.replace", kill)
    with pytest.raises(KeyboardInterrupt):
        pretrain(SMALL, QUICK, tmp_path / "backbone")
    monkeypatch.undo()
    reports: list[int] = []
    pretrain(SMALL, QUICK, tmp_path / "backbone", report=lambda which, done, total: reports.append(done))
    assert reports == []  # every epoch was finished
    assert content(tmp_path / "backbone") == content(tmp_path / "whole")


@pytest.mark.parametrize("problem", ["other settings", "other data", "cut short", "no checkpoint"])
def test_unusable_checkpoint_starts_from_the_beginning(problem, tmp_path):
    def stop(which: str, done: int, total: int | None) -> None:
        if done == 3 * STEPS:
            raise StoppedError

    path = tmp_path / "backbone"
    settings = Pretraining(**{**QUICK.__dict__, "lr": 0.01}) if problem == "other settings" else QUICK
    with pytest.raises(StoppedError):
        pretrain(limit_images(STREAM, 50) if problem == "other data" else SMALL, settings, path, report=stop)
    partial = path.with_name("backbone.partial")
    if problem == "cut short":
        partial.write_bytes(partial.read_bytes()[:-10])
    elif problem == "no checkpoint":
        partial.write_text("hello")
    pretrain(SMALL, QUICK, path)
    pretrain(SMALL, QUICK, tmp_path / "whole")
    assert content(path) == content(tmp_path / "whole")
    assert not partial.exists()


def test_runs_start_from_the_backbone_with_heads_of_their_own_seed(tmp_path):
    pretrain(SMALL, QUICK, tmp_path / "backbone")
    weights, stream = read_weights(tmp_path / "backbone"), class_stream()
    one, other = (initial_network("mlp", stream, seed, weights=weights) for seed in (3, 4))
    for name, tensor in weights.tensors.items():
        assert torch.equal(one.backbone.state_dict()[name], tensor)
        assert torch.equal(other.backbone.state_dict()[name], tensor)
    assert torch.equal(one.heads[0].weight, initial_network("mlp", stream, 3).heads[0].weight)
    assert not torch.equal(one.heads[0].weight, other.heads[0].weight)
    assert (
        initial_network("mlp", stream, 3, dtype=torch.float64, weights=weights).heads[0].weight.dtype == torch.float64
    )


def test_repeated_pretraining_gives_the_same_fingerprint(tmp_path):
    """A run's key contains the fingerprint of its initial weights: equal weights must give an equal key."""
    for name in ("once", "again"):
        pretrain(SMALL, QUICK, tmp_path / name)
    assert content(tmp_path / "once") == content(tmp_path / "again")
    once, again = (read_weights(tmp_path / name).fingerprint for name in ("once", "again"))
    assert once == again
    pretrain(SMALL, Pretraining(**{**QUICK.__dict__, "seed": 3}), tmp_path / "other")
    assert read_weights(tmp_path / "other").fingerprint != once


def test_fleet_starts_from_the_weights_that_its_spec_names(tmp_path):
    pretrain(SMALL, QUICK, tmp_path / "backbone")
    weights, stream = read_weights(tmp_path / "backbone"), class_stream()
    (tmp_path / "copy").write_bytes((tmp_path / "backbone").read_bytes())
    assert read_weights(tmp_path / "copy").fingerprint == weights.fingerprint
    spec = spec_for("frozen", stream, init=weights.fingerprint)
    fleet = Fleet([spec], stream, weights={weights.fingerprint: weights})
    fleet.run()
    for name, tensor in weights.tensors.items():
        assert torch.equal(fleet.stack.network_of(0).backbone.state_dict()[name], tensor.double())


def test_weights_of_another_network_are_refused_in_one_line(tmp_path):
    pretrain(SMALL, QUICK, tmp_path / "backbone")
    weights = read_weights(tmp_path / "backbone")
    for network in ("cnn6", "resnet18-third", f"{HERE}:normalised"):
        with pytest.raises(MooringError, match=f"does not fit network '{network}'") as error:
            initial_network(network, class_stream(), 0, weights=weights)
        assert "\n" not in str(error.value)
        assert str(tmp_path / "backbone") in str(error.value)
    spec = spec_for("plain", class_stream(), init=weights.fingerprint, network="cnn6")
    with pytest.raises(MooringError, match="does not fit"):
        Fleet([spec], class_stream(), weights={weights.fingerprint: weights})


def test_file_without_weights_is_refused_in_one_line(tmp_path):
    (tmp_path / "text").write_text("hello")
    reasons = {"text": "is not a safetensors file that can be read", "nothing": "there is no file .*nothing: `mooring"}
    for path, reason in ((tmp_path / name, reason) for name, reason in reasons.items()):
        with pytest.raises(MooringError, match=reason) as error:
            read_weights(path)
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)


def test_diverging_pretraining_stops_in_one_line_and_writes_no_backbone(tmp_path):
    with pytest.raises(MooringError, match="the loss is not finite in epoch 1: lower the learning rate") as error:
        pretrain(SMALL, Pretraining(network="mlp", epochs=2, lr=1e30, batch=10), tmp_path / "backbone")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "backbone").exists()


def test_pretraining_preserves_the_global_random_state(tmp_path):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    pretrain(SMALL, Pretraining(network=f"{HERE}:dropping", epochs=1), tmp_path / "backbone")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", 0.0), ("momentum", 2.0), ("weight_decay", -1.0), ("epochs", 0), ("batch", 0), ("batch", 1.5)),
        *(("seed", -1), ("seeds", 0), ("shifts", -1), ("shifts", 0.5), ("schedule", "linear"), ("dtype", "half")),
    ],
)
def test_invalid_setting_is_refused_in_one_line_that_names_it(name, value):
    with pytest.raises(MooringError, match=name) as error:
        Pretraining(**{name: value})
    assert "\n" not in str(error.value)


def test_shift_larger_than_the_images_is_refused_in_one_line(tmp_path):
    with pytest.raises(MooringError, match="shifts=8 moves images of 8 pixels out of sight") as error:
        pretrain(SMALL, Pretraining(network="mlp", epochs=1, shifts=8), tmp_path / "backbone")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def normalised(shape: tuple[int, int, int]) -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU())


def dropping(shape: tuple[int, int, int]) -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.3))
