"""Tests of normalization statistics that are frozen: by default where a reference is given."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mooring
from mooring.errors import MooringError

Batch = tuple[Tensor, Tensor]

LAYERS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (8, 3, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3, momentum=None), (8, 3, 5, 4)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3, affine=False), (8, 3, 2, 3, 2)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), (8, 3, 4, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (8, 3, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (8, 3, 5, 4)),
}


def batch(seed: int, *shape: int) -> Batch:
    data = torch.Generator().manual_seed(seed)
    return seed + 2 * torch.randn(*shape, generator=data), torch.randint(2, (shape[0],), generator=data)


def network(layer: nn.Module, shape: tuple[int, ...]) -> nn.Sequential:
    """Return a network of a first layer, a norm with statistics of its own, and a head; in training mode."""
    torch.manual_seed(0)
    places = torch.Size(shape[2:]).numel()
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(3 * places, 2))
    for seed in range(3):
        model(batch(seed, *shape)[0])
    return model


def small(**options: object) -> tuple[nn.Sequential, torch.optim.Optimizer, mooring.Mooring]:
    model = network(nn.BatchNorm1d(3), (8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "buffers" not in options:
        options["reference"] = [batch(1, 8, 3)]
    return model, optimizer, mooring.attach(model, optimizer, **options)  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, shape: tuple[int, ...] = (8, 3)) -> None:
    x, y = batch(seed, *shape)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("layer", LAYERS)
def test_frozen_layer_in_training_mode_normalises_with_old_statistics_and_keeps_them(layer: str) -> None:
    make, shape = LAYERS[layer]
    model = network(make(), shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, reference=[batch(1, *shape)])
    norm, before = model[0], statistics(model)
    x, _ = batch(7, *shape)
    mean, var = (norm.get_buffer(name).reshape(1, -1, *(1,) * (x.ndim - 2)) for name in ("running_mean", "running_var"))
    expected = (x - mean) / (var + norm.eps).sqrt()
    for mode in (True, False, True):
        model.train(mode)
        assert norm.training is mode
        torch.testing.assert_close(norm(x), expected)
        train(model, optimizer, 7, shape)
        if norm.affine:
            expected = (x - mean) / (var + norm.eps).sqrt()
            expected = expected * norm.weight.detach().view_as(mean) + norm.bias.detach().view_as(mean)
            assert "0.weight" in moor.previous
            assert norm.weight.grad is not None
    assert equal(statistics(model), before)
    assert "frozen_norms=1" in repr(moor)
    moor.detach()
    train(model, optimizer, 8, shape)
    assert not equal(statistics(model), before)
    assert type(norm) is type(make())


def test_statistics_follow_without_a_reference_and_freeze_if_asked() -> None:
    model, optimizer, moor = small(buffers=None)
    train(model, optimizer, 6)
    moor.consolidate()
    before = statistics(model)
    train(model, optimizer, 7)
    assert not equal(statistics(model), before)
    model, optimizer, moor = small(buffers="frozen")
    before = statistics(model)
    train(model, optimizer, 7)
    assert not equal(statistics(model), before)
    moor.consolidate()
    before = statistics(model)
    train(model, optimizer, 8)
    assert equal(statistics(model), before)


@pytest.mark.parametrize("given", ["freeze", "keep", "interpolate"])
def test_other_options_are_refused(given: str) -> None:
    with pytest.raises(MooringError, match="allowed: follow, frozen"):
        small(buffers=given)


def test_excluded_layers_and_layers_without_statistics_follow_the_data() -> None:
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, exclude="1", reference=[batch(1, 8, 3)])
    before = statistics(model)
    train(model, optimizer, 7)
    after = statistics(model)
    assert torch.equal(after["0.running_mean"], before["0.running_mean"])
    assert not torch.equal(after["1.running_mean"], before["1.running_mean"])
    assert "frozen_norms=1" in repr(moor)


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
def test_layer_added_later_is_frozen_at_the_next_consolidation() -> None:
    model, optimizer, moor = small(memory=mooring.Memory())
    model.insert(0, nn.BatchNorm1d(3))
    optimizer.add_param_group({"params": list(model[0].parameters())})
    before = statistics(model)
    train(model, optimizer, 7)
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    moor.consolidate()
    before = statistics(model)
    train(model, optimizer, 8)
    assert equal(statistics(model), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copied_model_has_its_own_classes_and_follows(copied) -> None:  # type: ignore[no-untyped-def]
    model, _, _ = small()
    other = copied(model)
    assert type(other[0]) is nn.BatchNorm1d
    assert type(model[0]) is not nn.BatchNorm1d
    assert other[0].training
    before = statistics(model)
    other(batch(7, 8, 3)[0])
    assert not equal(statistics(other), before)
    model(batch(7, 8, 3)[0])
    assert equal(statistics(model), before)


def test_resumed_training_is_frozen_and_equal() -> None:
    model, optimizer, moor = small()
    train(model, optimizer, 7)
    saved, state = copy.deepcopy(model), {key: t.clone() for key, t in moor.state_dict().items()}
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.1)
    importance = mooring.EWC(decay=None, per_sample=True)
    resumed = mooring.attach(saved, optimizer, importance=importance, pull=mooring.Budget(0.1))  # no word of statistics
    resumed.load_state_dict(state)
    train(model, moor.optimizer, 8)
    train(saved, optimizer, 8)
    assert equal(dict(saved.named_parameters()), dict(model.named_parameters()))
    assert equal(statistics(saved), statistics(model))


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
def test_layer_is_frozen_while_any_mooring_freezes_it() -> None:
    model, _, moor = small()
    second = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=[batch(1, 8, 3)])
    before = statistics(model)
    moor.detach()
    moor.detach()
    model(batch(7, 8, 3)[0])
    assert equal(statistics(model), before)
    del second
    gc.collect()  # a Mooring that is gone holds nothing
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("first", ["compiled", "attached"])
def test_compiled_model_is_frozen(first: str) -> None:
    model = network(nn.BatchNorm1d(3), (8, 3))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if first == "compiled":
        compiled(batch(3, 8, 3)[0])
    moor = mooring.attach(model, optimizer, importance=mooring.EWC(), reference=[batch(1, 8, 3)])
    before, x = statistics(model), batch(7, 8, 3)[0]
    torch.testing.assert_close(compiled(x), model(x))
    assert equal(statistics(model), before)
    assert model[0].training
    moor.detach()
    compiled(x)
    assert not equal(statistics(model), before)


# Pulls that act once per task


MERGES = {
    "wise-ft": (mooring.Uniform, lambda: mooring.rules.Blend(0.3), [0.3, 0.3]),
    "all of the way": (mooring.Uniform, lambda: mooring.rules.Blend(1.0), [1.0, 1.0]),
    "mean": (lambda: mooring.EWC(decay=None), lambda: mooring.Interpolation(root=1, every="task"), [1 / 2, 2 / 3]),
    "weighted": (mooring.EWC, lambda: mooring.Interpolation(root=1, every="task", weight=3.0), [3 / 4, 6 / 7]),
}


@pytest.mark.parametrize("name", MERGES)
def test_merging_weights_merges_statistics_as_if_every_task_mattered_equally(name):
    make, pull, shares = MERGES[name]
    model, optimizer, moor = small(buffers="follow", importance=make(), pull=pull(), merge="sum")
    train(model, optimizer, 0)
    moor.consolidate()
    for task, share in enumerate(shares, start=1):
        anchor = statistics(model)
        train(model, optimizer, task)
        trained = statistics(model)
        assert not torch.equal(trained["0.running_mean"], anchor["0.running_mean"])  # they follow within a task
        moor.consolidate()
        for key in ("0.running_mean", "0.running_var"):
            expected = trained[key] + share * (anchor[key] - trained[key])
            torch.testing.assert_close(statistics(model)[key], expected)


def test_pull_of_every_step_leaves_statistics_that_follow_alone():
    model, optimizer, moor = small(buffers="follow", importance=mooring.EWC(), pull=mooring.Interpolation())
    train(model, optimizer, 0)
    moor.consolidate()
    train(model, optimizer, 1)
    trained = statistics(model)
    moor.consolidate()
    torch.testing.assert_close(statistics(model), trained, rtol=0, atol=0)


def test_statistics_are_merged_with_those_of_a_saved_state():
    options = {"importance": mooring.Uniform(), "pull": mooring.rules.Blend(0.5), "buffers": "follow"}
    model, optimizer, moor = small(**options)
    train(model, optimizer, 0)
    moor.consolidate()
    train(model, optimizer, 1)
    other, other_optimizer, resumed = small(**options)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(moor.state_dict())
    for net, sgd, mooring_of in ((model, optimizer, moor), (other, other_optimizer, resumed)):
        train(net, sgd, 2)
        mooring_of.consolidate()
    torch.testing.assert_close(statistics(other), statistics(model), rtol=0, atol=0)
