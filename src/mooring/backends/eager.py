"""The lines of Algorithm 1 as elementwise rules on named tensors, and their execution on aligned chunks.

The core's step, a fleet's step and the GPU kernels all use these rules: `apply_penalty`, `update_importance` and
`apply_pull`. The kernels are traced from them (`mooring.backends.kernels.codegen`). The names of the tensors:

| name | tensor |
| --- | --- |
| theta, anchor | the parameter, changed in place, and its anchor |
| g | the gradient of the task's loss |
| before | the parameter before the optimizer's step |
| probe | the gradient of the importance's own function of the outputs |
| previous, previous_high, previous_step | the importance over past tasks, the last two where it is quantized |
| state_... | the importance's tensors on this task, changed in place; state_current is the score |
| penalized | the gradient that the optimizer gets, written by a penalty |
| removed | the part of the displacement that a pull removes, written where theta - anchor is in an eigenbasis |
| lr, count, samples, grad_scale, layer_scale, mu | numbers: one, or one per run |
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from mooring.backends.kernels.codegen import Rule
from mooring.rules import Budget, GradientPull, Importance, Iteration, ParameterPull, Pull, State
from mooring.rules.pull import Number, per_run
from mooring.state.quantization import dequantize

CPU_CHUNK = 5 << 16
DEVICE_CHUNK = 1 << 26
"""Elements in a chunk: intermediate results of a rule stay in the CPU's cache, and small on a device."""

AUTOCAST_DEVICES = ("cuda", "cpu", "mps", "xpu")

P = ParamSpec("P")
R = TypeVar("R")


def apply_penalty(pull: GradientPull, tensors: Mapping[str, Any]) -> Tensor:
    """Return the penalized gradient, g + force.

    Example:
        >>> from mooring import Penalty
        >>> one = torch.ones(1)
        >>> apply_penalty(Penalty(10.0), {"g": one, "theta": 3 * one, "anchor": one, "previous": 2 * one, "lr": 0.1})
        tensor([41.])
    """
    force = pull.force(previous_importance(tensors), tensors["theta"] - tensors["anchor"], tensors["lr"])
    g: Tensor = tensors["g"]
    return g + force


def update_importance(importance: Importance, tensors: Mapping[str, Any]) -> None:
    """Update the importance on this task, after the optimizer's step and before a pull."""
    state = {name.removeprefix("state_"): t for name, t in tensors.items() if name.startswith("state_")}
    iteration = {name: tensors[name] for name in (*Iteration.TENSORS, "samples", "count") if name in tensors}
    importance.update(state, Iteration(**iteration))


def apply_pull(pull: ParameterPull | Budget, tensors: Mapping[str, Any]) -> None:
    """theta <- theta + rate * (anchor - theta), as a lerp, which never leaves the interval; nothing without a past.

    Example:
        >>> from mooring import Proximal
        >>> theta, one = torch.tensor([3.0]), torch.ones(1)
        >>> apply_pull(Proximal(10.0), {"theta": theta, "anchor": one, "previous": one, "lr": 0.1})
        >>> theta
        tensor([2.])
    """
    if "previous" not in tensors:
        return
    theta = tensors["theta"]
    theta.lerp_(tensors["anchor"], _pull_rate(pull, tensors).to(theta.dtype))


def _pull_rate(pull: ParameterPull | Budget, tensors: Mapping[str, Any]) -> Tensor:
    """Return the rate of the return to the anchor."""
    previous = previous_importance(tensors)
    if isinstance(pull, Budget):
        return pull.rate(previous, tensors["mu"])
    current = tensors.get("state_current", previous)  # not kept where the pull does not read it
    if "layer_scale" in tensors:
        current = current * per_run(tensors["layer_scale"], current)
    return pull.rate(previous, current, tensors["lr"])


def merge_statistics(pull: ParameterPull, statistics: Tensor, anchor: Tensor, tasks: int, lr: Number) -> None:
    """Pull statistics towards those of past tasks; they have no importance, so each task matters equally.

    Args:
        pull: a pull that merges weights.
        statistics: of the task that ended; changed in place.
        anchor: those after the tasks before.
        tasks: the number of these tasks.
        lr: the learning rate; one number, or one per run.

    Example:
        >>> from mooring.rules import Interpolation
        >>> mean = torch.zeros(2)
        >>> merge_statistics(Interpolation(root=1, every="task"), mean, torch.ones(2), tasks=3, lr=0.1)
        >>> mean
        tensor([0.7500, 0.7500])
    """
    equal = {"previous": torch.full_like(statistics, tasks), "state_current": torch.ones_like(statistics)}
    apply_pull(pull, {"theta": statistics, "anchor": anchor, **equal, "lr": lr})


def pull_is_due(pull: Pull, tasks: int, steps: int) -> bool:
    """Return whether a pull on the parameters acts now.

    Args:
        pull: the pull.
        tasks: the number of consolidated tasks.
        steps: the iterations of this task, including this one.

    Example:
        >>> from mooring import Interpolation
        >>> pull_is_due(Interpolation(every=2), tasks=1, steps=4), pull_is_due(Interpolation(every="task"), 1, 4)
        (True, False)
    """
    if isinstance(pull, GradientPull) or not tasks:
        return False
    return isinstance(pull.every, int) and steps % pull.every == 0


def step_rule(importance: Importance, pull: ParameterPull | None, *, updates: bool) -> Rule:
    """Return the rule of everything after the optimizer's step: update the importance, then pull.

    Args:
        importance: the importance.
        pull: the pull; None in an iteration in which it does not act.
        updates: whether this iteration changes the importance.
    """

    def rule(tensors: dict[str, Any]) -> None:
        if updates:
            update_importance(importance, tensors)
        if pull is not None:
            apply_pull(pull, tensors)

    return rule


def penalty_rule(pull: GradientPull) -> Rule:
    """Return the rule of a penalty: penalized <- (g + force), times `grad_scale` if there is one."""

    def rule(tensors: dict[str, Any]) -> None:
        penalized = apply_penalty(pull, tensors)
        tensors["penalized"].copy_(penalized * tensors["grad_scale"] if "grad_scale" in tensors else penalized)

    return rule


def removal_rule(pull: ParameterPull | Budget) -> Rule:
    """Return the rule of the displacement that a pull removes: removed <- rate * (theta - anchor)."""

    def rule(tensors: dict[str, Any]) -> None:
        tensors["removed"].copy_((tensors["theta"] - tensors["anchor"]) * _pull_rate(pull, tensors))

    return rule


def previous_importance(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the importance over past tasks, dequantized where it is stored in 8 bits.

    Example:
        >>> previous_importance({"previous": torch.tensor([2.0])})
        tensor([2.])
    """
    if "previous_high" not in tensors:
        return tensors["previous"]
    return dequantize(tensors["previous"], tensors["previous_high"], tensors["previous_step"])


WRITTEN = ("theta", "penalized", "removed")
"""The tensors that rules change, beside the importance."""


def run_in_chunks(rule: Rule, tensors: State, numbers: Mapping[str, Number], dtype: torch.dtype) -> None:
    """Apply a rule to tensors of one shape, chunk by chunk, computing in a dtype.

    Tensors in another floating-point dtype are converted, and those that a rule may change are written back.

    Args:
        rule: the rule.
        tensors: by name; the first one decides the shape.
        numbers: what else the rule reads.
        dtype: the dtype to compute in.
    """
    for chunk in chunks(tensors):
        computed = {name: t.to(dtype) if t.is_floating_point() else t for name, t in chunk.items()}
        rule({**computed, **numbers})
        for name, t in chunk.items():
            if computed[name] is not t and (name in WRITTEN or name.startswith("state_")):
                t.copy_(computed[name])


def chunks(tensors: Mapping[str, Tensor], size: int | None = None) -> Iterator[State]:
    """Yield flat views of the same elements of each tensor, chunk by chunk.

    Rules are elementwise, so they may run over chunks; their temporaries are then the size of a chunk and not of the
    parameter. A tensor with a single element is passed as it is, to broadcast. A tensor with fewer elements has one
    for each block of the others', and chunks are whole blocks. Tensors with different memory layouts are one chunk.

    Args:
        tensors: tensors of one shape, the first of which decides; or of a single element, or one for each block.
        size: elements in a chunk; by default what suits the device.

    Example:
        >>> named = {"a": torch.arange(5), "one": torch.tensor(1)}
        >>> [(chunk["a"].tolist(), chunk["one"].tolist()) for chunk in chunks(named, size=3)]
        [([0, 1, 2], 1), ([3, 4], 1)]
    """
    values: Sequence[Tensor] = list(tensors.values())
    first = values[0]
    if size is None:
        size = CPU_CHUNK if first.device.type == "cpu" else DEVICE_CHUNK
    if first.numel() <= size or not all(t.is_contiguous() for t in values):
        yield dict(tensors)
        return
    flat = [(t if t.ndim == 0 else t.view(-1), first.numel() // max(1, t.numel())) for t in values]
    largest_block = max(block for t, block in flat if t.ndim)
    size = max(1, size // largest_block) * largest_block
    for start in range(0, first.numel(), size):
        views = (t if t.ndim == 0 else t[start // block : (start + size) // block] for t, block in flat)
        yield dict(zip(tensors, views, strict=True))


@cache
def has_compiler(device: torch.device) -> bool:
    """Return whether GPU kernels can be generated for a device; the rules run eagerly where not."""
    return device.type == "cuda" and find_spec("triton") is not None


@contextmanager
def autocast_disabled() -> Iterator[None]:
    """Return a context, or a decorator, in which `torch.autocast` has no effect.

    A training loop may call `optimizer.step()`, `backward()` or `consolidate()` within it. Forward passes belong there,
    but the rules choose their own dtype.

    Example:
        >>> with torch.autocast("cpu"), autocast_disabled():
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32
    """
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def gc_disabled(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function during which Python's garbage collector does not run.

    A step over thousands of tensors, and reading thousands of results, triggers the collector without leaving cycles.

    Example:
        >>> gc_disabled(gc.isenabled)(), gc.isenabled()
        (False, True)
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return wrapper
