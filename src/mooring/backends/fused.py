"""A rule over all parameters on a GPU in one pass over memory: one generated kernel for all parameters of one kind."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mooring.backends.eager import Rule, has_compiler
from mooring.backends.kernels.codegen import TRITON_DTYPES
from mooring.backends.kernels.multi_tensor import Layout, MultiTensorKernel, elements_per_entry
from mooring.pulls.pull import Number
from mooring.state.quantization import BLOCK_SLOTS

MOVING_TENSORS = ("theta", "g", "before", "probe", "penalized")
"""Tensors that may have another address in each step."""


@dataclass
class KernelArgs:
    """The arguments of a kernel for one parameter.

    Attributes:
        tensors: by name, as in `mooring.backends.eager`.
        numbers: by name, as there.
        dtype: the dtype to compute in.
        kind: whatever else distinguishes its rule.
        anchor_moves: whether the anchor may have another address in each step, too.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Number]
    dtype: torch.dtype
    kind: Hashable = None
    anchor_moves: bool = False


@dataclass
class _KernelGroup:
    """Parameters of one kind, and the kernel for them.

    Attributes:
        indices: the parameters.
        layout: the addresses of their tensors.
        kernel: the kernel.
        anchor_moves: as in `KernelArgs`.
    """

    indices: list[int]
    layout: Layout
    kernel: MultiTensorKernel
    anchor_moves: bool

    def __post_init__(self) -> None:
        self.strides = [stride for _, stride in self.layout.formats["theta"]]

    def moving_names(self) -> list[str]:
        """Return the names of the tensors that may have another address in each step."""
        return [n for n in self.layout.rows if n in MOVING_TENSORS or (n == "anchor" and self.anchor_moves)]

    def with_parameter_strides(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor with the strides of its parameter, copied where it has others."""
        if list(map(Tensor.stride, tensors)) == self.strides:
            return list(tensors)
        return [
            t
            if has_strides(t, stride)
            else torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)
            for t, stride in zip(tensors, self.strides, strict=True)
        ]


class FusedRule:
    """A rule run by generated kernels over the parameters for which that is possible.

    The plan for a set of parameters is made once, and kept until `invalidate`.

    Args:
        make_rule: makes the rule from a parameter's `KernelArgs.kind`.
    """

    def __init__(self, make_rule: Callable[[Any], Rule]) -> None:
        self.make_rule = make_rule
        self.kernels: dict[Hashable, MultiTensorKernel | None] = {}
        self.plans: dict[Hashable, tuple[list[_KernelGroup], list[int], Sequence[object]]] = {}

    def invalidate(self) -> None:
        """Discard all plans: a tensor that is kept has another address now."""
        self.plans = {}

    def run(
        self,
        owners: Sequence[object],
        kinds: Sequence[Hashable],
        args: Callable[[int], KernelArgs],
        current: Callable[[str, Sequence[int]], Sequence[Any]],
    ) -> list[int]:
        """Apply the rule, asking only for what a plan does not know: a model may have thousands of parameters.

        Args:
            owners: the owner of each parameter's tensors.
            kinds: of each parameter, as in `KernelArgs`.
            args: returns the arguments of the parameter at an index; called when a plan is made.
            current: returns a tensor or a number, by name, of the parameters at some indices; called in every step.

        Returns:
            The indices of the parameters that the kernels could not do.
        """
        key = tuple(map(id, owners)), tuple(kinds)
        if key not in self.plans:
            plan = self._plan([args(index) for index in range(len(owners))])
            self.plans[key] = *plan, owners  # a reference, so that no other object gets their ids
        groups, remaining, _ = self.plans[key]
        moving = [{name: current(name, group.indices) for name in group.moving_names()} for group in groups]
        if not all(
            group.layout.follow("theta", named.pop("theta")) for group, named in zip(groups, moving, strict=True)
        ):
            del self.plans[key]
            return self.run(owners, kinds, args, current)
        for group, named in zip(groups, moving, strict=True):
            # the copies are referenced until the kernel is in the device's queue
            named |= {n: group.with_parameter_strides(named[n]) for n in ("g", "probe", "anchor") if n in named}
            for name, tensors in named.items():
                group.layout.update(name, tensors)
            group.kernel(group.layout, {name: current(name, group.indices) for name in group.kernel.numbers})
        return remaining

    def _plan(self, args: Sequence[KernelArgs]) -> tuple[list[_KernelGroup], list[int]]:
        by_key: dict[Hashable, list[int]] = {}
        remaining = []
        for index, arg in enumerate(args):
            plain = all(_is_number(number, args[0].numbers.get(name)) for name, number in arg.numbers.items())
            if plain and is_fusable(arg.tensors):
                key: Hashable = kernel_key(arg.tensors), tuple(arg.numbers), arg.dtype, arg.kind
                by_key.setdefault(key, []).append(index)
            else:
                remaining.append(index)
        groups = []
        for key, indices in by_key.items():
            kernel = self._kernel(key, args[indices[0]])
            if kernel is None:
                remaining += indices
            else:
                layout = Layout([args[index].tensors for index in indices])
                groups.append(_KernelGroup(indices, layout, kernel, args[indices[0]].anchor_moves))
        return groups, sorted(remaining)

    def _kernel(self, key: Hashable, example: KernelArgs) -> MultiTensorKernel | None:
        if key not in self.kernels:
            try:
                rule = self.make_rule(example.kind)
                self.kernels[key] = MultiTensorKernel(rule, example.tensors, list(example.numbers), example.dtype)
            except NotImplementedError:  # a user's own rule with an operation that is not elementwise
                self.kernels[key] = None
        return self.kernels[key]


def has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Return whether the elements are where these strides put them; the stride of a dimension of size 1 says nothing.

    Example:
        >>> depthwise = torch.zeros(8, 1, 3, 3)
        >>> has_strides(depthwise, depthwise.to(memory_format=torch.channels_last).stride())
        True
    """
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or own == other for size, own, other in pairs)


def _is_number(number: Number, first: Number | None) -> bool:
    """Return whether a kernel can read a number without a wait: of the host, or one tensor of all parameters."""
    return isinstance(number, int | float) or (number is first and number.device.type == "cuda")


def is_fusable(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a kernel can address everything: on one GPU, with the strides of the parameter."""
    theta = tensors["theta"]
    if type(theta) not in (nn.Parameter, Tensor) or not has_compiler(theta.device):
        return False
    dense = theta.is_contiguous() or (theta.ndim == 4 and theta.is_contiguous(memory_format=torch.channels_last))
    kept = [t for name, t in tensors.items() if name not in (*MOVING_TENSORS, *BLOCK_SLOTS)]
    return (
        dense
        and all(t.ndim == 0 or has_strides(t, theta.stride()) for t in kept)
        and all(t.device == theta.device and t.dtype in TRITON_DTYPES for t in tensors.values())
    )


def kernel_key(tensors: Mapping[str, Tensor]) -> Hashable:
    """Return what parameters must have in common to share a kernel."""
    entries = ((n, t.dtype, t.ndim == 0, elements_per_entry(tensors, n)) for n, t in tensors.items())
    return tensors["theta"].device, *entries
