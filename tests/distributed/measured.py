"""A measured budget on several ranks, which must equal one process that sees the whole batch."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mooring
from distributed.ranks import run_cases
from mooring.importance import Kronecker

F64 = torch.float64
STEPS = 16


def batches(seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(5, 3, generator=generator, dtype=F64)
    inputs = [torch.randn(16, 5, generator=generator, dtype=F64) for _ in range(count)]
    return [(x, (x @ rule).argmax(1)) for x in inputs]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(F64)
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def options(name: str) -> dict:
    return {"importance": Kronecker(), "memory": mooring.Memory()} if name == "kronecker" else {}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    for x, y in batches(2, STEPS):
        optimizer.zero_grad()
        cross_entropy(model(x[rank::world]), y[rank::world]).backward()
        optimizer.step()


def alone(name: str) -> tuple[dict, dict]:
    """Return the state after the reference, and the model at the end of a task, of one process."""
    model, optimizer = make_model()
    pull = mooring.Budget(0.01)
    moor = mooring.attach(model, optimizer, pull=pull, reference=batches(1, 6), **options(name))
    state = copy.deepcopy(moor.state_dict())
    train(model, optimizer, 0, 1)
    measured = moor.measured()
    moor.consolidate()
    return state, {**model.state_dict(), "measured": torch.tensor([measured.nats, measured.standard_error])}


def equals_one(name: str, state: dict, expected: dict) -> None:
    model, optimizer = make_model()
    wrapped = DistributedDataParallel(model)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.01), **options(name))
    moor.load_state_dict(state)
    train(wrapped, optimizer, dist.get_rank(), dist.get_world_size())
    measured = moor.measured()
    moor.consolidate()
    actual = {**model.state_dict(), "measured": torch.tensor([measured.nats, measured.standard_error])}
    assert float(actual["measured"][0]) > 0
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-9, atol=1e-9)


def measured_budgets() -> None:
    """Compare each kind of importance on all ranks with one process."""
    expected = {name: alone(name) for name in ("diagonal", "kronecker")}  # before the process group exists
    run_cases({name: lambda name=name, e=e: equals_one(name, *e) for name, e in expected.items()})
