"""Elementwise rules over all runs of a fleet as generated GPU kernels, one program for each block of each run.

The rules are those of `mooring.backends`; nothing is written again here. `RunKernel` changes tensors in place, and
`RunReduceKernel` sums what a rule computes, for each run.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from mooring.backends.budget_terms import pull_rule, spent_rule
from mooring.backends.kernels.codegen import NOT_FINITE, Rule, compile_kernel, kernel_source, load_line, trace_rule
from mooring.backends.kernels.launch import in_dry_run, launch
from mooring.rules import Budget

NEVER = 1 << 62
"""The first bad step of a run that has none."""

BLOCK = 1024
"""Elements of one program."""

Tensors = Mapping[str, Tensor]

_SOURCES: dict[tuple[object, ...], str] = {}
"""Generated sources, by the key of their rule and the kinds of its tensors."""


class RunKernel:
    """A rule that changes some of its tensors in place, as one kernel over all elements of all runs.

    A rule with an operation that has no translation runs eagerly.

    Args:
        rule: elementwise over tensors by name of shape (runs, elements), with numbers of shape (runs,) or ().
        example: tensors of those names, of any size; each is (runs, elements), (runs, 1), (runs,) or ().
        finite: names of tensors that must be finite.
        key: rules with equal keys do the same to tensors of the same kinds, and share a source; None for no sharing.
        skip_if_zero: the name of a number of shape (runs,); runs where it is 0 are skipped.
    """

    def __init__(
        self, rule: Rule, example: Tensors, finite: Sequence[str] = (), key: Hashable = None, skip_if_zero: str = ""
    ) -> None:
        self.names, self.rule, self.finite, self.skip_if_zero = list(example), rule, list(finite), skip_if_zero
        source = self._source(example, key)
        small = [f"p_{name}" for name, t in example.items() if _kind(t) != "element"]
        self.kernel = (
            compile_kernel(source, ("first_bad", "now", *small) if finite else tuple(small)) if source else None
        )

    def _source(self, example: Tensors, key: Hashable) -> str:
        """Return the source, from the cache if possible; empty if the rule cannot be translated."""
        kinds = tuple((name, t.dtype, _kind(t)) for name, t in example.items())
        known = (key, kinds, self.skip_if_zero, *self.finite)
        if known not in _SOURCES or key is None:
            try:
                source = run_kernel_source(self.rule, example, self.finite, self.skip_if_zero)
            except NotImplementedError:
                source = ""
            if key is None:
                return source
            _SOURCES[known] = source
        return _SOURCES[known]

    def __call__(self, tensors: Tensors, first_bad: Tensor | None = None, now: Tensor | None = None) -> None:
        """Apply the rule.

        Args:
            tensors: by the names of the example; those of shape (runs, elements) contiguous.
            first_bad: int64 of shape (runs,), for `finite`: lowered to `now` where something is not finite.
            now: the step, int64 of shape (1,).
        """
        if self.kernel is None:
            self._run_eagerly(tensors, first_bad, now)
            return
        ordered = [tensors[name] for name in self.names]
        runs, count = _shape(tensors)
        args = (first_bad, now) if self.finite else ()
        launch(self.kernel, (-(-count // BLOCK), runs), *args, count, *ordered, B=BLOCK)

    def _run_eagerly(self, tensors: Tensors, first_bad: Tensor | None, now: Tensor | None) -> None:
        if in_dry_run():
            return
        for name in self.finite:
            assert first_bad is not None
            assert now is not None
            bad = ~tensors[name].isfinite().flatten(1).all(1)
            torch.minimum(first_bad, torch.where(bad, now, first_bad), out=first_bad)
        self.rule(dict(tensors))


class RunReduceKernel:
    """Partial sums, for each run, of what a rule computes for each element.

    Args:
        rule: reads its tensors and writes into tensors called by `sums`.
        example: as in `RunKernel`, without the sums.
        sums: the names of the sums.
    """

    def __init__(self, rule: Rule, example: Tensors, sums: Sequence[str]) -> None:
        self.names = list(example)
        small = [f"p_{name}" for name, tensor in example.items() if _kind(tensor) != "element"]
        self.kernel = compile_kernel(run_reduce_source(rule, example, sums), ("done", *small))

    def __call__(self, tensors: Tensors, done: Tensor, out: Tensor, first: int) -> None:
        """Write the partial sums of each block.

        Args:
            tensors: by the names of the example.
            done: of shape (runs,); nothing is written for runs where it is not 0.
            out: of shape (runs, blocks, sums).
            first: the place of the first block in `out`.
        """
        ordered = [tensors[name] for name in self.names]
        runs, count = _shape(tensors)
        launch(self.kernel, (_blocks(tensors), runs), done, out, count, out.shape[1], first, *ordered, B=BLOCK)


def run_kernel_source(rule: Rule, example: Tensors, finite: Sequence[str] = (), skip_if_zero: str = "") -> str:
    """Return the source of `RunKernel`.

    Example:
        >>> def halve(tensors):
        ...     tensors["theta"].mul_(0.5)
        >>> print(run_kernel_source(halve, {"theta": torch.ones(2, 3)}).splitlines()[-2].strip())
        v1 = x_theta * 0.5
    """
    samples = _samples(example)
    traced = trace_rule(rule, samples)
    lines = _load_lines(example, samples, [name for name in samples if traced.reads(name) or name in finite])
    if skip_if_zero:
        lines = [f"if tl.load(p_{skip_if_zero} + run) == 0:", "    return", *lines]
    lines += traced.lines
    lines += [f"tl.store({_place(name, samples)}, {value}{_mask(name, samples)})" for name, value in traced.stores]
    lines += [f"tl.atomic_min(first_bad + run, tl.load(now), mask={_not_finite(name, samples)})" for name in finite]
    arguments = [*(("first_bad", "now") if finite else ()), "count", *(f"p_{name}" for name in samples)]
    return _kernel_source(arguments, lines)


def run_reduce_source(rule: Rule, example: Tensors, sums: Sequence[str]) -> str:
    """Return the source of `RunReduceKernel`.

    Example:
        >>> def square(tensors):
        ...     tensors["total"].copy_(tensors["theta"] * tensors["theta"])
        >>> print(run_reduce_source(square, {"theta": torch.ones(2, 3)}, ["total"]).splitlines()[-1].strip())
        tl.store(out + place + 0, tl.sum(tl.where(there, v1, 0.0), 0))
    """
    samples = _samples(example)
    traced = trace_rule(rule, {**samples, **{name: torch.ones(2, 3, dtype=_dtype(example)) for name in sums}})
    values = dict(traced.stores)
    lines = ["if tl.load(done + run) != 0:", "    return"]
    lines += _load_lines(example, samples, [name for name in samples if traced.reads(name)])
    lines += traced.lines
    lines.append(f"place = (run.to(tl.int64) * blocks + first + tl.program_id(0)) * {len(sums)}")
    for number, name in enumerate(sums):
        lines.append(f"tl.store(out + place + {number}, tl.sum(tl.where(there, {values[name]}, 0.0), 0))")
    return _kernel_source(["done", "out", "count", "blocks", "first", *(f"p_{name}" for name in samples)], lines)


def total_spent(terms: Sequence[Tensors], mu: Tensor, done: Tensor) -> Tensor:
    """Return `mooring.rules.budget.spent_at` over all parameters of each run, (2, runs); anything where done.

    Args:
        terms: the tensors of each parameter that `spent_rule` reads, flat.
        mu: float64 of shape (runs,).
        done: bool of shape (runs,).
    """
    out = torch.zeros(len(mu), sum(map(_blocks, terms)), 2, dtype=_dtype(terms[0]), device=mu.device)
    first = 0
    for tensors in terms:
        kernel = _spent_kernel(tuple((name, t.dtype, _kind(t)) for name, t in tensors.items()))
        kernel({**tensors, "mu": mu}, done, out, first)
        first += _blocks(tensors)
    return out.sum(1, dtype=torch.float64).T


def apply_budget_pull(tensors: Tensors, mu: Tensor) -> None:
    """theta <- anchor + d / (1 + mu * F) in place; nothing for runs within their budget.

    Args:
        tensors: theta, anchor and previous of one parameter, flat.
        mu: float64 of shape (runs,).
    """
    _pull_kernel(tuple((name, t.dtype, _kind(t)) for name, t in tensors.items()))({**tensors, "mu": mu})


KIND_SHAPES = {"element": (2, 3), "column": (2, 1), "run": (2,), "number": ()}
"""The shapes of example tensors, by kind."""

TensorKinds = tuple[tuple[str, torch.dtype, str], ...]


@cache
def _spent_kernel(kinds: TensorKinds) -> RunReduceKernel:
    return RunReduceKernel(spent_rule, _budget_example(kinds), ["spent", "slope"])


@cache
def _pull_kernel(kinds: TensorKinds) -> RunKernel:
    return RunKernel(pull_rule(Budget(0.0)), _budget_example(kinds), skip_if_zero="mu")


def _budget_example(kinds: TensorKinds) -> dict[str, Tensor]:
    example = {name: torch.ones(KIND_SHAPES[kind], dtype=dtype) for name, dtype, kind in kinds}
    return {**example, "mu": torch.ones(2, dtype=torch.float64)}


def _shape(tensors: Tensors) -> tuple[int, int]:
    """Return the number of runs, and of elements of each run."""
    runs, count = max((t.shape for t in tensors.values() if t.ndim == 2), key=lambda shape: shape[1])
    return runs, count


def _blocks(tensors: Tensors) -> int:
    """Return the number of blocks of a run's elements."""
    return -(-_shape(tensors)[1] // BLOCK)


def _dtype(tensors: Tensors) -> torch.dtype:
    """Return the dtype of the elements."""
    return next(t.dtype for t in tensors.values() if t.ndim == 2 and t.is_floating_point())


def _kind(tensor: Tensor) -> str:
    """Return what a tensor has one entry for."""
    if tensor.ndim == 2:
        return "column" if tensor.shape[1] == 1 else "element"
    return "run" if tensor.ndim else "number"


def _samples(example: Tensors) -> dict[str, Tensor]:
    """Return small tensors to trace a rule with; numbers per run are computed with in the dtype of the elements."""
    dtype, samples = _dtype(example), {}
    for name, tensor in example.items():
        cast = _kind(tensor) == "run" and tensor.is_floating_point()
        samples[name] = torch.ones(KIND_SHAPES[_kind(tensor)], dtype=dtype if cast else tensor.dtype)
    return samples


def _place(name: str, samples: Tensors) -> str:
    return f"p_{name} + {'row' if _kind(samples[name]) == 'element' else 'run' if samples[name].ndim else '0'}"


def _mask(name: str, samples: Tensors) -> str:
    return ", mask=there" if _kind(samples[name]) == "element" else ""


def _load_lines(example: Tensors, samples: Tensors, names: Sequence[str]) -> list[str]:
    dtypes = {name: t.dtype if t.dtype != example[name].dtype else None for name, t in samples.items()}
    return [load_line(name, _place(name, samples), _mask(name, samples), dtypes[name]) for name in names]


def _not_finite(name: str, samples: Tensors) -> str:
    """Return the expression of whether any value of a block is not finite."""
    expression = f"({NOT_FINITE.format(f'x_{name}')})"
    return f"tl.max({expression}.to(tl.int32), 0) > 0" if _kind(samples[name]) == "element" else expression


def _kernel_source(arguments: Sequence[str], lines: Sequence[str]) -> str:
    body = [
        "run = tl.program_id(1)",
        "at = tl.program_id(0) * B + tl.arange(0, B)",
        "there = at < count",
        "row = run.to(tl.int64) * count + at",
        *lines,
    ]
    return kernel_source(arguments, body, ["B"])
