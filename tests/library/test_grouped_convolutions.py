"""Tests of convolutions in groups: each group has the factors of the plain convolution of its channels."""

import pytest
import torch
from torch import nn

import mooring
from mooring.curvature.kronecker_factors import batch_factors
from mooring.reference import estimation
from mooring.rules import Kronecker

F64 = torch.float64
LAYERS = {
    "depthwise": {"groups": 4, "padding": 1},
    "two groups": {"groups": 2, "stride": 2},
    "1 x 1": {"groups": 2, "kernel_size": 1, "bias": False},
}


class Split(nn.Module):
    """The same as a convolution in groups, as a plain convolution for each group."""

    def __init__(self, layer):
        super().__init__()
        options = {"stride": layer.stride, "padding": layer.padding, "bias": layer.bias is not None}
        ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        self.parts = nn.ModuleList(nn.Conv2d(ins, outs, layer.kernel_size, **options) for _ in range(layer.groups))
        for part, weight in zip(self.parts, layer.weight.chunk(layer.groups), strict=True):
            part.weight.data.copy_(weight)
        for part, bias in zip(self.parts, layer.bias.chunk(layer.groups) if options["bias"] else (), strict=False):
            part.bias.data.copy_(bias)

    def forward(self, x):
        chunks = x.chunk(len(self.parts), 1)
        return torch.cat([part(chunk) for part, chunk in zip(self.parts, chunks, strict=True)], 1)


def grouped(name):
    torch.manual_seed(0)
    return nn.Conv2d(4, 4, **{"kernel_size": 3, **LAYERS[name]}).to(F64)


@pytest.mark.parametrize("runs", [None, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_factors_of_a_group_are_those_of_a_plain_convolution(name, runs):
    layer = grouped(name)
    x = torch.randn(6, 4, 5, 5, dtype=F64)
    b = torch.randn_like(layer(x))
    a_factor, g_factor, _ = batch_factors(layer, x, b, runs)
    parts = zip(Split(layer).parts, x.chunk(layer.groups, 1), b.chunk(layer.groups, 1), strict=True)
    expected = [batch_factors(part, xs, bs, runs)[:2] for part, xs, bs in parts]
    torch.testing.assert_close(a_factor, torch.stack([a for a, _ in expected], -3))
    torch.testing.assert_close(g_factor, torch.stack([g for _, g in expected], -3))


@pytest.mark.parametrize("blocks", [None, 512])
@pytest.mark.parametrize("name", ["depthwise", "two groups", "1 x 1"])
def test_grouped_convolution_is_moored_as_its_groups(name, blocks):
    """Two grouped layers of one shape, which are batched; only the weights train, because a bias has a G of all.

    Labels of the reference are drawn, because the loss on others may fall where an untrained network is displaced.
    """
    torch.manual_seed(0)
    data = [(torch.randn(6, 4, 8, 8, dtype=F64), torch.arange(6) % 3) for _ in range(3)]
    energies, sums = [], []
    for split in (False, True):
        layers = [grouped(name), grouped(name)]
        stacked = [Split(layer).to(F64) for layer in layers] if split else layers
        torch.manual_seed(1)
        head = nn.Linear(4, 3).to(F64)
        model = nn.Sequential(stacked[0], nn.Tanh(), stacked[1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
        for parameter_name, p in model.named_parameters():
            p.requires_grad_("bias" not in parameter_name)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=20.0)
        pull, importance = mooring.Budget(1e-3, measured=False), Kronecker(blocks=blocks)
        with mooring.attach(
            model, optimizer, importance=importance, pull=pull, reference=[x for x, _ in data], memory=mooring.Memory()
        ) as moor:
            assert all(state.factors for state in moor._states.records.values())
            for x, y in data * 2:
                optimizer.zero_grad()
                (10 * nn.functional.cross_entropy(model(x), y)).backward()
                optimizer.step()
                energies.append(moor.pull_energy())
            moor.consolidate()
            moor.load_state_dict(moor.state_dict())
            states = moor._states.records.values()
            sums.append(float(sum(state.factors.past_diagonal(state.theta).sum() for state in states)))
    assert energies[:6] == pytest.approx(energies[6:], rel=1e-9)
    assert 0.9e-3 < max(energies) <= 1e-3
    assert sums[0] > 0
    assert sums[0] == pytest.approx(sums[1], rel=1e-9)


def test_memory_estimate_of_groups_counts_what_is_allocated():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Flatten(), nn.Linear(8, 3))
    moor = mooring.attach(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        importance=Kronecker(),
        pull=mooring.Budget(0.1, distil=False),
    )
    estimated = estimation.estimated_bytes(moor._states)[torch.device("cpu")]
    moor.consolidate(data=[(torch.randn(4, 4, 3, 3), torch.arange(4) % 3)])
    kept = sum(p.numel() * 4 for p in model.parameters())
    for state in moor._states.records.values():
        tensors = [state.anchor, *state.factors.slots().values(), *state.factors.basis]
        kept += sum(t.numel() * t.element_size() for t in tensors)
    assert estimated == kept
