"""An elementwise rule over runs as one GPU kernel."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from mooring.backends.kernels.codegen import compiled, trace_rule
from mooring.backends.kernels.launch import in_dry_run, launch

__all__ = ["NEVER", "Elementwise", "source"]

NEVER = 1 << 62
"""What stands where a run was never seen to be lost."""

BLOCK = 1024

_TEXTS: dict[tuple[object, ...], str] = {}
"""What was written, by the key of its rule and the kinds of its tensors."""


class Elementwise:
    """A rule that changes some of its tensors in place, as one kernel over all elements of all runs.

    A rule that does something that is not known how to be written is left as it is, one operation after the other.

    Args:
        rule: takes the tensors by name; elementwise over (runs, elements), with numbers of shape (runs,) or ().
        example: tensors of those names, of any size; each is (runs, elements), (runs, 1), (runs,) or ().
        finite: names of tensors that must be finite.
        key: rules with this key do the same to tensors of the same kinds, and are written once; None for no others.
    """

    def __init__(
        self,
        rule: Callable[[dict[str, Tensor]], None],
        example: Mapping[str, Tensor],
        finite: Sequence[str],
        key: Hashable = None,
    ) -> None:
        self.names, self.rule, self.finite = list(example), rule, list(finite)
        kinds = tuple((name, tensor.dtype, _sample(tensor).shape) for name, tensor in example.items())
        known = (key, kinds, *finite)
        text = _TEXTS[known] if known in _TEXTS else self._text(example)
        if key is not None:
            _TEXTS[known] = text
        few = [name for name, tensor in example.items() if _sample(tensor).shape != (2, 3)]
        self.kernel = compiled(text, ("bad", "now", *(f"p_{name}" for name in few))) if text else None

    def _text(self, example: Mapping[str, Tensor]) -> str:
        """The kernel's source; nothing where the rule cannot be written."""
        try:
            return source(self.rule, example, self.finite)
        except NotImplementedError:
            return ""

    def __call__(self, tensors: Mapping[str, Tensor], bad: Tensor, now: Tensor) -> None:
        """Apply the rule.

        Args:
            tensors: by the names of the example; those of shape (runs, elements) contiguous.
            bad: int64 of shape (runs,); the step is written where something is not finite, if it is the first.
            now: the step, int64 of shape (1,).
        """
        if self.kernel is None:
            self._one_by_one(tensors, bad, now)
            return
        ordered = [tensors[name] for name in self.names]
        runs, count = next(t.shape for t in ordered if t.ndim == 2)
        launch(self.kernel, (-(-count // BLOCK), runs), bad, now, count, *ordered, B=BLOCK)

    def _one_by_one(self, tensors: Mapping[str, Tensor], bad: Tensor, now: Tensor) -> None:
        if in_dry_run():
            return
        for name in self.finite:
            lost = ~tensors[name].isfinite().flatten(1).all(1)
            torch.minimum(bad, torch.where(lost, now, bad), out=bad)
        self.rule(dict(tensors))


def source(rule: Callable[[dict[str, Tensor]], None], example: Mapping[str, Tensor], finite: Sequence[str] = ()) -> str:
    """A Triton kernel that does what the rule does, a program for each block of each run.

    Example:
        >>> def halve(tensors):
        ...     tensors["theta"].mul_(0.5)
        >>> print(source(halve, {"theta": torch.ones(2, 3)}).splitlines()[-2].strip())
        v1 = x_theta * 0.5
    """
    small = {name: _sample(tensor) for name, tensor in example.items()}
    found = trace_rule(rule, small)
    whole = [name for name, tensor in small.items() if tensor.shape == (2, 3)]
    places = {name: "row" if name in whole else "run" if tensor.ndim else "0" for name, tensor in small.items()}
    masked = {name: ", mask=there" if name in whole else "" for name in small}
    loads = []
    for name in small:
        if found.reads(name) or name in finite:
            other = ", other=0" if masked[name] else ""
            loads.append(f"x_{name} = tl.load(p_{name} + {places[name]}{masked[name]}{other})")
    stores = [f"tl.store(p_{name} + {places[name]}, {value}{masked[name]})" for name, value in found.stores]
    checks = [f"tl.atomic_min(bad + run, tl.load(now), mask={_lost(name, name in whole)})" for name in finite]
    body = [
        "run = tl.program_id(1)",
        "at = tl.program_id(0) * B + tl.arange(0, B)",
        "there = at < count",
        "row = run.to(tl.int64) * count + at",
        *loads,
        *found.lines,
        *stores,
        *checks,
    ]
    head = f"def rule(bad, now, count, {', '.join(f'p_{name}' for name in small)}, B: tl.constexpr):"
    return "\n".join([head, *(f"    {line}" for line in body)]) + "\n"


def _sample(tensor: Tensor) -> Tensor:
    """Two runs of three elements, of the same kind: what is traced does not depend on sizes."""
    kinds = {0: (), 1: (2,), 2: (2, 1) if tensor.shape[-1:] == (1,) else (2, 3)}
    return torch.ones(kinds[tensor.ndim], dtype=tensor.dtype)


def _lost(name: str, whole: bool) -> str:
    """Whether anything in it is not finite."""
    lost = f"((x_{name} != x_{name}) | (tl.abs(x_{name}) == float('inf')))"
    return f"tl.max({lost}.to(tl.int32), 0) > 0" if whole else lost
