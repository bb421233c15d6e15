"""Cases in which all ranks must do the same: stop at a gradient, draw labels, refuse."""

import os
import re
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mooring
from library.distributed.ranks import run_cases
from library.distributed.training import Case, Trainer
from mooring.distributed.dtensor import local_gradient
from mooring.errors import MooringError, NonFiniteError
from mooring.rules import EWC, MAS, Kronecker
from processes import gloo_threads

F64 = torch.float64


def agreement(folder: Path, ports: list[int]) -> None:
    """Run every case on two ranks, and the blocks of the documentation."""
    runs = {}
    for kind in ("ddp", "fsdp"):
        for pull in ("interpolation", "penalty"):
            runs[f"sum {kind} {pull}"] = partial(stops_at_a_batch, Case(kind, "ewc", pull))
        runs[f"probe {kind}"] = partial(stops_at_a_batch, Case(kind, "mas", "interpolation"))
        runs[f"draws {kind}"] = partial(draws_apart, kind)
    runs["unused"] = unused_on_one_rank
    runs["tensor parallel"] = tensor_parallel_equals_one
    runs["shard"] = stops_at_a_shard
    runs["closure"] = stops_in_a_closure
    runs["refusals"] = refusals
    run_cases(runs)
    blocks_run(folder, ports)


def everywhere(said: object) -> list[object]:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, said)
    return gathered


def stops_together(trainer: Trainer, step) -> None:
    """Check that every rank raises the same error, nothing changes, and the next step works."""
    before = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
    with pytest.raises(NonFiniteError) as error:
        step()
    assert "\n" not in str(error.value)
    assert len(set(everywhere(str(error.value)))) == 1
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(*(getattr(t, "_local_tensor", t) for t in (tensor, before[name])))
    trainer.step(1, 1)
    assert trainer.moor.steps == 2


def stops_at_a_batch(case: Case) -> None:
    """Only the last rank has a bad sample."""
    trainer = Trainer(case).start()
    batch = trainer.batch

    def bad(task, step):
        inputs_and_labels = batch(task, step)
        if dist.get_rank() == dist.get_world_size() - 1:
            inputs_and_labels[1][0][0, 0] = torch.nan
        return inputs_and_labels

    trainer.batch = bad
    trainer.backward(1, 1)
    trainer.batch = batch
    stops_together(trainer, trainer.optimizer.step)


def stops_at_a_shard() -> None:
    """The gradient of a single shard is not finite, which the other ranks learn only by a collective."""
    trainer = Trainer(Case("fsdp", "ewc", "interpolation")).start()
    trainer.backward(1, 1)
    if dist.get_rank() == 1:
        next(trainer.model.parameters()).grad.to_local()[0, 0] = torch.inf
    stops_together(trainer, trainer.optimizer.step)


def stops_in_a_closure() -> None:
    """The loss of one rank is not finite while all gradients are finite: no rank waits for another."""
    trainer = Trainer(Case("ddp", "ewc", "interpolation")).start()
    trainer.optimizer.zero_grad()

    def closure():
        trainer.backward(1, 1)
        return torch.tensor(torch.nan if dist.get_rank() == 1 else 1.0)

    trainer.optimizer.step(closure)
    assert trainer.moor.steps == 2


class Drawing(EWC):
    """EWC that records its draws."""

    drawn: ClassVar[list[float]] = []

    def probe(self, outputs, generator):
        self.drawn.append(torch.rand((), generator=generator).item())
        return outputs.sum()


def draws_apart(kind: str) -> None:
    """Ranks must draw different labels for the same inputs, or the cross terms of their scores do not cancel."""
    Drawing.drawn.clear()
    trainer = Trainer(Case(kind, "ewc", "interpolation"))
    trainer.moor.detach()
    with mooring.attach(trainer.model, trainer.optimizer, importance=Drawing(labels="sampled")):
        trainer.step(0, 0)
    draws = everywhere(tuple(Drawing.drawn))
    assert len({draw for rank_draws in draws for draw in rank_draws}) == 2 * dist.get_world_size()


class Forked(nn.Module):
    """A model with two branches, of which each rank takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x, branch):
        return self.branches[branch](x)


def unused_on_one_rank() -> None:
    """A parameter that only one rank's outputs depend on is probed by that rank alone, and no rank waits."""
    torch.manual_seed(0)
    model = Forked().to(F64)
    x = torch.randn(2, 4, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    runs = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=MAS(decay=None))
    outputs = [branch(part).square().sum() for branch, part in zip(model.branches, x, strict=True)]
    expected = [torch.autograd.grad(out, branch.weight)[0] for out, branch in zip(outputs, model.branches, strict=True)]
    runs(x[dist.get_rank()], dist.get_rank()).sum().backward()
    optimizer.step()
    for number, gradient in enumerate(expected):
        torch.testing.assert_close(moor.current[f"branches.{number}.weight"], gradient.abs())


def tensor_parallel_equals_one() -> None:
    """Importances that read gradients give the same scores for parameters sharded along any dimension or not at all."""
    results, mesh = [], init_device_mesh("cpu", (dist.get_world_size(),))
    for parallel in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4)).to(F64)
        if parallel:
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moor = mooring.attach(model, optimizer, importance=mooring.SI(), pull=mooring.Penalty(10.0))
        for task in range(2):
            x = torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(task))
            for _ in range(2):
                optimizer.zero_grad()
                model(x).pow(3).mean().backward()
                optimizer.step()
            moor.consolidate()
        tensors = {**dict(model.named_parameters()), **{f"previous.{k}": t for k, t in moor.previous.items()}}
        results.append({name: getattr(t, "full_tensor", lambda t=t: t)().detach() for name, t in tensors.items()})
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)
    whole = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    whole.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    assert local_gradient(whole).tolist() == [dist.get_world_size()] * 3  # partial until now


def refusals() -> None:
    """Unsupported combinations are refused in one line before training."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def refused(model: nn.Module, match: str, **options) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(MooringError, match=match) as error:
            mooring.attach(model, optimizer, **options)
        assert "\n" not in str(error.value)

    shards = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(shards, mesh=mesh)
    refused(shards, "whole layers", importance=Kronecker(), pull=mooring.Budget(0.1))
    parallel = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
    refused(parallel, "tensor parallel", importance=MAS())
    refused(parallel, "tensor parallel", importance=EWC(per_sample=True))
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    refused(flat, "use fully_shard")


def blocks_run(folder: Path, ports: list[int]) -> None:
    """Run the blocks of docs/distributed.md; ranks share the folder.

    A DDP wrapper that is freed after the process group may wait forever, so the group must be gone while names exist.
    """
    os.chdir(folder)
    for block, port in zip(blocks(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        names: dict[str, object] = {"__name__": "__main__"}
        before = gloo_threads()  # of groups that a case left
        exec(compile(block, "docs/distributed.md", "exec"), names)
        assert gloo_threads() <= before or "DistributedDataParallel" not in names


def blocks() -> list[str]:
    page = Path(__file__).parents[3] / "docs" / "distributed.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
