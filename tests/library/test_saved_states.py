"""States of a Mooring that an earlier commit wrote load, and training ends with the same parameters.

Each file of `fixtures/states` has a model after 7 steps, the Mooring's state there, and the model 6 steps later.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mooring
from mooring.errors import MooringError
from mooring.rules import Kronecker
from mooring.state.memory import Memory

FIXTURES = Path(__file__).parents[1] / "fixtures" / "states"
OPTIONS = {
    "interpolation-frozen": {"importance": "ewc", "buffers": "frozen"},
    "penalty-8bit": {"importance": "si", "pull": mooring.Penalty(1.0), "memory": Memory(previous="8bit")},
    "budget-kronecker": {"importance": Kronecker(), "pull": mooring.Budget(0.1)},
    "calibrated-kronecker": {"importance": Kronecker(), "pull": mooring.Budget(0.01, measured=False)},
}
CALIBRATED = {"calibrated-kronecker"}
"""States whose first task was scaled by a measured factor, which Kronecker factors were saved beside."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randn(4, 64, generator=generator), torch.randint(3, (4,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_from_a_saved_state_ends_where_uninterrupted_training_did(name):
    saved = load_file(FIXTURES / f"{name}.safetensors")
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model.load_state_dict(under(saved, "model/"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    moor = mooring.attach(model, optimizer, **OPTIONS[name])
    moor.load_state_dict(under(saved, "state/"))
    train(model, optimizer, 7, 3)
    if name not in CALIBRATED:  # another task would have been scaled, too
        moor.consolidate()
    train(model, optimizer, 10, 3)
    for key, expected in under(saved, "after/").items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=1e-4, atol=1e-6)


def test_state_with_statistics_that_were_kept_is_refused_in_one_line():
    saved = under(load_file(FIXTURES / "interpolation.safetensors"), "state/")
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    with pytest.raises(MooringError, match="made with buffers='keep', which does not exist any more") as error:
        moor.load_state_dict(saved)
    assert "\n" not in str(error.value)


def test_state_of_a_budget_with_an_option_that_was_deleted_is_refused_in_one_line():
    state = under(load_file(FIXTURES / "budget-kronecker.safetensors"), "state/")
    header = json.loads(bytes(state["mooring"].tolist()))
    header["pull"] = header["pull"].replace("per='model'", "per='layer'")
    state["mooring"] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    with pytest.raises(MooringError, match=r"per='layer'.*give attach pull=") as error:
        moor.load_state_dict(state)
    assert "\n" not in str(error.value)
