"""Tests of rebind, which continues a Mooring with another optimizer."""

import pytest
import torch
from torch import nn

import mooring
from mooring.errors import MooringError


def test_rebind_equals_a_new_mooring_with_the_loaded_state():
    ends = []
    for how in ("rebind", "state"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        moor = mooring.attach(model, optimizer, importance="si")
        for task in range(3):
            if task:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
                if how == "rebind":
                    moor.rebind(optimizer)
                else:
                    state = moor.state_dict()
                    moor.detach()
                    moor = mooring.attach(model, optimizer, importance="si")
                    moor.load_state_dict(state)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()
            moor.consolidate()
        ends.append({**model.state_dict(), **moor.state_dict()})
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_replaced_optimizer_no_longer_pulls_and_can_be_moored_again():
    model = nn.Linear(3, 2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    moor = mooring.attach(model, first)
    moor.rebind(second)
    moor.rebind(second)  # nothing changes
    model(torch.randn(8, 3)).sum().backward()
    first.step()
    assert moor.steps == 0
    second.step()
    assert moor.steps == 1
    with pytest.raises(MooringError, match="holds none of the model's parameters"):
        moor.rebind(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))
    mooring.attach(model, first).detach()
