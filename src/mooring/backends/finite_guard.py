"""A check of gradients on a GPU that makes nothing wait: bad ones become 0 at once, and the next step raises.

A host that waits in each step can no longer queue the next one while the GPU works, which costs more than the check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler
from mooring.backends.kernels.codegen import TRITON_DTYPES, compile_kernel
from mooring.backends.kernels.launch import launch
from mooring.backends.kernels.multi_tensor import Layout, locate_lines
from mooring.diagnose.finite import largest_values
from mooring.distributed.dtensor import local_tensor, reduce_over_shards, sharded
from mooring.errors import NonFiniteError


@dataclass(frozen=True)
class _Pending:
    """A check whose result is on its way to the host.

    Attributes:
        what: what the tensors are, for the message.
        names: their names.
        bad: 1 for each that has a value that is not finite, in host memory once `copied` has happened.
        copied: the event after the copy.
    """

    what: str
    names: list[str]
    bad: Tensor
    copied: torch.cuda.Event


class FiniteGuard:
    """Checks tensors on a GPU, replaces all of them by 0 if one is not finite, and raises when it is asked."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._layouts: dict[tuple[torch.dtype, tuple[int, ...]], Layout] = {}

    @staticmethod
    def can_check(tensors: Sequence[Tensor]) -> bool:
        """Return whether all tensors are on one GPU for which kernels can be made, dense in memory."""
        parts = [local_tensor(t) for t in tensors]
        if not parts or not has_compiler(parts[0].device):
            return False
        kinds = {(t.device, t.dtype) for t in parts}
        known = all(device == parts[0].device and dtype in TRITON_DTYPES for device, dtype in kinds)
        return known and all(map(_is_dense, parts))

    def check(self, what: str, named: Sequence[tuple[str, Tensor]], others: Sequence[Tensor] = ()) -> None:
        """Begin to check some tensors; they are 0 afterwards if a value of one of them is not finite.

        Args:
            what: what the tensors are, for the message.
            named: pairs of name and tensor, for which `can_check` is true.
            others: tensors that are not checked and become 0 with them.
        """
        tensors = [t for _, t in named]
        parts = [local_tensor(t) for t in tensors]
        bad = (~largest_values(parts).isfinite()).float()
        if any(map(sharded, tensors)):
            bad = torch.stack(reduce_over_shards(list(bad), tensors, "max"))
        self._zero_where(bad.amax(), [*parts, *map(local_tensor, others)])
        host = torch.empty_like(bad, device="cpu", pin_memory=True).copy_(bad, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(bad.device))
        self._pending.append(_Pending(what, [name for name, _ in named], host, copied))

    def _zero_where(self, flag: Tensor, tensors: Sequence[Tensor]) -> None:
        """Fill tensors with 0 if a 0-d tensor on their device is not 0."""
        groups: dict[torch.dtype, list[Tensor]] = {}
        for t in tensors:
            if t.numel():
                groups.setdefault(t.dtype, []).append(t)
        for dtype, group in groups.items():
            key = dtype, tuple(t.numel() for t in group)
            if key not in self._layouts:
                self._layouts[key] = Layout([{"g": t} for t in group])
            layout = self._layouts[key]
            layout.update("g", group)
            args = layout.device_table, layout.blocks, flag, len(layout.sizes)
            launch(compile_kernel(_zeroing_source(dtype)), (len(layout.blocks),), *args, **layout.options)

    def report(self) -> None:
        """Raise if a tensor of the checks so far was not finite. Waits for what these checks waited for."""
        pending, self._pending = self._pending, []
        for check in pending:
            check.copied.synchronize()
            names = [name for name, bad in zip(check.names, check.bad.tolist(), strict=True) if bad]
            if names:
                more = f", and of {len(names) - 1} more" if len(names) > 1 else ""
                raise NonFiniteError(
                    f"the {check.what} of {names[0]!r}{more} was not finite in the step before, which was taken with "
                    "0 instead: lower the learning rate or the strength, clip gradients, or call diagnose(); "
                    "check_finite='wait' stops before such a step"
                )


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
    """Return whether the elements of a tensor fill one block of memory, in any order.

    Example:
        >>> _is_dense(torch.zeros(2, 3).T), _is_dense(torch.zeros(2, 3)[:, :2])
        (True, False)
    """
    if t.layout != torch.strided:
        return False
    if t.is_contiguous():
        return True
    return t.numel() == 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
