"""A scalar equation over all parameters, solved on the GPU: sums of an elementwise rule, and solver steps.

The host never waits for the device. Every sum and every step is launched, and those after the solution do nothing.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mooring.backends.kernels.codegen import TRITON_DTYPES, Rule, compile_kernel, kernel_source, trace_rule
from mooring.backends.kernels.launch import launch
from mooring.backends.kernels.multi_tensor import BRANCHES, Layout, example_tensors, load_lines, locate_lines

MAX_PROGRAMS = 1024
"""Programs share all blocks in turn, so that a launch with nothing to do costs little."""


class ReduceKernel:
    """Sums of what a rule computes for each element of many parameters, given a number on the device.

    Args:
        rule: reads the tensors of one parameter and the scalar, and writes into tensors called by `names`.
        tensors: the tensors of one of the parameters, as in `MultiTensorKernel`.
        names: the tensors to sum.
        scalar: the name of the number.
        dtype: the dtype to compute in.
    """

    def __init__(
        self, rule: Rule, tensors: Mapping[str, Tensor], names: Sequence[str], scalar: str, dtype: torch.dtype
    ) -> None:
        self.names = list(names)
        self.kernel = compile_kernel(reduce_source(rule, tensors, names, scalar, dtype))

    def __call__(self, layout: Layout, table: Tensor, scalar: Tensor, done: Tensor, out: Tensor) -> None:
        """Write partial sums.

        Args:
            layout: the addresses of the tensors.
            table: the same on the device.
            scalar: the number, float64 and 0-d.
            done: 0-d; nothing is summed where it is not 0.
            out: float64 of shape (names, programs), perhaps some columns of a larger tensor.
        """
        args = table, layout.blocks, scalar, done, out, len(layout.sizes), len(layout.blocks), out.stride(0)
        launch(self.kernel, (out.shape[1],), *args, **layout.options)

    @staticmethod
    def programs(layout: Layout) -> int:
        """Return the number of partial sums for each name."""
        return min(MAX_PROGRAMS, len(layout.blocks))


class SolverStepKernel:
    """One step of a solver, which reads sums and changes numbers on the device in place.

    Args:
        rule: reads the sums and the numbers by name, all 0-d float64, and changes some of the numbers.
        sums: the names of the sums.
        numbers: the names of the numbers.
    """

    def __init__(self, rule: Rule, sums: Sequence[str], numbers: Sequence[str]) -> None:
        self.numbers = list(numbers)
        self.kernel = compile_kernel(solver_step_source(rule, sums, numbers))

    def __call__(self, partial: Tensor, numbers: Mapping[str, Tensor]) -> None:
        """Take the step, from the partial sums of `ReduceKernel` and the numbers by name, each 0-d on the device."""
        programs, args = partial.shape[1], [numbers[name] for name in self.numbers]
        launch(self.kernel, (1,), partial, programs, *args, B=max(16, 1 << (programs - 1).bit_length()), num_warps=4)


def reduce_source(
    rule: Rule, tensors: Mapping[str, Tensor], names: Sequence[str], scalar: str, dtype: torch.dtype
) -> str:
    """Return the source of `ReduceKernel`.

    Example:
        >>> def squares(tensors):
        ...     tensors["square"].copy_(tensors["theta"] * tensors["theta"] * tensors["times"])
        >>> print(reduce_source(squares, {"theta": torch.ones(5)}, ["square"], "times", torch.float32).splitlines()[0])
        def rule(table, blocks, scalar, done, out, T, N, S, B: tl.constexpr, ALIGNED: tl.constexpr):
    """
    summed = {name: torch.ones(3, dtype=dtype) for name in names}
    traced = trace_rule(rule, example_tensors(tensors, dtype) | {scalar: torch.ones((), dtype=dtype)} | summed)
    used = [name for name in tensors if traced.reads(name)]
    values = dict(traced.stores)
    lines = [
        "pid = tl.program_id(0)",
        "many = tl.num_programs(0)",
        "if tl.load(done) != 0:",
        "    return",
        f"x_{scalar} = tl.load(scalar).to({TRITON_DTYPES[dtype]})",
        *(f"s_{name} = tl.zeros((B,), {TRITON_DTYPES[dtype]})" for name in names),
        "for block in range(pid, N, many):",
    ]
    inside = locate_lines("block", tensors, used)
    for condition, mask in BRANCHES:
        inside.append(condition)
        inside += [f"    {line}" for line in [*load_lines(tensors, used, traced, dtype, mask), *traced.lines]]
        for name in names:
            value = f"tl.where(at < count, {values[name]}, 0.0)" if mask else values[name]
            inside.append(f"    s_{name} += {value}")
    lines += [f"    {line}" for line in inside]
    lines += [f"tl.store(out + {i} * S + pid, tl.sum(s_{name}.to(tl.float64), 0))" for i, name in enumerate(names)]
    return kernel_source(["table", "blocks", "scalar", "done", "out", "T", "N", "S"], lines)


def solver_step_source(rule: Rule, sums: Sequence[str], numbers: Sequence[str]) -> str:
    """Return the source of `SolverStepKernel`.

    Example:
        >>> def halve(tensors):
        ...     tensors["mu"].copy_(tensors["total"] / 2)
        >>> print(solver_step_source(halve, ["total"], ["mu"]).splitlines()[-1].strip())
        tl.store(p_mu, v1)
    """
    dtype = torch.float64
    traced = trace_rule(rule, {name: torch.ones((), dtype=dtype) for name in (*sums, *numbers)})
    lines = ["at = tl.arange(0, B)"]
    for row, name in enumerate(sums):
        lines.append(f"x_{name} = tl.sum(tl.load(partial + {row} * many + at, mask=at < many, other=0.0), 0)")
    lines += [f"x_{name} = tl.load(p_{name}).to(tl.float64)" for name in numbers if traced.reads(name)]
    lines += traced.lines
    lines += [f"tl.store(p_{name}, {value})" for name, value in traced.stores]
    return kernel_source(["partial", "many", *(f"p_{name}" for name in numbers)], lines, ["B"])
