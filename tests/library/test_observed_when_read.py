"""Tests that layers are observed only where somebody will read their factors."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mooring
from mooring.errors import MooringError
from mooring.observe import layer_observer
from mooring.rules import Kronecker


class OperationCount(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **kwargs or {})


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 2, 6, 6, generator=generator), torch.arange(8) % 3


def moored(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reference = [batch(seed) for seed in range(4)]
    given = {"importance": Kronecker(), "pull": mooring.Budget(0.5), "reference": reference}
    return optimizer, mooring.attach(model, optimizer, **given | options)


def step(model, optimizer, seed=9):
    optimizer.zero_grad()
    x, y = batch(seed)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.fixture
def observed(monkeypatch):
    """Return the layers whose factors are computed, as they come."""
    layers, observe = [], layer_observer.observe

    def record(layer, a, b, names, *options):
        layers.append((layer, {*names}))
        return observe(layer, a, b, names, *options)

    monkeypatch.setattr(layer_observer, "observe", record)
    return layers


def operations(model, optimizer):
    step(model, optimizer)  # what the first step allocates does not count
    with OperationCount() as count:
        step(model, optimizer)
    return count.operations


def test_training_after_a_reference_observes_no_layer(observed):
    model = net()
    optimizer, _ = moored(model)
    observed.clear()
    assert not any(module._forward_hooks for name, module in model.named_modules() if name)  # the model's own see its
    without = operations(model, optimizer)
    assert not observed
    model = net()
    optimizer, _ = moored(model, memory=mooring.Memory())
    observed.clear()
    assert operations(model, optimizer) > 1.5 * without
    assert len(observed) == 2 * 3


def test_weights_do_not_depend_on_what_is_observed():
    models = net(), net()
    for model, memory in zip(models, (None, mooring.Memory()), strict=True):
        optimizer, _ = moored(model, memory=memory, pull=mooring.Budget(1e-4))
        for seed in range(3):
            step(model, optimizer, seed)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_task_after_a_reference_ends_with_data_or_is_kept_on_request():
    model = net()
    optimizer, moor = moored(model)
    step(model, optimizer)
    with pytest.raises(MooringError, match=r"this task has no importance.*attach\(memory=Memory\(\)\)") as error:
        moor.consolidate()
    assert "\n" not in str(error.value)
    moor.consolidate(data=[batch(9), batch(10)])
    assert moor.tasks == 2
    optimizer, moor = moored(net(), memory=mooring.Memory())
    step(moor.model, optimizer)
    moor.consolidate()
    assert moor.tasks == 2


def test_frozen_and_excluded_layers_are_never_observed(observed):
    model = net()
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    optimizer, _ = moored(model, exclude="4", memory=mooring.Memory(), pull=mooring.Budget(0.01))
    step(model, optimizer)
    assert observed
    assert all(layer is model[2] and names == {"bias"} for layer, names in observed)


def test_first_task_is_observed_without_a_reference(observed):
    model = net()
    optimizer, moor = moored(model, reference=None)
    step(model, optimizer)
    assert len(observed) == 3
    moor.consolidate()
