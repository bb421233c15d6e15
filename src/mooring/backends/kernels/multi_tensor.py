"""An elementwise rule over many tensors as one GPU kernel, which finds them in a table of addresses.

A model has hundreds of parameters, and to launch a kernel for each takes longer than most of them: here one program of
one kernel does one block of one of them.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from mooring.backends.kernels.codegen import DTYPES, TracedRule, compiled, trace_rule
from mooring.backends.kernels.launch import launch

__all__ = [
    "BLOCK",
    "BRANCHES",
    "WARPS",
    "Layout",
    "MultiTensorKernel",
    "block_of",
    "form_of",
    "loaded",
    "located",
    "small",
    "source",
]

BLOCK = 2048
WARPS = 8
LINE = 16
"""Bytes that a thread fetches at once, where addresses are multiples of it."""


class Layout:
    """Where the tensors of many parameters lie.

    Args:
        tensors: of each parameter, by name; the same names for all.

    Attributes:
        sizes: how many elements each parameter has.
        blocks: which parameter each program takes a block of, and where the block begins.
        forms: the dtype and the order of memory of each tensor, by name.
    """

    def __init__(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        self.device = next(iter(tensors[0].values())).device
        self.rows = {name: row for row, name in enumerate(tensors[0], start=1)}
        self.single = [row for name, row in self.rows.items() if tensors[0][name].ndim == 0]
        self.sizes = tuple(max(tensor.numel() for tensor in each.values()) for each in tensors)
        self.blocks = _blocks(self.sizes, self.device)
        self.host = torch.zeros(1 + len(self.rows), len(tensors), dtype=torch.int64)
        self.host[0] = torch.tensor(self.sizes)
        self.forms = {name: [form_of(each[name]) for each in tensors] for name in self.rows}
        self.known: dict[str, list[int]] = {}
        self.lines: dict[str, bool] = {}
        for name in self.rows:
            self.move(name, [each[name] for each in tensors])

    def move(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Tensors of that name may lie elsewhere now."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self.known.get(name) != addresses:
            self.known[name] = addresses
            row = torch.tensor(addresses)
            self.lines[name] = self.rows[name] in self.single or not bool((row % LINE).any())
            self.host[self.rows[name]] = row
            self.__dict__.pop("sent", None)

    def is_for(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors of that name have the form they had; where none moved, they do."""
        moved = [tensor.data_ptr() for tensor in tensors] != self.known[name]
        return not moved or [form_of(tensor) for tensor in tensors] == self.forms[name]

    @cached_property
    def sent(self) -> Tensor:
        """The table on the device, as it is now."""
        return _sent(self.host, self.device)

    @property
    def aligned(self) -> bool:
        """Whether threads can fetch whole lines."""
        return all(self.lines.values())


def form_of(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the order of memory, which kernels are made for."""
    return tensor.dtype, tensor.stride()


class MultiTensorKernel:
    """A rule that changes some tensors of each of many parameters in place.

    Args:
        rule: takes the tensors of one parameter by name; elementwise. 0-d tensors broadcast, and one that has fewer
            elements than the parameter has one for each block of it.
        tensors: those of one of the parameters, which is like all others in dtypes, in which are 0-d, and in blocks.
        numbers: the names of plain numbers that each parameter has, which the rule is told as 0-d tensors.
        wide: the dtype to compute in.
        dial: the name of a 0-d tensor on the device that all parameters share; where it is 0 nothing is done.

    Raises:
        NotImplementedError: where the rule does something that is not known how to be written.
    """

    def __init__(
        self,
        rule: Callable[[dict[str, Tensor]], None],
        tensors: Mapping[str, Tensor],
        numbers: Sequence[str],
        wide: torch.dtype,
        dial: str = "",
    ) -> None:
        self.numbers = list(numbers)
        text = source(rule, tensors, numbers, wide, dial)
        self.kernel = compiled(text) if "tl.store" in text else None  # some rules have nothing to do

    def __call__(self, layout: Layout, numbers: Mapping[str, Sequence[float]], dial: Tensor | None = None) -> None:
        """Apply the rule to each parameter.

        Args:
            layout: where its tensors are, under the names that the rule was made with, in that order; each parameter's
                in the same order of memory.
            numbers: for each name one for each parameter.
            dial: what they share, where the rule has that.
        """
        if self.kernel is None:
            return
        plain = array("d", [number for name in self.numbers for number in numbers[name]] or [0.0])
        table, values = layout.sent, _sent(torch.frombuffer(plain, dtype=torch.float64), layout.device)
        told = table, values, layout.blocks, table if dial is None else dial, len(layout.sizes)
        launch(self.kernel, (len(layout.blocks),), *told, B=BLOCK, ALIGNED=layout.aligned, num_warps=WARPS)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it; a copy, since the host's goes on changing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


@lru_cache(maxsize=16)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Of every program; int64 of shape (programs, 2)."""
    counts = torch.tensor([-(-size // BLOCK) for size in sizes])
    which = torch.arange(len(sizes)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[which]
    return torch.stack([which, (torch.arange(len(which)) - first) * BLOCK], 1).contiguous().to(device)


def source(
    rule: Callable[[dict[str, Tensor]], None],
    tensors: Mapping[str, Tensor],
    numbers: Sequence[str],
    wide: torch.dtype,
    dial: str = "",
) -> str:
    """A Triton kernel that does what the rule does, to every tensor in a table.

    Example:
        >>> def pulled(told):
        ...     told["theta"].lerp_(told["anchor"], told["rate"])
        >>> told = {"theta": torch.ones(5, dtype=torch.bfloat16), "anchor": torch.ones(5)}
        >>> print(source(pulled, told, ["rate"], torch.float32).splitlines()[0])
        def rule(table, values, blocks, dial, T, B: tl.constexpr, ALIGNED: tl.constexpr):
    """
    given = [*numbers, *([dial] if dial else [])]
    found = trace_rule(rule, small(tensors, wide) | {name: torch.ones((), dtype=wide) for name in given})
    used = [name for name in tensors if found.reads(name) or name in dict(found.stores)]
    lines = ["pid = tl.program_id(0).to(tl.int64)", *located("pid", tensors, used)]
    for row, name in enumerate(numbers):
        lines.append(f"x_{name} = tl.load(values + {row} * T + which).to({DTYPES[wide]})")
    if dial:
        lines += [f"x_{dial} = tl.load(dial).to({DTYPES[wide]})", f"if x_{dial} == 0:", "    return"]
    for condition, mask in BRANCHES:
        lines.append(condition)
        lines += [f"    {line}" for line in [*loaded(tensors, used, found, wide, mask), *found.lines]]
        lines += [f"    tl.store(p_{name} + at, {value}{mask})" for name, value in found.stores]
    head = "def rule(table, values, blocks, dial, T, B: tl.constexpr, ALIGNED: tl.constexpr):"
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"


BRANCHES = (("if begin + B <= count:", ""), ("else:", ", mask=at < count"))
"""A whole block is fetched in whole lines; the last one of a parameter is masked."""


def small(tensors: Mapping[str, Tensor], wide: torch.dtype) -> dict[str, Tensor]:
    """Tensors to trace a rule with: what is traced does not depend on sizes."""
    return {
        name: torch.ones(() if tensor.ndim == 0 else 3, dtype=torch.bool if tensor.dtype == torch.bool else wide)
        for name, tensor in tensors.items()
    }


def located(block: str, tensors: Mapping[str, Tensor], used: Sequence[str]) -> list[str]:
    """Lines that find a block: the parameter, where in it the block begins, and where its tensors are."""
    lines = [
        f"which = tl.load(blocks + 2 * {block})",
        f"begin = tl.multiple_of(tl.load(blocks + 2 * {block} + 1), B)",
        "count = tl.load(table + which)",
        "at = begin + tl.arange(0, B)",
    ]
    for row, (name, tensor) in enumerate(tensors.items(), start=1):
        if name in used:
            lines.append(f"p_{name} = tl.load(table + {row} * T + which).to(tl.pointer_type({DTYPES[tensor.dtype]}))")
            if tensor.ndim:
                lines += ["if ALIGNED:", f"    p_{name} = tl.multiple_of(p_{name}, {LINE})"]
    return lines


def block_of(tensors: Mapping[str, Tensor], name: str) -> int:
    """How many elements of a parameter share one of a tensor; 1 for most.

    Example:
        >>> block_of({"theta": torch.ones(6), "high": torch.ones(2)}, "high")
        3
    """
    own = tensors[name]
    return max(t.numel() for t in tensors.values()) // own.numel() if own.ndim and own.numel() else 1


def loaded(
    tensors: Mapping[str, Tensor], used: Sequence[str], found: TracedRule, wide: torch.dtype, mask: str
) -> list[str]:
    """Lines that fetch what the rule reads of a block."""
    lines = []
    for name in used:
        if found.reads(name):
            block = block_of(tensors, name)
            at = "at" if block == 1 else f"at // {block}"
            place, hidden = (f"p_{name} + {at}", mask) if tensors[name].ndim else (f"p_{name}", "")
            other = ", other=0" if hidden else ""
            cast = "" if tensors[name].dtype == torch.bool else f".to({DTYPES[wide]})"
            lines.append(f"x_{name} = tl.load({place}{hidden}{other}){cast}")
    return lines
