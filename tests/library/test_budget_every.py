"""Tests of budgets that act in every k-th iteration: what is spent in between is bounded, and nothing at the end."""

import math

import pytest
import torch
from torch import nn

import mooring
from mooring.rules import Kronecker

NATS = 1e-3


def trained(importance, every, steps, lr=0.05):
    """Return what is spent after each step, the bound in between, and the Mooring."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = [(torch.randn(16, 6).double(), torch.randint(3, (16,))) for _ in range(8)]
    moor = mooring.attach(
        model,
        optimizer,
        importance=importance,
        pull=mooring.Budget(NATS, every=every, measured=False),
        reference=data[:4],
    )
    free = torch.optim.SGD(model.parameters(), lr=lr)  # the same step without a pull
    spent, bounds, since = [], [], 0.0
    for step in range(steps):
        x, y = data[step % 8]
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        anchors = {name: anchor.clone() for name, anchor in moor.anchor.items()}
        with torch.no_grad():  # the norm of the step: its energy as a displacement from the anchor
            free.step()
            for name, p in model.named_parameters():
                p.sub_(start[name]).add_(anchors[name])
            since += math.sqrt(moor.pull_energy())
            for name, p in model.named_parameters():
                p.copy_(start[name])
        optimizer.step()
        spent.append(moor.pull_energy())
        bounds.append((math.sqrt(NATS) + since) ** 2)
        since = 0.0 if (step + 1) % every == 0 else since
    return spent, bounds, moor


@pytest.mark.parametrize(
    "importance", [Kronecker(), mooring.EWC(decay=None, per_sample=True)], ids=["kronecker", "ewc"]
)
@pytest.mark.parametrize("every", [1, 4])
def test_drift_between_pulls_is_bounded_and_each_pull_keeps_the_budget(importance, every):
    spent, bounds, _ = trained(importance, every, steps=12)
    assert all(energy <= bound * (1 + 1e-9) for energy, bound in zip(spent, bounds, strict=True))
    assert all(energy <= NATS * (1 + 1e-9) for energy in spent[every - 1 :: every])
    assert every == 1 or max(spent) > NATS


def test_budget_is_kept_when_a_task_ends_between_two_pulls():
    spent, _, moor = trained(mooring.EWC(decay=None, per_sample=True), every=4, steps=6)
    assert spent[-1] > NATS
    previous, anchor = ({n: t.clone() for n, t in part.items()} for part in (moor.previous, moor.anchor))
    moor.consolidate()
    energy = sum(float((previous[n] * (moor.anchor[n] - anchor[n]).square()).sum()) / 2 for n in anchor)
    assert 0.98 * NATS < energy <= NATS
