"""Tests that the state survives torch.save, safetensors and a new process, bit for bit, within a task."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import mooring
from mooring.errors import MooringError
from mooring.testing import check_equal

IMPORTANCES = {
    "ewc": mooring.EWC,
    "sampled": lambda: mooring.EWC(labels="sampled", decay=None),
    "mas": mooring.MAS,
    "si": lambda: mooring.SI(sign=0.1),
    "rwalk": mooring.RWalk,
    "uniform": mooring.Uniform,
    "random": mooring.Random,
    "balanced": lambda: mooring.Balanced("rwalk"),
}


def build(importance, pull="interpolation", buffers="frozen"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pulls = {"interpolation": mooring.Interpolation(every=2), "penalty": mooring.Penalty(0.1)}
    moor = mooring.attach(model, optimizer, importance=IMPORTANCES[importance](), pull=pulls[pull], buffers=buffers)
    return model, optimizer, moor


def train(model, optimizer, first, steps):
    for index in range(first, first + steps):
        data = torch.Generator().manual_seed(index)
        optimizer.zero_grad()
        outputs = model(torch.randn(4, 1, 6, 6, generator=data))
        nn.functional.cross_entropy(outputs, torch.randint(3, (4,), generator=data)).backward()
        optimizer.step()


def finish(model, optimizer, moor):
    train(model, optimizer, 6, 3)
    moor.consolidate()
    train(model, optimizer, 9, 2)
    kept = {f"model {k}": v for k, v in model.state_dict().items()}
    return kept | {f"moor {k}": v for k, v in moor.state_dict().items()}


def resume(importance, pull, folder, form):
    model, optimizer, moor = build(importance, pull)
    model.load_state_dict(torch.load(folder / "model.pt"))
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    state = (
        torch.load(folder / "moor.pt") if form == "torch" else safetensors.torch.load_file(folder / "moor.safetensors")
    )
    moor.load_state_dict(state)
    return finish(model, optimizer, moor)


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
@pytest.mark.parametrize("pull", ["interpolation", "penalty"])
@pytest.mark.parametrize("importance", IMPORTANCES)
def test_training_resumed_in_the_middle_of_a_task_equals_uninterrupted_training(importance, pull, tmp_path):
    model, optimizer, moor = build(importance, pull)
    train(model, optimizer, 0, 3)
    moor.consolidate()
    train(model, optimizer, 3, 3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(moor.state_dict(), tmp_path / "moor.pt")
    safetensors.torch.save_file(moor.state_dict(), tmp_path / "moor.safetensors")
    expected = finish(model, optimizer, moor)
    for form in ("torch", "safetensors"):
        check_equal(form, resume(importance, pull, tmp_path, form), expected)


def test_state_of_another_pull_loads_with_a_warning():
    model, optimizer, moor = build("ewc")
    train(model, optimizer, 0, 2)
    moor.consolidate()
    state = {name: tensor.clone() for name, tensor in moor.state_dict().items()}
    moor.load_state_dict(state)  # no warning with its own pull
    moor.detach()
    other = mooring.attach(model, optimizer, pull=mooring.Proximal(3.0), buffers="frozen")
    with pytest.warns(UserWarning, match=r"made with Interpolation\(.*, this Mooring has Proximal\(strength=3.0\)"):
        other.load_state_dict(state)
    assert other.tasks == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
def test_new_process_resumes_bit_for_bit(tmp_path):
    expected = {}
    for importance in IMPORTANCES:
        folder = tmp_path / importance
        folder.mkdir()
        model, optimizer, moor = build(importance)
        train(model, optimizer, 0, 3)
        moor.consolidate()
        train(model, optimizer, 3, 3)
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        safetensors.torch.save_file(moor.state_dict(), folder / "moor.safetensors")
        expected[importance] = finish(model, optimizer, moor)
    code = (
        f"import sys, torch, pathlib; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_state as t\n"
        "torch.set_num_threads(1)\n"
        "for name in t.IMPORTANCES:\n"
        f"    folder = pathlib.Path({str(tmp_path)!r}) / name\n"
        "    torch.save(t.resume(name, 'interpolation', folder, 'safetensors'), folder / 'finished.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    for importance in IMPORTANCES:
        check_equal(importance, torch.load(tmp_path / importance / "finished.pt"), expected[importance])


def test_state_is_a_flat_dictionary_of_tensors():
    model, optimizer, moor = build("si")
    train(model, optimizer, 0, 1)
    state = moor.state_dict()
    assert all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state.items())
    assert {"anchor.4.weight", "path.4.weight", "current.4.weight", "mooring"} <= state.keys()


def _changed(state, **header):
    inside = json.loads(bytes(state["mooring"].tolist())) | header
    return state | {"mooring": torch.frombuffer(bytearray(json.dumps(inside).encode()), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: {}, "not the state of a Mooring"),
        (lambda s: {"model": {}, "mooring": s}, "not the state of a Mooring.*not the whole checkpoint"),
        (lambda s: s | {"mooring": torch.zeros(3, dtype=torch.uint8)}, "not the state of a Mooring"),
        (lambda s: _changed(s, version=99), "version 99, this Mooring reads 1 and 2"),
        (lambda s: _changed(s, version=0), "version 0, this Mooring reads 1 and 2"),
        (lambda s: _changed(s, importance="MAS"), "importance MAS, this Mooring has EWC"),
        (lambda s: _changed(s, moored=["4.weight", "extra"]), "only in the state \\['extra'\\]"),
        (lambda s: {k: v for k, v in s.items() if k != "current.4.weight"}, "'current.4.weight' is missing"),
        (lambda s: s | {"anchor.4.weight": torch.zeros(2)}, "'anchor.4.weight' has shape \\(2,\\)"),
        (lambda s: s | {"previous.4.weight": torch.zeros(2)}, "'previous.4.weight'"),
        (lambda s: s | {"buffer.nowhere": torch.zeros(2)}, "no buffer 'nowhere'"),
        (lambda s: _changed(s, counts={"gone": 1}), "gone"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_changes(spoil, message):
    model, optimizer, moor = build("ewc")
    train(model, optimizer, 0, 2)
    moor.consolidate()
    state = {k: v.clone() for k, v in moor.state_dict().items()}
    with pytest.raises(MooringError, match=message) as error:
        moor.load_state_dict(spoil(state))
    assert "\n" not in str(error.value)
    check_equal("untouched", moor.state_dict(), state)


@pytest.mark.parametrize("buffers", ["follow", "frozen"])
def test_normalisation_statistics_follow_or_are_frozen(buffers):
    model, optimizer, moor = build("ewc", buffers=buffers)
    train(model, optimizer, 0, 3)
    moor.consolidate()
    norm = model[1]
    anchor = norm.running_mean.clone()
    expected = anchor.clone()
    for index in range(3, 6):
        data = torch.Generator().manual_seed(index)
        x = torch.randn(4, 1, 6, 6, generator=data)
        with torch.no_grad():
            followed = 0.9 * expected + 0.1 * model[0](x).mean((0, 2, 3))
        expected = {"follow": followed, "frozen": anchor}[buffers]
        train(model, optimizer, index, 1)
        torch.testing.assert_close(norm.running_mean, expected)
    assert norm.num_batches_tracked == {"follow": 6, "frozen": 3}[buffers]


def test_frozen_statistics_of_a_state_follow_if_attach_says_so():
    model, optimizer, moor = build("ewc", buffers="frozen")
    train(model, optimizer, 0, 2)
    moor.consolidate()
    follower, other, following = build("ewc", buffers="follow")
    follower.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="made with 'frozen', this Mooring has 'follow'"):
        following.load_state_dict(moor.state_dict())
    anchor = follower[1].running_mean.clone()
    with torch.no_grad():
        data = torch.Generator().manual_seed(2)
        followed = 0.9 * anchor + 0.1 * follower[0](torch.randn(4, 1, 6, 6, generator=data)).mean((0, 2, 3))
    train(follower, other, 2, 1)
    torch.testing.assert_close(follower[1].running_mean, followed)


@pytest.mark.parametrize("freeze", ["in the optimizer", "left out of it"])
def test_statistics_of_a_frozen_norm_are_kept(freeze):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    model[1].requires_grad_(False)
    held = [p for p in model.parameters() if p.requires_grad or freeze == "in the optimizer"]
    optimizer = torch.optim.SGD(held, lr=0.05)
    moor = mooring.attach(model, optimizer, buffers="frozen")
    train(model, optimizer, 0, 2)
    moor.consolidate()
    kept = model[1].running_mean.clone()
    train(model, optimizer, 2, 3)
    assert torch.equal(model[1].running_mean, kept)


def test_channels_last_state_can_be_saved_by_safetensors(tmp_path):
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    moor = mooring.attach(model, optimizer)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    safetensors.torch.save_file(moor.state_dict(), tmp_path / "moor.safetensors")
    before = {k: v.clone() for k, v in moor.state_dict().items()}
    moor.load_state_dict(safetensors.torch.load_file(tmp_path / "moor.safetensors"))
    check_equal("reloaded", moor.state_dict(), before)


def test_state_with_unknown_entries_is_refused():
    model, optimizer, moor = build("si")
    train(model, optimizer, 0, 1)
    other, other_optimizer, unwanted = build("uniform")
    unwanted.detach()
    rectified = mooring.attach(other, other_optimizer, importance=mooring.SI(), buffers="frozen")
    with (
        pytest.warns(UserWarning, match=r"made with SI\(damping=0.001, sign=0.1"),
        pytest.raises(MooringError, match=r"nothing here takes 'keeps_sign\.0\.bias'"),
    ):
        rectified.load_state_dict(moor.state_dict())
