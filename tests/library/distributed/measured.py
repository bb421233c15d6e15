"""A measured budget on several ranks, which must equal one process that sees the whole batch."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mooring
from library.distributed.ranks import run_cases
from mooring.distributed.dtensor import gathered, sharded
from mooring.integrations.dcp import load
from mooring.rules import Kronecker

F64 = torch.float64
STEPS = 24
AVERAGED = {"average": {"average": True}, "sharded average": {"average": True}}
"""Budgets whose task ends at the average of the parameters."""


def batches(seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(5, 3, generator=generator, dtype=F64)
    inputs = [torch.randn(16, 5, generator=generator, dtype=F64) for _ in range(count)]
    return [(x, (x @ rule).argmax(1)) for x in inputs]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(F64)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name in AVERAGED:
        return torch.optim.Adam(model.parameters(), lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=0.3)


def make_model(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_net()
    return model, make_optimizer(name, model)


def budget(name: str) -> mooring.Budget:
    return mooring.Budget(1.0, **AVERAGED[name]) if name in AVERAGED else mooring.Budget(0.01)


def options(name: str) -> dict:
    return {"memory": mooring.Memory(), **({"importance": Kronecker()} if name == "kronecker" else {})}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    for x, y in batches(2, STEPS):
        optimizer.zero_grad()
        cross_entropy(model(x[rank::world]), y[rank::world]).backward()
        optimizer.step()


def alone(name: str) -> tuple[dict, dict]:
    """Return the state after the reference, and the model at the end of a task, of one process."""
    model, optimizer = make_model(name)
    moor = mooring.attach(model, optimizer, pull=budget(name), reference=batches(1, 6), **options(name))
    state = copy.deepcopy(moor.state_dict())
    train(model, optimizer, 0, 1)
    measured = moor.measured()
    moor.consolidate()
    return state, {**model.state_dict(), "measured": torch.tensor([measured.nats, measured.standard_error])}


def equals_one(name: str, state: dict, expected: dict) -> None:
    model, optimizer = make_model(name)
    wrapped = DistributedDataParallel(model)
    moor = mooring.attach(model, optimizer, pull=budget(name), **options(name))
    moor.load_state_dict(state)
    train(wrapped, optimizer, dist.get_rank(), dist.get_world_size())
    measured = moor.measured()
    moor.consolidate()
    actual = {**model.state_dict(), "measured": torch.tensor([measured.nats, measured.standard_error])}
    assert float(actual["measured"][0]) > 0
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-9, atol=1e-9)


def shards_equal_one(name: str, state: dict, expected: dict) -> None:
    """Compare shards with one process; a second model continues from a checkpoint of the ranks."""
    from torch.distributed.checkpoint import save
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    folder = f"../{name.replace(' ', '-')}"
    for resumes in (False, True):
        model = fully_shard(make_net(), mesh=init_device_mesh("cpu", (world,)))
        optimizer = make_optimizer(name, model)
        moor = mooring.attach(model, optimizer, pull=budget(name))
        moor.load_state_dict(state)
        for step, (x, y) in enumerate(batches(2, STEPS)):
            if resumes and step == STEPS // 4:  # a repair has the inputs of the last 16 steps
                save({"mooring": moor.state_dict()}, checkpoint_id=folder)
                moor.detach()
                moor = mooring.attach(model, optimizer, pull=budget(name))
                load(moor, folder)
            optimizer.zero_grad()
            cross_entropy(model(x[rank::world]), y[rank::world]).backward()
            optimizer.step()
        averages = [t for key, t in moor.state_dict().items() if key.startswith("gauge.average.")]
        assert averages
        assert all(map(sharded, averages))
        last = {key: gathered(p.detach()).clone() for key, p in model.named_parameters()}
        moor.consolidate()
        for key, p in model.named_parameters():
            torch.testing.assert_close(gathered(p.detach()), expected[key], rtol=1e-9, atol=1e-9)
            assert not torch.equal(gathered(p.detach()), last[key]) or name not in AVERAGED


def measured_budgets() -> None:
    """Compare each kind of importance, and averages, on all ranks with one process."""
    names = ("diagonal", "kronecker", "sharded", *AVERAGED)
    expected = {name: alone(name) for name in names}  # before the process group exists
    compare = {name: shards_equal_one if name.startswith("sharded") else equals_one for name in names}
    run_cases({name: lambda name=name, e=e: compare[name](name, *e) for name, e in expected.items()})
