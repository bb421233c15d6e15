"""Pre-training: it learns, continues bit for bit after being stopped, and its file starts networks that fit it."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy

from lab.small import class_stream, spec_for
from mooring.errors import MooringError
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.model.order import seeded_generator, task_order
from mooring.lab.networks.initialization import initial_network, read_weights
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.streams import Stream, by_class, digits
from mooring.lab.streams.slices import limit_images, merge_tasks
from mooring.lab.study.pretraining import Pretraining, pretrain

STREAM = by_class(digits(), 5)
SMALL = limit_images(STREAM, 60)
HERE = "lab.test_pretraining"
STEPS = 4  # of an epoch of SMALL in batches of 32
QUICK = Pretraining(network="mlp", epochs=3, lr=0.05, batch=32, seed=2)


def by_hand(stream: Stream, settings: Pretraining) -> torch.nn.Module:
    """The same with torch's own optimizer, image by image where they are mirrored and moved."""
    stream = merge_tasks(stream)
    model = initial_network(settings.network, stream, settings.seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    model.train()
    for epoch in range(settings.epochs):
        share = epoch / settings.epochs
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1 if share < 5 / 12 else 0.1 if share < 10 / 12 else 0.01)
        order = task_order(settings.seed, 0, epoch, stream.tasks[0].train)
        mirrored = (torch.rand(len(order), generator=seeded_generator(settings.seed, "flips", epoch)) < 0.5).tolist()
        far, random = settings.shifts, seeded_generator(settings.seed, "shifts", epoch)
        shifts = torch.randint(-far, far + 1, (2, len(order)), generator=random).T.tolist()
        for begin in range(0, len(order), settings.batch):
            batch = order[begin : begin + settings.batch]
            images = [
                shifted(torch.flip(image, [-1]) if settings.flips and mirrored[begin + place] else image, far, *by)
                for place, (image, by) in enumerate(zip(stream.train.images[batch], shifts[begin:], strict=False))
            ]
            optimizer.zero_grad()
            cross_entropy(model(normalize_pixels(torch.stack(images)), 0), stream.train.labels[batch]).backward()
            optimizer.step()
    return model


def shifted(image: torch.Tensor, far: int, down: int, right: int) -> torch.Tensor:
    """Cut out of the image with a black frame."""
    framed = torch.nn.functional.pad(image, [far] * 4)
    high, wide = image.shape[1:]
    return framed[:, far - down : far - down + high, far - right : far - right + wide]


def content(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """What is told and every tensor to the last bit; the order of what is told is not fixed."""
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name).numpy().tobytes() for name in opened.keys()}  # noqa: SIM118
        return opened.metadata(), tensors


def test_a_few_epochs_on_the_digits_are_well_above_chance(tmp_path):
    settings = Pretraining(network="mlp", epochs=6, lr=0.1, batch=32, flips=False)
    [taught] = pretrain(STREAM, settings, tmp_path / "backbone.safetensors")
    assert taught.accuracy > 90  # chance is 10
    with safe_open(tmp_path / "backbone.safetensors", framework="pt") as opened:
        told = json.loads(opened.metadata()["mooring"])
        assert not any("head" in name for name in opened.keys())  # noqa: SIM118
    assert (told["network"], told["epochs"], told["accuracy"]) == ("mlp", 6, round(taught.accuracy, 2))


@pytest.mark.parametrize(("flips", "shifts"), [(True, 0), (False, 0), (False, 1), (True, 3)])
@pytest.mark.parametrize("network", ["mlp", f"{HERE}:normalised"])
def test_pretraining_is_what_a_loop_by_hand_does(network, flips, shifts, tmp_path):
    """In float32, so to 1e-5 after 36 steps; the rates are 0.05, 0.005 and 0.0005 in turn."""
    told = {"flips": flips, "shifts": shifts, "weight_decay": 0.01}
    settings = Pretraining(network=network, epochs=12, lr=0.05, batch=50, seed=4, **told)
    [taught] = pretrain(SMALL, settings, tmp_path / "backbone")
    model, everything = by_hand(SMALL, settings), merge_tasks(SMALL)
    found = read_weights(tmp_path / "backbone").tensors
    torch.testing.assert_close(found, dict(model.backbone.state_dict()), rtol=1e-4, atol=1e-5)
    model.eval()
    logits = model(normalize_pixels(everything.test.images[everything.tasks[0].test]), 0)
    right = (logits.argmax(1) == everything.test.labels[everything.tasks[0].test]).double().mean()
    assert taught.accuracy == pytest.approx(100 * right.item(), abs=1.0)


def test_flips_matter_and_half_of_the_images_are_flipped(tmp_path):
    plain, flipped = (Pretraining(network="mlp", epochs=1, flips=flips) for flips in (False, True))
    for name, settings in (("plain", plain), ("flipped", flipped)):
        pretrain(SMALL, settings, tmp_path / name)
    assert not torch.equal(*(read_weights(tmp_path / name).tensors["1.weight"] for name in ("plain", "flipped")))
    drawn = torch.cat([torch.rand(60, generator=seeded_generator(0, "flips", epoch)) < 0.5 for epoch in range(50)])
    assert abs(drawn.double().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(3000)


def test_the_rate_falls_to_a_tenth_after_five_twelfths_and_to_a_hundredth_after_ten():
    rates = [Pretraining(epochs=60).rate(epoch) for epoch in range(60)]
    assert rates == pytest.approx([0.1] * 25 + [0.01] * 25 + [0.001] * 10)  # the paper's
    assert [Pretraining(epochs=1).rate(0), *(Pretraining(epochs=2, lr=1.0).rate(e) for e in (0, 1))] == [0.1, 1.0, 0.1]
    assert [Pretraining(epochs=12, lr=1.0).rate(e) for e in (4, 5, 9, 10, 11)] == [1.0, 0.1, 0.1, 0.01, 0.01]


def test_the_rate_falls_along_half_a_cosine_where_that_is_asked_for():
    rates = [Pretraining(epochs=4, lr=1.0, schedule="cosine").rate(epoch) for epoch in range(4)]
    assert rates == pytest.approx([1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)])


class StoppedError(Exception):
    pass


def test_progress_is_told_from_the_first_step_on(tmp_path):
    said: list[tuple[int, int | None]] = []
    pretrain(SMALL, QUICK, tmp_path / "backbone", report=lambda which, done, total: said.append((done, total)))
    assert said[0] == (0, 3 * STEPS)
    assert said[-1] == (3 * STEPS, 3 * STEPS)
    assert said == sorted(said)


@pytest.mark.parametrize("network", ["mlp", f"{HERE}:normalised", f"{HERE}:dropping"])
def test_stopped_in_any_epoch_and_continued_equals_never_stopped_bit_for_bit(network, tmp_path, monkeypatch):
    settings = Pretraining(network=network, epochs=4, lr=0.05, batch=32, seed=2)
    [taught] = pretrain(SMALL, settings, tmp_path / "whole")
    expected = content(tmp_path / "whole")
    for epoch in range(settings.epochs):

        def stop(which: str, done: int, total: int | None, at: int = epoch) -> None:
            assert total == 4 * STEPS
            if done == (at + 1) * STEPS:
                raise StoppedError  # before this epoch is written down: it is repeated

        path = tmp_path / f"stopped {epoch}"
        with pytest.raises(StoppedError):
            pretrain(SMALL, settings, path, report=stop)
        assert not path.exists()
        said: list[int] = []
        [again] = pretrain(SMALL, settings, path, report=lambda which, done, total, s=said: s.append(done))
        assert again.accuracy == taught.accuracy
        assert said[0] == epoch * STEPS  # those before were not repeated
        assert said[-1] == 4 * STEPS
        assert content(path) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["whole", *(f"stopped {e}" for e in range(4))])


def test_a_kill_while_the_backbone_is_written_loses_nothing(tmp_path, monkeypatch):
    pretrain(SMALL, QUICK, tmp_path / "whole")
    really = os.replace

    def kill(source, target):
        if str(target).endswith("backbone"):
            raise KeyboardInterrupt
        really(source, target)

    monkeypatch.setattr("mooring.lab.model.atomic_files.os.replace", kill)
    with pytest.raises(KeyboardInterrupt):
        pretrain(SMALL, QUICK, tmp_path / "backbone")
    monkeypatch.undo()
    said: list[int] = []
    pretrain(SMALL, QUICK, tmp_path / "backbone", report=lambda which, done, total: said.append(done))
    assert said == []  # every epoch was done
    assert content(tmp_path / "backbone") == content(tmp_path / "whole")


@pytest.mark.parametrize("spoiled", ["other settings", "other data", "cut short", "no checkpoint"])
def test_what_cannot_be_continued_starts_again_from_the_beginning(spoiled, tmp_path):
    def stop(which: str, done: int, total: int | None) -> None:
        if done == 3 * STEPS:
            raise StoppedError

    path = tmp_path / "backbone"
    settings = Pretraining(**{**QUICK.__dict__, "lr": 0.01}) if spoiled == "other settings" else QUICK
    with pytest.raises(StoppedError):
        pretrain(limit_images(STREAM, 50) if spoiled == "other data" else SMALL, settings, path, report=stop)
    partial = path.with_name("backbone.partial")
    if spoiled == "cut short":
        partial.write_bytes(partial.read_bytes()[:-10])
    elif spoiled == "no checkpoint":
        partial.write_text("hello")
    pretrain(SMALL, QUICK, path)
    pretrain(SMALL, QUICK, tmp_path / "whole")
    assert content(path) == content(tmp_path / "whole")
    assert not partial.exists()


def test_runs_start_from_the_file_with_heads_of_their_own_seed(tmp_path):
    pretrain(SMALL, QUICK, tmp_path / "backbone")
    weights, stream = read_weights(tmp_path / "backbone"), class_stream()
    made, other = (initial_network("mlp", stream, seed, weights=weights) for seed in (3, 4))
    for name, tensor in weights.tensors.items():
        assert torch.equal(made.backbone.state_dict()[name], tensor)
        assert torch.equal(other.backbone.state_dict()[name], tensor)
    assert torch.equal(made.heads[0].weight, initial_network("mlp", stream, 3).heads[0].weight)
    assert not torch.equal(made.heads[0].weight, other.heads[0].weight)
    assert (
        initial_network("mlp", stream, 3, dtype=torch.float64, weights=weights).heads[0].weight.dtype == torch.float64
    )


def test_the_same_pretraining_done_again_is_the_same_start_for_a_run(tmp_path):
    """A run's address has the fingerprint of what it starts from: the same weights must not make it another run."""
    for name in ("once", "again"):
        pretrain(SMALL, QUICK, tmp_path / name)
    assert content(tmp_path / "once") == content(tmp_path / "again")
    once, again = (read_weights(tmp_path / name).fingerprint for name in ("once", "again"))
    assert once == again
    pretrain(SMALL, Pretraining(**{**QUICK.__dict__, "seed": 3}), tmp_path / "other")
    assert read_weights(tmp_path / "other").fingerprint != once


def test_a_fleet_sails_from_the_file_and_the_spec_names_its_content(tmp_path):
    pretrain(SMALL, QUICK, tmp_path / "backbone")
    weights, stream = read_weights(tmp_path / "backbone"), class_stream()
    (tmp_path / "copy").write_bytes((tmp_path / "backbone").read_bytes())
    assert read_weights(tmp_path / "copy").fingerprint == weights.fingerprint
    spec = spec_for("frozen", stream, init=weights.fingerprint)
    fleet = Fleet([spec], stream, weights={weights.fingerprint: weights})
    fleet.run()
    for name, tensor in weights.tensors.items():
        assert torch.equal(fleet.stack.alone(0).backbone.state_dict()[name], tensor.double())


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


def test_a_file_that_is_not_weights_is_refused_in_one_line(tmp_path):
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "nothing"):
        with pytest.raises(MooringError, match="is not a safetensors file that can be read") as error:
            read_weights(path)
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)


def test_pretraining_that_explodes_stops_in_one_line_and_writes_no_backbone(tmp_path):
    with pytest.raises(MooringError, match="the loss is not finite in epoch 1: lower the learning rate") as error:
        pretrain(SMALL, Pretraining(network="mlp", epochs=2, lr=1e30, batch=10), tmp_path / "backbone")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "backbone").exists()


def test_pretraining_leaves_the_global_random_state_alone(tmp_path):
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
def test_what_cannot_be_pretrained_is_refused_in_one_line_that_names_it(name, value):
    with pytest.raises(MooringError, match=name) as error:
        Pretraining(**{name: value})
    assert "\n" not in str(error.value)


def test_images_moved_out_of_sight_are_refused_in_one_line_that_names_it(tmp_path):
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
