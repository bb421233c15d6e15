"""A small network in which whatever is left changed shows: statistics, random numbers, a buffer that counts passes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import nn

from mooring.testing import check_equal

__all__ = ["Net", "unchanged"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 16, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.head(self.drop(torch.relu(self.norm(self.features(x)))).flatten(1))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever happens meanwhile, parameters, buffers, gradients, modes and random states are as they were after it."""
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    gradients = {key: (p.grad, p.grad.clone()) for key, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    yield
    check_equal("model", model.state_dict(), before)
    for key, p in model.named_parameters():
        assert p.grad is gradients[key][0]
        assert torch.equal(p.grad, gradients[key][1])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
