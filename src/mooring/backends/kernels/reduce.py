"""A scalar equation over all parameters, solved on the GPU: sums of an elementwise rule, and steps towards the answer.

Nothing waits for the device. Every sum and every step is launched, and those after the answer do nothing.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mooring.backends.kernels.codegen import DTYPES, compiled, trace_rule
from mooring.backends.kernels.launch import launch
from mooring.backends.kernels.multi_tensor import BLOCK, BRANCHES, WARPS, Layout, loaded, located, small

__all__ = ["Step", "Sums"]

PROGRAMS = 1024
"""So many take all blocks in turn: a launch that has nothing to do costs little."""

Rule = Callable[[dict[str, Tensor]], None]


class Sums:
    """Sums of what a rule computes for each element of many parameters, given a number on the device.

    Args:
        rule: takes the tensors of one parameter and `dial`, and writes into tensors called by `names`.
        tensors: of one of the parameters, as in `MultiTensorKernel`.
        names: what is summed.
        dial: the name of the number.
        wide: the dtype to compute in.
    """

    def __init__(
        self, rule: Rule, tensors: Mapping[str, Tensor], names: Sequence[str], dial: str, wide: torch.dtype
    ) -> None:
        self.names = list(names)
        self.kernel = compiled(summing(rule, tensors, names, dial, wide))

    def __call__(self, layout: Layout, table: Tensor, dial: Tensor, done: Tensor, out: Tensor) -> None:
        """Write partial sums.

        Args:
            layout: where the tensors are.
            table: the same on the device.
            dial: a number, float64 and 0-d.
            done: where it is not 0 nothing is summed; bool and 0-d.
            out: float64 of shape (names, programs), perhaps some columns of more.
        """
        told = table, layout.blocks, dial, done, out, len(layout.sizes), len(layout.blocks), out.stride(0)
        launch(self.kernel, (out.shape[1],), *told, B=BLOCK, ALIGNED=layout.aligned, num_warps=WARPS)

    @staticmethod
    def programs(layout: Layout) -> int:
        """How many partial sums there are of each."""
        return min(PROGRAMS, len(layout.blocks))


class Step:
    """A step of a solver: reads sums, and changes numbers on the device in place.

    Args:
        rule: takes the sums and the numbers by name, all 0-d float64, and changes some of the numbers.
        sums: names of the sums.
        numbers: names of the numbers.
    """

    def __init__(self, rule: Rule, sums: Sequence[str], numbers: Sequence[str]) -> None:
        self.numbers = list(numbers)
        self.kernel = compiled(stepping(rule, sums, numbers))

    def __call__(self, partial: Tensor, numbers: Mapping[str, Tensor]) -> None:
        """Take it.

        Args:
            partial: what `Sums` wrote.
            numbers: by name, each 0-d on the device.
        """
        programs = partial.shape[1]
        told = [numbers[name] for name in self.numbers]
        launch(self.kernel, (1,), partial, programs, *told, B=max(16, 1 << (programs - 1).bit_length()), num_warps=4)


def summing(rule: Rule, tensors: Mapping[str, Tensor], names: Sequence[str], dial: str, wide: torch.dtype) -> str:
    """The kernel of `Sums`.

    Example:
        >>> def squares(told):
        ...     told["square"].copy_(told["theta"] * told["theta"] * told["times"])
        >>> print(summing(squares, {"theta": torch.ones(5)}, ["square"], "times", torch.float32).splitlines()[0])
        def rule(table, blocks, dial, done, out, T, N, S, B: tl.constexpr, ALIGNED: tl.constexpr):
    """
    made = {name: torch.ones(3, dtype=wide) for name in names}
    found = trace_rule(rule, small(tensors, wide) | {dial: torch.ones((), dtype=wide)} | made)
    used = [name for name in tensors if found.reads(name)]
    values = dict(found.stores)
    lines = [
        "pid = tl.program_id(0)",
        "many = tl.num_programs(0)",
        "if tl.load(done) != 0:",
        "    return",
        f"x_{dial} = tl.load(dial).to({DTYPES[wide]})",
        *(f"s_{name} = tl.zeros((B,), {DTYPES[wide]})" for name in names),
        "for block in range(pid, N, many):",
    ]
    inside = located("block", tensors, used)
    for condition, mask in BRANCHES:
        inside.append(condition)
        inside += [f"    {line}" for line in [*loaded(tensors, used, found, wide, mask), *found.lines]]
        for name in names:
            value = f"tl.where(at < count, {values[name]}, 0.0)" if mask else values[name]
            inside.append(f"    s_{name} += {value}")
    lines += [f"    {line}" for line in inside]
    for row, name in enumerate(names):
        lines.append(f"tl.store(out + {row} * S + pid, tl.sum(s_{name}.to(tl.float64), 0))")
    head = "def rule(table, blocks, dial, done, out, T, N, S, B: tl.constexpr, ALIGNED: tl.constexpr):"
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"


def stepping(rule: Rule, sums: Sequence[str], numbers: Sequence[str]) -> str:
    """The kernel of `Step`.

    Example:
        >>> def halve(told):
        ...     told["mu"].copy_(told["total"] / 2)
        >>> print(stepping(halve, ["total"], ["mu"]).splitlines()[-1].strip())
        tl.store(p_mu, v1)
    """
    wide = torch.float64
    found = trace_rule(rule, {name: torch.ones((), dtype=wide) for name in (*sums, *numbers)})
    lines = ["at = tl.arange(0, B)"]
    for row, name in enumerate(sums):
        lines.append(f"x_{name} = tl.sum(tl.load(partial + {row} * many + at, mask=at < many, other=0.0), 0)")
    lines += [f"x_{name} = tl.load(p_{name}).to(tl.float64)" for name in numbers if found.reads(name)]
    lines += found.lines
    lines += [f"tl.store(p_{name}, {value})" for name, value in found.stores]
    head = f"def rule(partial, many, {', '.join(f'p_{name}' for name in numbers)}, B: tl.constexpr):"
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"
