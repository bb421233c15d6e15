"""A check of gradients on a GPU that makes nothing wait: bad ones become 0 at once, and the next step raises.

A host that waits in each step can no longer queue the next one while the GPU works, which costs more than the check.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler
from mooring.backends.host_copy import HostCopy
from mooring.backends.kernels.codegen import TRITON_DTYPES, compile_kernel
from mooring.backends.kernels.launch import launch
from mooring.backends.kernels.multi_tensor import Layout, locate_lines
from mooring.distributed.dtensor import local_tensors, reduce_over_shards, sharded
from mooring.errors import NonFiniteError


@dataclass(frozen=True)
class _Pending:
    """A check whose result is on its way to the host.

    Attributes:
        what: what the tensors are, for the message.
        names: their names.
        bad: 1 for each that has a value that is not finite.
    """

    what: str
    names: Sequence[str]
    bad: HostCopy


@dataclass(frozen=True)
class _KnownTensors:
    """Tensors of one dtype whose sizes are known.

    Attributes:
        layout: their addresses.
        positions: the number of each among the tensors that are checked; -1 for the others. int64 on the device.
    """

    layout: Layout
    positions: Tensor

    def run(self, source: str, *args: Tensor) -> None:
        """Run a kernel over all blocks of the tensors."""
        layout = self.layout
        table = layout.device_table, layout.blocks
        launch(compile_kernel(source), (len(layout.blocks),), *table, *args, len(layout.sizes), **layout.options)


class FiniteGuard:
    """Checks tensors on a GPU, replaces all of them by 0 if one is not finite, and raises when it is asked."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._known: dict[Hashable, _KnownTensors] = {}

    def check(self, what: str, names: Sequence[str], tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
        """Begin to check some tensors; they are 0 afterwards if a value of one of them is not finite.

        Args:
            what: what the tensors are, for the message.
            names: their names.
            tensors: the tensors, at least one.
            others: tensors that are not checked and become 0 with them.

        Returns:
            Whether kernels can do that: if all are on one GPU for which kernels can be made, dense in memory.
            Otherwise nothing was done.
        """
        parts = local_tensors(whole := [*tensors, *others])
        if (groups := self._groups(parts, len(tensors))) is None:
            return False
        bad = torch.zeros(len(tensors), device=parts[0].device)
        for dtype, known in groups:
            known.run(_checking_source(dtype), known.positions, bad)
        if parts is not whole and any(map(sharded, tensors)):
            bad = torch.stack(reduce_over_shards(list(bad), tensors, "max"))
        flag = bad.amax()
        for dtype, known in groups:
            known.run(_zeroing_source(dtype), flag)
        self._pending.append(_Pending(what, names, HostCopy(bad)))
        return True

    def _groups(self, parts: Sequence[Tensor], checked: int) -> list[tuple[torch.dtype, _KnownTensors]] | None:
        """Return the tensors that are not empty by dtype, with their present addresses; None if kernels cannot do them.

        The first tensors are checked; there may be thousands.
        """
        if not _on_one_gpu(parts):
            return None
        dtypes, sizes = [t.dtype for t in parts], tuple(map(Tensor.numel, parts))
        kinds = set(dtypes)
        if not kinds <= TRITON_DTYPES.keys():
            return None
        if len(kinds) == 1 and all(sizes):
            return [(dtypes[0], self._find(parts, sizes, range(len(parts)), checked))]
        groups = []
        for kind in kinds:
            own = tuple(i for i, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)) if dtype == kind and size)
            if own:
                part_sizes = tuple(sizes[index] for index in own)
                groups.append((kind, self._find([parts[index] for index in own], part_sizes, own, checked)))
        return groups

    def _find(
        self, tensors: Sequence[Tensor], sizes: tuple[int, ...], indices: Sequence[int], checked: int
    ) -> _KnownTensors:
        """Return tensors of one dtype with their present addresses; `indices` says which they are of all."""
        key = tensors[0].device, tensors[0].dtype, sizes, indices, checked
        if (known := self._known.get(key)) is None:
            positions = torch.tensor([index if index < checked else -1 for index in indices])
            layout = Layout([{"g": t} for t in tensors])
            known = self._known[key] = _KnownTensors(layout, positions.to(layout.device))
        known.layout.update("g", tensors)
        return known

    def report(self) -> None:
        """Raise if a tensor of the checks so far was not finite. Waits for what these checks waited for."""
        pending, self._pending = self._pending, []
        for check in pending:
            if not any(flags := check.bad.tolist()):
                continue
            names = [name for name, bad in zip(check.names, flags, strict=True) if bad]
            more = f", and of {len(names) - 1} more" if len(names) > 1 else ""
            raise NonFiniteError(
                f"the {check.what} of {names[0]!r}{more} was not finite in the step before, which was taken with "
                "0 instead: lower the learning rate or the strength, clip gradients, or call diagnose(); "
                "check_finite='wait' stops before such a step"
            )


def _on_one_gpu(parts: Sequence[Tensor]) -> bool:
    """Return whether all tensors are dense in memory on one GPU, for which kernels can be made."""
    if not has_compiler(parts[0].device) or len(set(map(Tensor.get_device, parts))) > 1:
        return False
    strided = {t.layout for t in parts} == {torch.strided}
    return strided and (all(map(Tensor.is_contiguous, parts)) or all(map(_is_dense, parts)))


@cache
def _checking_source(dtype: torch.dtype) -> str:
    """Return the source of a kernel that sets a flag for every tensor in a table that has a value that is not finite.

    Programs of one tensor may write its flag at the same time, but all write 1.
    """
    wide = "tl.float64" if dtype == torch.float64 else "tl.float32"
    lines = [
        "pid = tl.program_id(0).to(tl.int64)",
        *locate_lines("pid", {"g": torch.zeros(1, dtype=dtype)}, ["g"]),
        "position = tl.load(positions + which)",
        f"x = tl.load(p_g + at, mask=at < tl.where(position < 0, 0, count), other=0).to({wide})",
        "wrong = (x != x) | (tl.abs(x) == float('inf'))",
        "if tl.max(wrong.to(tl.int32), 0) != 0:",
        "    tl.store(bad + position, 1.0)",
    ]
    head = "def rule(table, blocks, positions, bad, T, B: tl.constexpr, ALIGNED: tl.constexpr):"
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"


@cache
def _zeroing_source(dtype: torch.dtype) -> str:
    """Return the source of a kernel that fills every tensor in a table with 0 where `flag` is not 0."""
    example = {"g": torch.zeros(1, dtype=dtype)}
    lines = [
        "if tl.load(flag) == 0:",
        "    return",
        "pid = tl.program_id(0).to(tl.int64)",
        *locate_lines("pid", example, ["g"]),
        f"tl.store(p_g + at, tl.zeros((B,), {TRITON_DTYPES[dtype]}), mask=at < count)",
    ]
    head = "def rule(table, blocks, flag, T, B: tl.constexpr, ALIGNED: tl.constexpr):"
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"


def _is_dense(t: Tensor) -> bool:
    """Return whether the elements of a strided tensor fill one block of memory, in any order.

    Example:
        >>> _is_dense(torch.zeros(2, 3).T), _is_dense(torch.zeros(2, 3)[:, :2])
        (True, False)
    """
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.is_contiguous() or t.numel() == 1 + last
