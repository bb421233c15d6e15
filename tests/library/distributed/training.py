"""Two tasks of a tiny network in float64, trained by one process or by several that share each batch."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy

import mooring
from mooring.integrations.dcp import load
from mooring.rules import (
    EWC,
    MAS,
    SI,
    Balanced,
    Blend,
    Budget,
    Interpolation,
    Kronecker,
    Penalty,
    Proximal,
    Random,
    RWalk,
    Uniform,
)

F64 = torch.float64
STEPS, PASSES = 2, 2
FACTORED = "kronecker"
MESHES: dict[str, Any] = {}


class Likeliest(EWC):
    """EWC with the most likely labels instead of sampled ones, because ranks and one process draw differently."""

    @property
    def name(self):
        return "EWC"

    def probe(self, outputs, generator):
        return outputs.log_softmax(-1).amax(-1).sum()


IMPORTANCES = {
    "ewc": EWC(),
    "mean": EWC(decay=None),
    "per sample": EWC(decay=None, per_sample=True),
    "given samples": EWC(per_sample=True, batch_size=16),
    "likeliest": Likeliest(labels="sampled"),
    "mas": MAS(),
    "si": SI(),
    "some signs": SI(sign=0.5),
    "rwalk": RWalk(),
    "uniform": Uniform(),
    "random": Random(),
    "balanced ewc": Balanced(EWC()),
    "balanced mas": Balanced("mas"),
}
PULLS = {
    "interpolation": Interpolation(),
    "every other": Interpolation(every=2),
    "once": Interpolation(every="task"),
    "blend": Blend(0.3),
    "penalty": Penalty(20.0),
    "clamped": Penalty(500.0, clamp=True),
    "proximal": Proximal(20.0),
    "budget": Budget(1e-3),
}
MEMORIES = {"": None, "8bit": mooring.Memory(previous="8bit"), "host": mooring.Memory(host=True, staging=1000)}


@dataclass(frozen=True)
class Case:
    """An importance, a pull and options, trained by kind: "one", "ddp", "fsdp" or "hsdp"."""

    kind: str
    importance: str
    pull: str
    adam: bool = False
    memory: str = ""

    def __str__(self) -> str:
        return f"{self.kind}-{self.importance}-{self.pull}{'-adam' if self.adam else ''}{self.memory}"

    @property
    def what(self) -> tuple[str, str, bool, str]:
        """Everything but the kind."""
        return self.importance, self.pull, self.adam, self.memory


def cases(kinds: tuple[str, ...], *, few: bool) -> list[Case]:
    """Return every importance with every pull; with few=True each of both at least once."""
    pairs = [(i, p) for i in IMPORTANCES for p in PULLS]
    if few:
        names = list(PULLS)
        pairs = [(i, names[place % len(names)]) for place, i in enumerate(IMPORTANCES)]
    result = [Case(kind, i, p) for kind in kinds for i, p in pairs]
    result += [Case(kind, "ewc", "penalty", adam=True) for kind in kinds]
    result += [Case(kind, "mas", "interpolation", memory="8bit") for kind in kinds]
    result += [Case(kind, "rwalk", "penalty", memory="host") for kind in kinds]
    return result + [Case("ddp", FACTORED, "budget")] * ("ddp" in kinds)


class Trainer:
    """A model, its optimizer and its Mooring, on one rank or alone; from a checkpoint if a folder is given."""

    def __init__(self, case: Case, folder: Path | None = None, policy: Any = None, dtype: torch.dtype = F64) -> None:
        self.case, self.policy, self.dtype = case, policy, dtype
        torch.manual_seed(3)
        wide = 32 if case.memory else 7  # rows long enough for 8 bits
        model = nn.Sequential(nn.Linear(5, wide), nn.Tanh(), nn.LayerNorm(wide), nn.Linear(wide, 3)).to(dtype)
        self.model = self.runs = model
        if case.kind == "ddp":
            self.runs = nn.parallel.DistributedDataParallel(model)
        elif case.kind != "one":
            shard(model, case.kind, policy)
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.optimizer = adam if case.adam else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        if folder is not None:
            self._load(folder)
        importance = Kronecker() if case.importance == FACTORED else IMPORTANCES[case.importance]
        options: dict[str, Any] = {"pull": PULLS[case.pull], "memory": MEMORIES[case.memory]}
        self.moor = mooring.attach(model, self.optimizer, importance=importance, **options)
        if folder is not None:
            load(self.moor, folder)

    def _load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "mooring": self.moor.state_dict()}
        dcp.save(state, checkpoint_id=folder)

    def batch(self, task: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's part of each pass; all ranks together have 8 samples."""
        generator = torch.Generator().manual_seed(100 * task + step)
        rank, world = (0, 1) if self.case.kind == "one" else (dist.get_rank(), dist.get_world_size())
        shares = []
        for _ in range(PASSES):
            x = torch.randn(8, 5, generator=generator, dtype=F64).to(self.dtype)
            y = torch.randint(3, (8,), generator=generator)
            shares.append((x.chunk(world)[rank], y.chunk(world)[rank]))
        return shares

    def backward(self, task: int, step: int) -> None:
        """Take a step with a clipped gradient accumulated over two passes."""
        self.optimizer.zero_grad()
        batches = self.batch(task, step)
        for place, (x, y) in enumerate(batches):
            last = place + 1 == len(batches)
            waiting: Any = contextlib.nullcontext()
            if self.case.kind == "ddp" and not last:
                waiting = self.runs.no_sync()
            elif self.case.kind in ("fsdp", "hsdp"):
                self.model.set_requires_gradient_sync(last)
            with waiting:
                (cross_entropy(self.runs(x).to(self.dtype), y) / PASSES).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def step(self, task: int, step: int) -> None:
        self.backward(task, step)
        self.optimizer.step()

    def task(self, task: int, start: int = 0, end: int = STEPS) -> None:
        for step in range(start, end):
            self.step(task, step)
        if end == STEPS:
            with torch.no_grad():  # an evaluation leaves parameters gathered
                self.runs(self.batch(task, 0)[0][0])
            self.moor.consolidate()

    def snapshot(self) -> dict[str, Any]:
        """Return everything that ranks and one process must agree on."""
        moor = self.moor
        kept = {**self.model.state_dict(), **moor.state_dict(), **{f"now.{k}": t for k, t in moor.current.items()}}
        if not moor.importance.by_layer:
            kept |= {f"rate.{name}": t for name, t in moor.effective_learning_rate(2, 5.0).items()}
        header = json.loads(bytes(kept.pop("mooring").tolist()))
        tensors = {name: tensor.detach().clone() for name, tensor in kept.items()}
        diagnosis = moor.diagnose(strength=5.0).to_dict() if not moor.importance.by_layer else {}
        layers = diagnosis.pop("layers", [])
        numbers = {"energy": moor.pull_energy(), **moor.drift(), "disparity": diagnosis.get("disparity")}
        numbers |= {f"{row['name']}.{key}": v for row in layers for key, v in row.items() if isinstance(v, float)}
        exact = [(row["name"], row["parameters"], row["verdicts"]) for row in layers]
        return {"tensors": tensors, "numbers": numbers, "exact": [*exact, header["counts"]]}

    def start(self) -> "Trainer":
        """Train a task and half of the next."""
        self.task(0)
        self.task(1, end=1)
        return self

    def finish(self) -> dict[str, Any]:
        """Train the other half, and some of a third task."""
        self.task(1, start=1)
        self.task(2, end=1)
        return self.snapshot()


def shard(model: nn.Module, kind: str, policy: Any = None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    if kind not in MESHES:
        shape, names = ((world,), ("shard",)) if kind == "fsdp" else ((2, world // 2), ("copy", "shard"))
        MESHES[kind] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = MESHES[kind]
    options = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
    fully_shard(model[3], **options)
    fully_shard(model, **options)


def part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the rows of a whole tensor that a sharded one has on this rank, as torch.chunk splits them."""
    mesh = like.device_mesh
    rows = whole.chunk(mesh.size(-1))
    index = mesh.get_local_rank(mesh.ndim - 1)
    return rows[index] if index < len(rows) else whole[:0]


def compare(actual: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    assert actual["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in actual["tensors"].items():
        like, local = expected["tensors"][name], tensor
        if hasattr(tensor, "to_local"):
            assert tensor.shape == like.shape
            like, local = part(like, tensor), tensor.to_local()
        torch.testing.assert_close(local, like, rtol=rtol, atol=1e-12, msg=lambda said, name=name: f"{name}: {said}")
    assert actual["exact"] == expected["exact"]
    assert actual["numbers"].keys() == expected["numbers"].keys()
    for name, value in expected["numbers"].items():
        got = actual["numbers"][name]
        assert got == value or abs(got - value) <= rtol * max(abs(got), abs(value)), (name, got, value)
