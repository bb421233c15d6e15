"""One generated GPU kernel for all parameters of one kind, in one pass over memory."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mooring.backends.eager import has_compiler
from mooring.backends.kernels.codegen import TRITON_DTYPES, Rule
from mooring.backends.kernels.multi_tensor import Layout, MultiTensorKernel, elements_per_entry
from mooring.backends.kernels.tensor_list import TensorForm, TensorList
from mooring.rules.pull import Number
from mooring.state.quantization import BLOCK_SLOTS

T = TypeVar("T")

MOVING_TENSORS = ("theta", "g", "before", "probe", "penalized")
"""Tensors that may have another address in each step."""


@dataclass
class KernelArgs:
    """The arguments of a kernel for one parameter.

    Attributes:
        tensors: by name, as in `mooring.backends.eager`.
        numbers: by name, as there.
        dtype: the dtype to compute in.
        kind: what else its rule depends on.
        anchor_moves: whether the anchor may have another address in each step, too.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Number]
    dtype: torch.dtype
    kind: Hashable = None
    anchor_moves: bool = False


class _KernelGroup:
    """Parameters of one kind, and the kernel for them.

    Args:
        indices: the parameters.
        layout: the addresses of their tensors.
        kernel: the kernel.
        anchor_moves: as in `KernelArgs`.

    Attributes:
        moving: the names of the tensors that the kernel uses and that may have another address in each step.
    """

    def __init__(self, indices: list[int], layout: Layout, kernel: MultiTensorKernel, anchor_moves: bool) -> None:
        self.indices, self.layout, self.kernel = indices, layout, kernel
        self.moving = [n for n in kernel.names if n in MOVING_TENSORS or (n == "anchor" and anchor_moves)]
        self._strides = [stride for _, stride in layout.formats["theta"]]
        self._parts: dict[str, TensorList] = {}
        self._known_forms: dict[str, TensorForm] = {}

    def is_for(self, theta: TensorList) -> bool:
        """Return whether parameters that the kernel uses have the dtypes and strides that it was made for."""
        if "theta" not in self.moving:
            return True
        form = self._part("theta", theta).form
        if self._known_forms.get("theta") is not form:
            if list(zip(form.dtypes, form.strides, strict=True)) != self.layout.formats["theta"]:
                return False
            self._known_forms["theta"] = form
        return True

    def run(self, lists: Mapping[str, TensorList], number: Callable[[str], Sequence[Number]]) -> None:
        """Launch the kernel for the present tensors; its numbers are asked for by name."""
        copies = []  # referenced until the kernel is in the device's queue
        for name in self.moving:
            part = self._part(name, lists[name])
            if name in ("g", "probe", "anchor") and self._known_forms.get(name) is not part.form:
                copied = self._with_parameter_strides(part.tensors)
                if not all(map(is_, copied, part.tensors)):
                    copies.append(copied)
                    self.layout.update(name, copied)
                    continue
                self._known_forms[name] = part.form
            self.layout.update(name, part.tensors, part.addresses)
        self.kernel(self.layout, {name: chosen(number(name), self.indices) for name in self.kernel.numbers})
        for part in self._parts.values():
            part.release()

    def _part(self, name: str, whole: TensorList) -> TensorList:
        """Return the tensors of the parameters of this group."""
        if len(whole.tensors) == len(self.indices):
            return whole
        part = self._parts.setdefault(name, TensorList())
        return part if part.tensors else part.replace(chosen(whole.tensors, self.indices))

    def _with_parameter_strides(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor with the strides of its parameter, copied where it has others."""
        return [
            t
            if has_strides(t, stride)
            else torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)
            for t, stride in zip(tensors, self._strides, strict=True)
        ]


_Plan = tuple[list[_KernelGroup], list[int], Sequence[object]]
"""The groups of a set of parameters, the indices that no kernel can do, and the owners of their tensors."""


class FusedRule:
    """A rule run by generated kernels over the parameters for which that is possible.

    The plan for a set of parameters is made once, and kept until `invalidate`.

    Args:
        make_rule: makes the rule from a parameter's `KernelArgs.kind`.
    """

    def __init__(self, make_rule: Callable[[Any], Rule]) -> None:
        self.make_rule = make_rule
        self.kernels: dict[Hashable, MultiTensorKernel | None] = {}
        self.plans: dict[Hashable, _Plan] = {}
        self._last: tuple[Sequence[object], Sequence[Hashable], _Plan] | None = None

    def invalidate(self) -> None:
        """Discard all plans: a tensor that is kept has another address now."""
        self.plans, self._last = {}, None

    def run(
        self,
        owners: Sequence[object],
        kinds: Sequence[Hashable],
        args: Callable[[int], KernelArgs],
        tensors: Callable[[str], TensorList],
        number: Callable[[str], Sequence[Number]],
    ) -> list[int]:
        """Apply the rule, asking only for what a plan does not know: a model may have thousands of parameters.

        Args:
            owners: the owner of each parameter's tensors; the same sequence as in the last step is not read again.
            kinds: of each parameter, as in `KernelArgs`.
            args: returns the arguments of the parameter at an index; called when a plan is made.
            tensors: returns the present tensors of all parameters, by name; called in every step.
            number: returns a number of each parameter, likewise.

        Returns:
            The indices of the parameters that the kernels could not do.
        """
        groups, remaining, _ = self._find_plan(owners, kinds, args)
        lists = _moving_lists(groups, tensors)
        if "theta" in lists and not all(group.is_for(lists["theta"]) for group in groups):
            self.invalidate()
            groups, remaining, _ = self._find_plan(owners, kinds, args)
            lists = _moving_lists(groups, tensors)
        for group in groups:
            group.run(lists, number)
        return remaining

    def _find_plan(
        self, owners: Sequence[object], kinds: Sequence[Hashable], args: Callable[[int], KernelArgs]
    ) -> "_Plan":
        """Return the plan for these parameters, made if there is none."""
        if self._last is not None and self._last[0] is owners and self._last[1] == kinds:
            return self._last[2]
        key = tuple(map(id, owners)), tuple(kinds)
        if key not in self.plans:
            plan = self._plan([args(index) for index in range(len(owners))])
            self.plans[key] = *plan, owners  # a reference, so that no other object gets their ids
        self._last = owners, kinds, self.plans[key]
        return self.plans[key]

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


def _moving_lists(groups: Sequence[_KernelGroup], tensors: Callable[[str], TensorList]) -> dict[str, TensorList]:
    return {name: tensors(name) for name in dict.fromkeys(name for group in groups for name in group.moving)}


def chosen(values: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
    """Return the values at increasing indices, which are often all of them.

    Example:
        >>> chosen("abc", [0, 2])
        ['a', 'c']
    """
    return values if len(indices) == len(values) else [values[index] for index in indices]


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
