"""Runs of the zoo's models under Moorings: trained in tasks, saved, resumed, and recomputed from what is saved."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mooring
from library.zoo.models import FLOAT, Batch, ZooModel
from mooring.reference.batches import default_loss
from mooring.rules import EWC, MAS, Balanced, Importance, Kronecker

IMPORTANCES: dict[str, str | Importance] = {
    "ewc": EWC(decay=None, per_sample=True),
    "kronecker": Kronecker(),
    "mas": MAS(),
    "uniform": "uniform",
    "random": "random",
    "balanced": Balanced(EWC(decay=None, per_sample=True)),
    "si": "si",
    "rwalk": "rwalk",
}


class MooredRun:
    """A model of the zoo with a Mooring and an optimizer for each of its parts.

    Args:
        zoo: the model.
        dtype: the dtype of its parameters and of its batches.
        lr: the learning rate of the optimizers.
        momentum: their momentum.
    """

    def __init__(self, zoo: ZooModel, *, dtype: torch.dtype = FLOAT, lr: float = 0.1, momentum: float = 0.9) -> None:
        if "torch._dynamo" in sys.modules:  # a graph that was compiled for another copy does not see new hooks
            torch.compiler.reset()
        self.zoo, self.dtype, self.model = zoo, dtype, zoo.make().to(dtype)
        self.modules = [self.model.get_submodule(part) for part in zoo.parts]
        trained = [[p for p in module.parameters() if p.requires_grad] for module in self.modules]
        self.optimizers = [torch.optim.SGD(parameters, lr=lr, momentum=momentum) for parameters in trained]
        self.moors: list[mooring.Mooring] = []

    def attach(self, *, exclude: Sequence[Sequence[str]] | None = None, **options: Any) -> "MooredRun":
        """Attach a Mooring to each part.

        Args:
            exclude: the excluded names of each part.
            options: those of `mooring.attach`, with an importance.
        """
        options = {"memory": mooring.Memory(), **options}
        if "reference" in options:
            options["loss"] = self.zoo.loss
        if getattr(options["importance"], "watches", "") == "outputs":
            options["outputs"] = self.zoo.outputs
        excluded = exclude or [()] * len(self.modules)
        for module, optimizer, names in zip(self.modules, self.optimizers, excluded, strict=True):
            self.moors.append(mooring.attach(module, optimizer, exclude=names, **options))
        return self

    def train(self, task: int, count: int, *, start: int = 0, pieces: int = 1, autocast: bool = False) -> None:
        """Take a step for each batch of a task, from the gradients of its pieces, each a share of the mean."""
        loss = self.zoo.loss or default_loss
        for batch in self.zoo.batches(task, start + count)[start:]:
            for module, optimizer in zip(self.modules, self.optimizers, strict=True):
                optimizer.zero_grad()
                for piece in split(converted(batch, self.dtype), pieces):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        value = loss(module, piece)
                    (value / pieces).backward()
                optimizer.step()

    def consolidate(self) -> None:
        for moor in self.moors:
            moor.consolidate()

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the number of their part and the name that coverage has."""
        parts = enumerate(self.modules)
        return {f"{number}.{clean_name(name)}": p for number, part in parts for name, p in part.named_parameters()}

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named().items()}

    def products(self) -> dict[tuple[str, str], float]:
        """Return the scale s of each product s B A that is held as one, by the names of A and B."""
        entries = ((number, entry) for number, moor in enumerate(self.moors) for entry in moor.coverage().parameters)
        held = {f"{number}.{entry.name}" for number, entry in entries if entry.how == "product"}
        pairs = (
            (number, pair) for number, module in enumerate(self.modules) for pair in low_rank_pairs(module).items()
        )
        scales = {(f"{number}.{a}", f"{number}.{b}"): scale for number, ((a, b), scale) in pairs}
        return {names: scale for names, scale in scales.items() if held.issuperset(names)}

    def statuses(self) -> dict[str, str]:
        entries = ((number, entry) for number, moor in enumerate(self.moors) for entry in moor.coverage().parameters)
        return {f"{number}.{entry.name}": entry.status for number, entry in entries}

    def checkpoint(self) -> dict[str, Any]:
        """Return copies of the states of the model, the optimizers and the Moorings."""
        return {
            "model": copied(self.model.state_dict()),
            "optimizers": [copied(optimizer.state_dict()) for optimizer in self.optimizers],
            "moors": [copied(moor.state_dict()) for moor in self.moors],
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for moor, state in zip(self.moors, saved["moors"], strict=True):
            moor.load_state_dict(state)


def low_rank_pairs(module: nn.Module) -> dict[tuple[str, str], float]:
    """Return the scale of each of PEFT's low-rank products in a module, by the names of A and B."""
    layers = {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}
    return {
        (clean_name(f"{name}.lora_A.{key}.weight"), clean_name(f"{name}.lora_B.{key}.weight")): scale
        for name, layer in layers.items()
        for key, scale in layer.scaling.items()
        if key in layer.lora_A
    }


def clean_name(name: str) -> str:
    """Return a name without what torch.compile adds."""
    return name.replace("_orig_mod.", "")


def converted(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a batch with its floating-point tensors in a dtype."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: converted(part, dtype) for key, part in batch.items()}
    return tuple(converted(part, dtype) for part in batch) if isinstance(batch, tuple) else batch


def flat(state: Any, path: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested states by their path."""
    if isinstance(state, Tensor):
        return {path: state}
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {key: tensor for name, part in parts for key, tensor in flat(part, f"{path}.{name}").items()}


def split(batch: Batch, pieces: int) -> list[Batch]:
    """Return a batch in pieces of equal numbers of rows."""
    if isinstance(batch, Tensor):
        return list(batch.chunk(pieces))
    if isinstance(batch, dict):
        return [dict(zip(batch, parts, strict=True)) for parts in zip(*map_split(batch.values(), pieces), strict=True)]
    if isinstance(batch, tuple):
        return list(zip(*map_split(batch, pieces), strict=True))
    return [batch] * pieces


def map_split(parts: Iterable[Batch], pieces: int) -> list[list[Batch]]:
    return [split(part, pieces) for part in parts]


def copied(state: Any) -> Any:
    """Return a state with copies of its tensors."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


DAMPING = 0.05
"""What is added to each eigenvalue of the G of a product, as a part of their mean."""


def saved_energy(moor: mooring.Mooring) -> float:
    """Return the sum of F d^2 / 2, or of tr(G d A d') / 2, over all parameters, from a saved state and the model.

    For a low-rank product d is the change of s B A, A are the factors of its layer's inputs, and G is damped.
    """
    state = moor.state_dict()
    tasks = {name: tasks for name, (_, tasks) in json.loads(bytes(state["mooring"].tolist()))["factors"].items()}
    named = {clean_name(name): p.detach().double() for name, p in moor.model.named_parameters()}
    pairs = {b: (a, scale) for (a, b), scale in low_rank_pairs(moor.model).items() if b in tasks}
    firsts = {a for a, _ in pairs.values()}
    total = 0.0
    for name, p in named.items():
        if f"anchor.{name}" not in state or name in firsts:
            continue
        anchor = state[f"anchor.{name}"].double()
        if name in tasks:
            inputs, outputs = (state[f"past_{side}.{name}"].double() for side in ("inputs", "outputs"))
            if name in pairs:
                first, scale = pairs[name]
                d = scale * (p @ named[first] - anchor @ state[f"anchor.{first}"].double())
                outputs = outputs + DAMPING * outputs.trace() / len(outputs) * torch.eye(len(outputs))
            else:
                d = (p - anchor).reshape(*outputs.shape[:-1], -1)  # each group of a convolution has factors
            total += tasks[name] * float((d * (outputs @ d @ inputs)).sum()) / 2
        elif f"previous.{name}" in state:
            total += float((state[f"previous.{name}"].double().clamp(min=0) * (p - anchor).square()).sum()) / 2
    return total
