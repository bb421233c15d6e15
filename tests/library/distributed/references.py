"""References on several ranks: each reads its share, and all end with the state of one process."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mooring
from library.adapters.low_rank_nets import Adapted
from library.distributed.ranks import run_cases
from mooring.distributed.dtensor import gathered, one_process
from mooring.errors import MooringError
from mooring.integrations.state_file import save
from mooring.reference import estimation
from mooring.rules import EWC, MAS, Kronecker

F64 = torch.float64


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(F64)


def adapted() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Adapted(nn.Linear(5, 7), 5, 7, 2), nn.Tanh(), Adapted(nn.Linear(7, 3), 7, 3, 2)).to(F64)


def inputs(batches: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(6, 5, generator=generator, dtype=F64) for _ in range(batches)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take steps; ranks share each batch under DDP."""
    several = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    runs = nn.parallel.DistributedDataParallel(model) if several else model
    for number, x in enumerate(inputs(3)):
        optimizer.zero_grad()
        cross_entropy(runs(x.chunk(world)[rank] + 1), torch.full((6 // world,), number % 3)).backward()
        optimizer.step()


def moored(make: Callable[[], nn.Module], **options: Any) -> dict[str, torch.Tensor]:
    """Moor with a reference; with a budget take some steps too, and end the task with data. Return all tensors."""
    model = make()
    optimizer = optimizer_of(model)
    moor = mooring.attach(model, optimizer, **{"reference": inputs(), **options})
    with_budget = isinstance(moor.pull, mooring.Budget)
    if with_budget:
        learn(model, optimizer)
    weights = {f"model.{name}": t.detach() for name, t in model.state_dict().items()}
    kept = {key: t.clone() for key, t in {**weights, **moor.state_dict()}.items()}
    if with_budget and (moor.pull.measured or moor.needs_data):
        moor.consolidate(data=inputs(3), batches=2)
    if with_budget and not moor.pull.measured:
        kept |= {f"later.{key}": t for key, t in moor.state_dict().items() if key != "mooring"}
    return kept


CASES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "default": partial(moored, network),
    "labels": partial(moored, network, reference=[(x, x.argmax(1) % 3) for x in inputs()]),
    "batches": partial(moored, network, batches=3),
    "fewer batches than ranks": partial(moored, network, reference=inputs(1)),
    "sampled labels": partial(moored, network, importance=EWC(labels="sampled"), pull=mooring.Interpolation()),
    "mas": partial(moored, network, importance=MAS(), pull=mooring.Proximal(2.0)),
    "estimated": partial(moored, network, pull=mooring.Budget(0.1, measured=False)),
    "kronecker": partial(moored, network, importance=Kronecker(), pull=mooring.Budget(0.1, measured=False)),
    "adapters": partial(moored, adapted),
}


def references() -> None:
    """Compare every case with one process, and check what ranks must agree on."""
    alone = {name: run() for name, run in CASES.items()}  # before the process group exists
    runs: dict[str, Callable[[], None]] = {name: partial(equals, CASES[name], alone[name]) for name in CASES}
    runs["own share"] = own_share
    if hasattr(torch.cpu.Stream, "record_event"):  # otherwise FSDP2 needs GPUs
        runs["fsdp"] = fully_sharded_equals_larger_batches
        for make in (network, adapted):
            runs[f"shards of {make.__name__}"] = partial(sharded_return_and_state_file_equal_one_process, make)
    runs["generated"] = generated_apart
    runs["errors"] = errors_stop_all
    runs["memory"] = too_little_memory_stops_all
    runs["missing layer"] = one_rank_reaches_a_branch
    run_cases(runs)


def equals(run: Callable[[], dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    compare(run(), expected)


def compare(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    headers = [json.loads(bytes(state["mooring"].tolist())) for state in (actual, expected)]
    for header in headers:
        header.pop("spending", None)  # multipliers, which the tensors show
    assert headers[0] == headers[1]
    for name in expected.keys() - {"mooring"}:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-12, msg=name)


def own_share() -> None:
    """A loader that gives each rank its own samples is read as it is: both orders of two batches are one process's."""
    x = torch.cat(inputs(4))
    data = TensorDataset(x, x.argmax(1) % 3)
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, shuffle=False))
    order = [place for rank in range(2) for place in range(rank, len(x), 2)]
    shares = [(x[order[at : at + 6]], x[order[at : at + 6]].argmax(1) % 3) for at in (0, 12, 6, 18)]
    results = []
    for reference in (loader, shares):
        model = network()
        results.append(mooring.attach(model, optimizer_of(model), reference=reference).previous)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def fully_sharded_equals_larger_batches() -> None:
    """Under fully_shard the batches of all ranks are one larger batch; a batch without a partner is left out."""
    from torch.distributed.fsdp import fully_shard

    x = inputs(5)
    labelled = [(part, part.argmax(1) % 3) for part in x]
    pairs = [tuple(map(torch.cat, zip(*labelled[at : at + 2], strict=True))) for at in (0, 2)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {"importance": EWC(decay=None, per_sample=True), "pull": mooring.Proximal(2.0)}
    results = []
    for reference in (pairs, labelled):
        model = network()
        if reference is labelled:
            for module in (model[2], model):
                fully_shard(module, mesh=mesh)
            moor = mooring.attach(model, optimizer_of(model), reference=reference, **options)
        else:
            with one_process():
                moor = mooring.attach(model, optimizer_of(model), reference=reference, **options)
        results.append({name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in moor.previous.items()})
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)
    moor = mooring.attach(model, optimizer_of(model), reference=labelled, pull=mooring.Budget(1e-6, measured=False))
    cross_entropy(model(x[0]), labelled[0][1]).backward()
    moor.optimizer.step()
    assert 0.9e-6 < moor.pull_energy() <= 1e-6
    moor.detach()
    moor = mooring.attach(model, optimizer_of(model), reference=labelled, pull=mooring.Budget(1e-6))
    cross_entropy(model(x[0]), labelled[0][1]).backward()
    moor.optimizer.step()
    assert moor.measured().nats > 1e-6
    assert 0 < moor.finish().nats <= 1e-6


def sharded_return_and_state_file_equal_one_process(make: Callable[[], nn.Module]) -> None:
    """Two tasks and the last return move shards as one process would, and all ranks write the state of one process."""
    from torch.distributed.fsdp import fully_shard

    x, world = inputs(2), dist.get_world_size()
    labelled = [(part, part.argmax(1) % 3) for part in x]
    ends = []
    for file, reference in (("one", [tuple(map(torch.cat, zip(*labelled, strict=True)))]), ("two", labelled)):
        model, shard = make(), file == "two"
        for module in (model[2], model) if shard else ():
            fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        with nullcontext() if shard else one_process():
            pull = mooring.Budget(1e-4, distil=False)
            moor = mooring.attach(model, optimizer_of(model), pull=pull, reference=reference, memory=mooring.Memory())
            for step in range(6):
                if step == 3:
                    moor.consolidate()
                rows = x[step % 2].chunk(world)[dist.get_rank()] if shard else x[step % 2]
                moor.optimizer.zero_grad()
                cross_entropy(model(rows + 1), torch.full((len(rows),), step % 3)).backward()
                moor.optimizer.step()
            energy = moor.pull_energy()
            with torch.no_grad():
                for p in moor.optimizer.param_groups[0]["params"]:
                    p.add_(0.3)  # more than the budget's pull allowed
            before, after = moor.measured().nats, moor.finish().nats
            path = save(moor, Path(f"{make.__name__}-{file}.safetensors"))
        assert energy > 0
        assert before > 1e-4 >= after > 0
        assert not moor.coverage().unheld
        ends.append(([energy, before, after], load_file(path) if path.exists() else {}))
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=1e-7, atol=1e-12)
    assert bool(ends[1][1]) == (dist.get_rank() == 0)
    for key, tensor in ends[1][1].items():
        if key != "mooring" and not key.startswith("gauge."):  # batches of another size
            torch.testing.assert_close(tensor, ends[0][1][key], rtol=1e-9, atol=1e-12, msg=key)
    reloaded = mooring.attach(model, optimizer_of(model), pull=pull)
    moor.detach()
    kept = {key: gathered(t) for key, t in moor.state_dict().items()}
    states = [ends[1][1]]
    dist.broadcast_object_list(states)
    reloaded.load_state_dict(states[0])
    for key, tensor in reloaded.state_dict().items():
        assert torch.equal(gathered(tensor), kept[key]), key


def generated_apart() -> None:
    """Each rank generates other batches, and all know the same in the end."""
    drawn: list[float] = []

    def generate(model: nn.Module) -> torch.Tensor:
        x = torch.randn(6, 5, dtype=F64)
        drawn.append(float(x.sum()))
        return x

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    model = network()
    torch.random.set_rng_state(before)
    moor = mooring.attach(model, optimizer_of(model), reference=generate, batches=3)
    assert torch.equal(before, torch.random.get_rng_state())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (drawn, moor.state_dict()))
    assert [len(draws) for draws, _ in gathered] == [2, 1]
    assert len({draw for draws, _ in gathered for draw in draws}) == 3
    torch.testing.assert_close(gathered[1][1], gathered[0][1], rtol=0, atol=0)


def errors_stop_all() -> None:
    """A batch that one rank cannot read stops all ranks, and names the rank to the others."""
    bad = [*inputs(2), torch.full((6, 5), torch.nan, dtype=F64), *inputs(1)]
    model = network()
    message = "not finite" if dist.get_rank() == 1 else "rank 1 could not use its share of the data: .* not finite"
    with pytest.raises(MooringError, match=message):
        mooring.attach(model, optimizer_of(model), reference=bad)
    with pytest.raises(MooringError, match="data has no batches"):
        mooring.attach(model, optimizer_of(model), reference=[])
    assert not model._forward_hooks
    assert mooring.attach(model, optimizer_of(model), reference=inputs()).tasks == 1


def too_little_memory_stops_all() -> None:
    """A GPU with too little memory on one rank stops all ranks, so that none waits for it."""
    model = network()
    moor = mooring.attach(model, optimizer_of(model))
    message = "^the reference needs" if dist.get_rank() == 1 else "^rank 1 has too little memory: the reference needs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimation, "free_bytes", lambda device: 500 if dist.get_rank() == 1 else None)
        with pytest.raises(MooringError, match=message):
            estimation.check_memory(moor._states)
        with pytest.raises(MooringError, match=message):
            moor.estimate(inputs())
    moor.estimate(inputs())


class Branches(nn.Module):
    """A layer for positive inputs and one for others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[int(bool((x > 0).all()))](x)


def one_rank_reaches_a_branch() -> None:
    """A layer that only one rank's batches reach is held on all ranks."""
    reference, results = [x.abs() * (-1) ** number for number, x in enumerate(inputs(4))], []
    for importance in (Kronecker(), EWC(decay=None, per_sample=True)):
        torch.manual_seed(3)
        model = Branches().to(F64)
        moor = mooring.attach(model, optimizer_of(model), importance=importance, reference=reference)
        assert len(moor.coverage().held) == 4
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, moor.state_dict())
        torch.testing.assert_close(gathered[1], gathered[0], rtol=0, atol=0)
        results.append(moor.pull_energy())
    assert results == [0, 0]
