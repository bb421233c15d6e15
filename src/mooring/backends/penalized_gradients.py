"""What a penalty hands the optimizer instead of the task's gradient: g + force, for many parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mooring.backends.chunks import tiled
from mooring.backends.fused import Fused, KernelArgs
from mooring.backends.kernels.codegen import has_compiler
from mooring.backends.parameter_step import ParameterStep, now_of
from mooring.distributed.dtensor import local_tensor
from mooring.pulls import GradientPull
from mooring.state.quantization import past

__all__ = ["loaded"]


def loaded(pull: GradientPull, kernels: Fused, due: Sequence[ParameterStep]) -> dict[Tensor, Tensor]:
    """The load of each parameter, by kernels where they can.

    Args:
        pull: gives the force.
        kernels: the same rule, fused.
        due: the parameters; each has a past.
    """
    able = [d for d in due if has_compiler(d.moored.parameter.device)]
    loads = [torch.empty_like(d.moored.parameter) for d in able]

    def told(place: int) -> KernelArgs:
        d, m = able[place], able[place].moored
        tensors = {**m.held(), "g": d.g, "load": local_tensor(loads[place])}
        numbers = {"lr": d.lr, "factor": 1.0 if d.factor is None else d.factor}
        return KernelArgs(tensors, numbers, m.wide, moves=m.staged is not None)

    def now(name: str, places: Sequence[int]) -> Sequence[Any]:
        if name == "load":
            return [local_tensor(loads[place]) for place in places]
        return now_of(name, [able[place] for place in places])

    left = set(kernels.run([d.moored for d in able], [None] * len(able), told, now))
    found = {able[place].moored.parameter: load for place, load in enumerate(loads) if place not in left}
    for d in due:
        if d.moored.parameter not in found:
            found[d.moored.parameter] = _load(pull, d)
    return found


def _load(pull: GradientPull, d: ParameterStep) -> Tensor:
    """g + force, times the factor that the optimizer expects."""
    m = d.moored
    load = torch.empty_like(m.parameter)
    for piece in tiled({**m.held(), "g": d.g, "load": local_tensor(load)}):
        force = pull.force(past(piece).to(m.wide), piece["theta"].to(m.wide) - piece["anchor"], d.lr)
        if d.factor is None and force.dtype == load.dtype:
            torch.add(piece["g"], force, out=piece["load"])
        else:
            piece["load"].copy_((piece["g"] + force) * (1 if d.factor is None else d.factor))
    return load
