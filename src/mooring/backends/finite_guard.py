"""A check of gradients on a GPU without a wait: bad ones become 0 at once, and the next step raises.

A host that waits in each step can no longer queue the next one while the GPU works, which costs more than the check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler
from mooring.backends.fused import chosen
from mooring.backends.host_copy import HostCopy
from mooring.backends.kernels.codegen import NOT_FINITE, TRITON_DTYPES, compile_kernel, kernel_source
from mooring.backends.kernels.launch import launch
from mooring.backends.kernels.multi_tensor import Layout, locate_lines
from mooring.backends.kernels.tensor_list import TensorForm, TensorList
from mooring.distributed.dtensor import reduce_over_shards, sharded
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
    """Tensors of one dtype in a list whose form is known.

    Attributes:
        dtype: the dtype.
        indices: their indices in the list.
        layout: their addresses.
        positions: the indices, int64 on the device.
    """

    dtype: torch.dtype
    indices: Sequence[int]
    layout: Layout
    positions: Tensor

    def follow(self, tensors: TensorList) -> None:
        """Set the present addresses."""
        self.layout.update("g", chosen(tensors.tensors, self.indices), chosen(tensors.addresses, self.indices))

    def run(self, source: str, *args: Tensor) -> None:
        """Run a kernel over all blocks of the tensors."""
        layout = self.layout
        table = layout.device_table, layout.blocks
        launch(compile_kernel(source), (len(layout.blocks),), *table, *args, len(layout.sizes), **layout.options)


class FiniteGuard:
    """Checks tensors on a GPU, replaces all of them by 0 if one is not finite, and raises when it is asked."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._known: WeakKeyDictionary[TensorForm, list[_KnownTensors] | None] = WeakKeyDictionary()

    def check(
        self,
        what: str,
        names: Sequence[str],
        tensors: TensorList,
        others: TensorList | None = None,
        whole: Sequence[Tensor] = (),
    ) -> bool:
        """Begin to check some tensors; they are 0 afterwards if a value of one of them is not finite.

        Args:
            what: what the tensors are, for the message.
            names: their names.
            tensors: the tensors, at least one; of sharded ones the parts on this rank.
            others: tensors that are not checked and become 0 with them.
            whole: the tensors that the checked ones are parts of, where some are sharded.

        Returns:
            Whether kernels can do that: if all are on one GPU for which kernels can be made, dense in memory.
            Otherwise nothing was done.
        """
        checked = self._find(tensors)
        further = self._find(others) if others is not None else []
        if checked is None or further is None:
            return False
        bad = torch.zeros(len(names), device=tensors.tensors[0].device)
        for known in checked:
            known.run(_checking_source(known.dtype), known.positions, bad)
        if any(map(sharded, whole)):
            bad = torch.stack(reduce_over_shards(list(bad), whole, "max"))
        flag = bad.amax()
        for known in (*checked, *further):
            known.run(_zeroing_source(known.dtype), flag)
        self._pending.append(_Pending(what, names, HostCopy(bad)))
        return True

    def _find(self, tensors: TensorList) -> list[_KnownTensors] | None:
        """Return the tensors that are not empty by dtype, with their present addresses; None if kernels cannot do them.

        There may be thousands; the work for those of a new form is done once.
        """
        form = tensors.form
        if form not in self._known:
            self._known[form] = _by_dtype(tensors)
        if (groups := self._known[form]) is not None:
            for known in groups:
                known.follow(tensors)
        return groups

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


def _by_dtype(tensors: TensorList) -> list[_KnownTensors] | None:
    """Return the tensors that are not empty by dtype; None unless all are dense in memory on one GPU with kernels."""
    parts, form = tensors.tensors, tensors.form
    if not has_compiler(parts[0].device) or len({*form.devices}) > 1:
        return None
    if not {*form.dtypes} <= TRITON_DTYPES.keys() or not all(map(_is_dense, parts)):
        return None
    groups = []
    for dtype in dict.fromkeys(form.dtypes):
        own = [i for i, size in enumerate(form.sizes) if size and form.dtypes[i] == dtype]
        if own:
            layout = Layout([{"g": parts[index]} for index in own])
            groups.append(_KnownTensors(dtype, own, layout, torch.tensor(own).to(layout.device)))
    return groups


@cache
def _checking_source(dtype: torch.dtype) -> str:
    """Return the source of a kernel that flags the tensors of a table with values that are not finite.

    Programs of one tensor may write its flag at the same time, but all write 1.
    """
    wide = "tl.float64" if dtype == torch.float64 else "tl.float32"
    lines = [
        "pid = tl.program_id(0).to(tl.int64)",
        *locate_lines("pid", {"g": torch.zeros(1, dtype=dtype)}, ["g"]),
        "position = tl.load(positions + which)",
        f"x = tl.load(p_g + at, mask=at < count, other=0).to({wide})",
        f"wrong = {NOT_FINITE.format('x')}",
        "if tl.max(wrong.to(tl.int32), 0) != 0:",
        "    tl.store(bad + position, 1.0)",
    ]
    return kernel_source(["table", "blocks", "positions", "bad", "T"], lines)


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
    return kernel_source(["table", "blocks", "flag", "T"], lines)


def _is_dense(t: Tensor) -> bool:
    """Return whether the elements of a strided tensor fill one block of memory, in any order.

    Example:
        >>> _is_dense(torch.zeros(2, 3).T), _is_dense(torch.zeros(2, 3)[:, :2])
        (True, False)
    """
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.is_contiguous() or t.numel() == 1 + last
