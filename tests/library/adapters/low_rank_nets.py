"""Small networks with low-rank layers written by hand, and their dense factors."""

import torch
from torch import nn

from mooring.curvature import LowRank


class QuantizedLinear(nn.Module):
    """A linear layer whose weights are int8 buffers; it has no parameter."""

    def __init__(self, ins, outs):
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 127, (outs, ins), dtype=torch.int8))
        self.register_buffer("step", torch.tensor(0.01))

    def forward(self, x):
        return x @ (self.codes.to(x.dtype) * self.step.to(x.dtype)).T


class Adapted(nn.Module):
    """A layer with a low-rank product, which it names by the protocol."""

    def __init__(self, layer, ins, outs, rank, scale=0.5):
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), scale
        self.down = nn.Parameter(torch.randn(rank, ins) / ins**0.5)
        self.up = nn.Parameter(torch.zeros(outs, rank))

    def forward(self, x):
        return self.layer(x) + self.scale * (x @ self.down.T @ self.up.T)

    def mooring_low_rank(self):
        return [LowRank(self.down, self.up, self.scale, self.layer)]


def adapted_net(seed=0, rank=2, base=QuantizedLinear):
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(base(4, 6), 4, 6, rank), nn.Tanh(), Adapted(base(6, 3), 6, 3, rank))


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def batches(count=4, size=16, ins=4, classes=3, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, ins, generator=g).to(dtype), torch.randint(classes, (size,), generator=g))
        for _ in range(count)
    ]


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
