"""A small network that shows any change: batch norm, dropout, and a buffer that counts forward passes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import nn

from mooring.testing import check_equal

__all__ = ["StatefulNet", "model_unchanged"]


class StatefulNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 16, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.head(self.drop(torch.relu(self.norm(self.features(x)))).flatten(1))


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Check that the body changes no parameter, buffer, gradient, mode or random state."""
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
