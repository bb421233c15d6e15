"""An elementwise rule over many tensors as one GPU kernel, which reads their addresses from a table.

A model has hundreds of parameters, and launching a kernel for each of them takes longer than most of them need. Here
one program of one kernel does one block of one parameter.
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from mooring.backends.kernels.codegen import (
    TRITON_DTYPES,
    Rule,
    TracedRule,
    compile_kernel,
    kernel_source,
    load_line,
    trace_rule,
)
from mooring.backends.kernels.launch import launch

BLOCK = 2048
WARPS = 8
ALIGNMENT = 16
"""Bytes that a thread loads at once, if the addresses are multiples of it."""


class Layout:
    """The addresses of the tensors of many parameters.

    Args:
        tensors: the tensors of each parameter, by name; the same names for all.

    Attributes:
        sizes: the number of elements of each parameter.
        blocks: the parameter and the first element of the block of each program.
        formats: the dtype and strides of each tensor, by name.
    """

    def __init__(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        self.device = next(iter(tensors[0].values())).device
        self.rows = {name: row for row, name in enumerate(tensors[0], start=1)}
        self.scalar_rows = [row for name, row in self.rows.items() if tensors[0][name].ndim == 0]
        self.sizes = tuple(max(tensor.numel() for tensor in named.values()) for named in tensors)
        self.blocks = _blocks(self.sizes, self.device)
        self.host = torch.zeros(1 + len(self.rows), len(tensors), dtype=torch.int64)
        self.host[0] = torch.tensor(self.sizes)
        self.formats = {name: [memory_format(named[name]) for named in tensors] for name in self.rows}
        self.addresses: dict[str, Sequence[int]] = {}
        self.aligned_names: dict[str, bool] = {}
        for name in self.rows:
            self.update(name, [named[name] for named in tensors])

    def update(self, name: str, tensors: Sequence[Tensor], addresses: Sequence[int] | None = None) -> bool:
        """Set the addresses of the tensors of that name, which may be known, and return whether one is another."""
        addresses = list(map(Tensor.data_ptr, tensors)) if addresses is None else addresses
        moved = self.addresses.get(name) != addresses
        if moved:
            self.addresses[name] = addresses
            self.host[self.rows[name]] = row = torch.frombuffer(array("q", addresses), dtype=torch.int64)
            self.aligned_names[name] = self.rows[name] in self.scalar_rows or not bool((row % ALIGNMENT).any())
            self.__dict__.pop("device_table", None)
        return moved

    def follow(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Set the addresses of the tensors of that name, and return whether they have the dtypes and strides of before.

        If not, the kernels were made for others.
        """
        return not self.update(name, tensors) or [memory_format(t) for t in tensors] == self.formats[name]

    @cached_property
    def device_table(self) -> Tensor:
        """The table of addresses on the device."""
        return _to_device(self.host, self.device)

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch; ALIGNED says whether every address is a multiple of `ALIGNMENT`."""
        return {"B": BLOCK, "ALIGNED": all(self.aligned_names.values()), "num_warps": WARPS}


def memory_format(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and strides, which a kernel is compiled for."""
    return tensor.dtype, tensor.stride()


class MultiTensorKernel:
    """A rule that changes some tensors of each of many parameters in place.

    Args:
        rule: an elementwise rule on the tensors of one parameter by name. A 0-d tensor broadcasts. A tensor with fewer
            elements than the parameter has one for each block of it.
        tensors: the tensors of one of the parameters; all have the same dtypes, 0-d tensors and block sizes.
        numbers: the names of plain numbers of each parameter, which the rule gets as 0-d tensors.
        dtype: the dtype to compute in.
        scalar: the name of a 0-d tensor on the device that all parameters share; nothing is done where it is 0.

    Attributes:
        numbers: the names of the numbers that the rule reads.
        names: the names of the tensors that it reads or changes.

    Raises:
        NotImplementedError: if the rule has an operation without a translation.
    """

    def __init__(
        self, rule: Rule, tensors: Mapping[str, Tensor], numbers: Sequence[str], dtype: torch.dtype, scalar: str = ""
    ) -> None:
        traced = trace_parameter(rule, tensors, numbers, dtype, scalar)
        self.numbers = [name for name in numbers if traced.reads(name)]
        self.names = _used(traced, tensors)
        text = multi_tensor_source(traced, tensors, self.numbers, dtype, scalar)
        self.kernel = compile_kernel(text) if "tl.store" in text else None  # a rule may change nothing

    def __call__(
        self, layout: Layout, numbers: Mapping[str, Sequence[float | Tensor]], scalar: Tensor | None = None
    ) -> None:
        """Apply the rule to each parameter.

        Args:
            layout: the addresses of the tensors, with the names and in the order that the kernel was made with.
            numbers: for each name, one number for each parameter; the host waits for those on the device, unless it is
                one for all.
            scalar: the shared tensor, if the rule has one.
        """
        if self.kernel is None:
            return
        table = layout.device_table
        values = self._values(layout, numbers) if self.numbers else table
        args = table, values, layout.blocks, table if scalar is None else scalar, len(layout.sizes)
        launch(self.kernel, (len(layout.blocks),), *args, **layout.options)

    def _values(self, layout: Layout, numbers: Mapping[str, Sequence[float | Tensor]]) -> Tensor:
        """Return the numbers of all parameters on the device, one name after the other."""
        shared = {name: number for name in self.numbers if (number := _shared_on_gpu(numbers[name])) is not None}
        plain = array("d")
        for name in self.numbers:
            plain.extend([0.0] * len(numbers[name]) if name in shared else numbers[name])  # type: ignore[arg-type]
        values = _to_device(torch.frombuffer(plain, dtype=torch.float64), layout.device)
        for name, number in shared.items():
            values.view(len(self.numbers), -1)[self.numbers.index(name)] = number
        return values


def _shared_on_gpu(numbers: Sequence[float | Tensor]) -> Tensor | None:
    """Return the number of all parameters if it is one tensor on a GPU, for which the host need not wait."""
    first = numbers[0]
    same = isinstance(first, Tensor) and first.device.type == "cuda" and all(number is first for number in numbers)
    return first if same else None  # type: ignore[return-value]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting; always a copy, because the host changes its own."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


@lru_cache(maxsize=16)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the parameter and the first element of each program's block; int64 of shape (programs, 2)."""
    counts = torch.tensor([-(-size // BLOCK) for size in sizes])
    which = torch.arange(len(sizes)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[which]
    return torch.stack([which, (torch.arange(len(which)) - first) * BLOCK], 1).contiguous().to(device)


def trace_parameter(
    rule: Rule, tensors: Mapping[str, Tensor], numbers: Sequence[str], dtype: torch.dtype, scalar: str = ""
) -> TracedRule:
    """Trace what a rule does to the tensors of a parameter; the arguments are those of `MultiTensorKernel`."""
    scalars = {name: torch.ones((), dtype=dtype) for name in (*numbers, *([scalar] if scalar else []))}
    return trace_rule(rule, example_tensors(tensors, dtype) | scalars)


def _used(traced: TracedRule, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that a rule reads or changes."""
    return [name for name in tensors if traced.reads(name) or name in dict(traced.stores)]


def multi_tensor_source(
    traced: TracedRule, tensors: Mapping[str, Tensor], numbers: Sequence[str], dtype: torch.dtype, scalar: str = ""
) -> str:
    """Return the source of a Triton kernel that applies a traced rule to every parameter in a table."""
    used = _used(traced, tensors)
    lines = ["pid = tl.program_id(0).to(tl.int64)", *locate_lines("pid", tensors, used)]
    for row, name in enumerate(numbers):
        lines.append(f"x_{name} = tl.load(values + {row} * T + which).to({TRITON_DTYPES[dtype]})")
    if scalar:
        lines += [f"x_{scalar} = tl.load(scalar).to({TRITON_DTYPES[dtype]})", f"if x_{scalar} == 0:", "    return"]
    for condition, mask in BRANCHES:
        lines.append(condition)
        lines += [f"    {line}" for line in [*load_lines(tensors, used, traced, dtype, mask), *traced.lines]]
        lines += [f"    tl.store(p_{name} + at, {value}{mask})" for name, value in traced.stores]
    return kernel_source(["table", "values", "blocks", "scalar", "T"], lines)


BRANCHES = (("if begin + B <= count:", ""), ("else:", ", mask=at < count"))
"""Full blocks are loaded without a mask; the last block of a parameter is masked."""


def example_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return small tensors to trace a rule with; the trace does not depend on sizes."""
    return {
        name: torch.ones(() if tensor.ndim == 0 else 3, dtype=torch.bool if tensor.dtype == torch.bool else dtype)
        for name, tensor in tensors.items()
    }


def locate_lines(block: str, tensors: Mapping[str, Tensor], used: Sequence[str]) -> list[str]:
    """Return the lines that find a block: its parameter, its first element, and the addresses of its tensors."""
    lines = [
        f"which = tl.load(blocks + 2 * {block})",
        f"begin = tl.multiple_of(tl.load(blocks + 2 * {block} + 1), B)",
        "count = tl.load(table + which)",
        "at = begin + tl.arange(0, B)",
    ]
    for row, (name, tensor) in enumerate(tensors.items(), start=1):
        if name in used:
            dtype = TRITON_DTYPES[tensor.dtype]
            lines.append(f"p_{name} = tl.load(table + {row} * T + which).to(tl.pointer_type({dtype}))")
            if tensor.ndim:
                lines += ["if ALIGNED:", f"    p_{name} = tl.multiple_of(p_{name}, {ALIGNMENT})"]
    return lines


def elements_per_entry(tensors: Mapping[str, Tensor], name: str) -> int:
    """Return how many elements of a parameter share one entry of a tensor; 1 for most tensors.

    Example:
        >>> elements_per_entry({"theta": torch.ones(6), "high": torch.ones(2)}, "high")
        3
    """
    tensor = tensors[name]
    return max(t.numel() for t in tensors.values()) // tensor.numel() if tensor.ndim and tensor.numel() else 1


def load_lines(
    tensors: Mapping[str, Tensor], used: Sequence[str], traced: TracedRule, dtype: torch.dtype, mask: str
) -> list[str]:
    """Return the lines that load what the rule reads of a block."""
    lines = []
    for name in used:
        if traced.reads(name):
            block = elements_per_entry(tensors, name)
            at = "at" if block == 1 else f"at // {block}"
            place, hidden = (f"p_{name} + {at}", mask) if tensors[name].ndim else (f"p_{name}", "")
            lines.append(load_line(name, place, hidden, None if tensors[name].dtype == torch.bool else dtype))
    return lines
