"""An elementwise rule over runs as one GPU kernel: traced once, written out in Triton.

The rule itself is ordinary PyTorch and stands where it stands; nothing is said twice. A compiler for everything takes
seconds for what this does in a tenth of one, and a study has many rules.
"""

import hashlib
import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mooring.lab.fleet.launching import launch

try:
    import triton
    from triton import language as tl
    from triton.language.extra import libdevice
except ImportError:  # no GPU compiler here
    triton = None

__all__ = ["NEVER", "Elementwise", "written"]

NEVER = 1 << 62
"""What stands where a run was never seen to be lost."""

BLOCK = 1024

UNARY = {
    "abs": "tl.abs({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "1.0 / tl.sqrt({})",
    "reciprocal": "1.0 / {}",
    "neg": "-{}",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "isnan": "{0} != {0}",
    "isinf": "tl.abs({}) == float('inf')",
    "logical_not": "{} == 0",
    "relu": "tl.maximum({}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
}
BINARY = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "logical_and": "{} & {}",
    "logical_or": "{} | {}",
    "bitwise_and": "{} & {}",
    "bitwise_or": "{} | {}",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
}
SAME = (
    "alias",
    "clone",
    "detach",
    "expand",
    "lift_fresh_copy",
    "reshape",
    "scalar_tensor",
    "squeeze",
    "unsqueeze",
    "view",
)


class Elementwise:
    """A rule that changes some of its tensors in place, as one kernel over all elements of all runs.

    Args:
        rule: takes the tensors by name; elementwise over (runs, elements), with numbers of shape (runs,) or ().
        example: tensors of those names, of any size; each is (runs, elements), (runs, 1), (runs,) or ().
        finite: names of tensors that must be finite.

    Raises:
        NotImplementedError: where the rule does something that is not known how to be written.
    """

    def __init__(
        self, rule: Callable[[dict[str, Tensor]], None], example: Mapping[str, Tensor], finite: Sequence[str]
    ) -> None:
        self.names = list(example)
        self.kernel = _compiled(written(rule, example, finite))

    def __call__(self, tensors: Mapping[str, Tensor], bad: Tensor, now: Tensor) -> None:
        """Apply the rule.

        Args:
            tensors: by the names of the example; those of shape (runs, elements) contiguous.
            bad: int64 of shape (runs,); the step is written where something is not finite, if it is the first.
            now: the step, int64 of shape (1,).
        """
        ordered = [tensors[name] for name in self.names]
        runs, count = next(t.shape for t in ordered if t.ndim == 2)
        launch(self.kernel, (triton.cdiv(count, BLOCK), runs), bad, now, count, *ordered, B=BLOCK)


def written(
    rule: Callable[[dict[str, Tensor]], None], example: Mapping[str, Tensor], finite: Sequence[str] = ()
) -> str:
    """The source of a Triton kernel that does what the rule does.

    Example:
        >>> def halve(tensors):
        ...     tensors["theta"].mul_(0.5)
        >>> print(written(halve, {"theta": torch.ones(2, 3)}).splitlines()[-2].strip())
        v1 = x_theta * 0.5
    """
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(example)

    def flat(*tensors: Tensor) -> None:
        rule(dict(zip(names, tensors, strict=True)))

    pure = torch.func.functionalize(flat, remove="mutations")
    small = [_sample(tensor) for tensor in example.values()]
    graph = make_fx(pure, decomposition_table=dict(core_aten_decompositions()))(*small).graph
    writer = _Writer(names, [tuple(tensor.shape) for tensor in small], any(t.dtype == torch.float64 for t in small))
    for node in graph.nodes:
        writer.add(node)
    return writer.source(finite)


def _sample(tensor: Tensor) -> Tensor:
    """Two runs of three elements, of the same kind: what is traced does not depend on sizes."""
    kinds = {0: (), 1: (2,), 2: (2, 1) if tensor.shape[-1:] == (1,) else (2, 3)}
    return torch.ones(kinds[tensor.ndim], dtype=tensor.dtype)


class _Writer:
    """Lines of a kernel, one for each operation."""

    def __init__(self, names: list[str], shapes: list[tuple[int, ...]], double: bool) -> None:
        self.waiting, self.double = list(names), double
        self.names, self.shapes = names, dict(zip(names, shapes, strict=True))
        self.values: dict[Any, str] = {}
        self.lines: list[str] = []
        self.stores: list[str] = []

    def add(self, node: Any) -> None:
        """One node of the traced graph."""
        if node.op == "placeholder":
            self.values[node] = f"x_{self.waiting.pop(0)}"
        elif node.op == "call_function":
            self._call(node)
        elif node.op != "output":
            raise NotImplementedError(f"a rule that reads {node.target}, which is not among its tensors")

    def _call(self, node: Any) -> None:
        name = node.target.name().split("::")[1].split(".")[0]
        told = [self._value(argument) for argument in node.args]
        if name in SAME:
            self.values[node] = told[0]
        elif name == "copy_":
            whole = self.values[node.args[0]].removeprefix("x_")
            self.stores.append(f"tl.store({self._place(whole)}, {told[1]}{self._masked(whole)})")
        elif name in ("copy", "full"):
            self.values[node] = told[1]
        else:
            self.values[node] = f"v{len(self.lines) + 1}"
            self.lines.append(f"{self.values[node]} = {self._expression(name, told, node)}")

    def _expression(self, name: str, told: list[str], node: Any) -> str:
        if name in UNARY:
            return UNARY[name].format(told[0])
        if name in BINARY and node.kwargs.get("rounding_mode") is None:
            alpha = node.kwargs.get("alpha", 1)
            return BINARY[name].format(told[0], told[1] if alpha == 1 else f"{self._value(alpha)} * {told[1]}")
        if name == "where":
            return f"tl.where({', '.join(told)})"
        if name in ("clamp", "clamp_min", "clamp_max"):
            return self._clamped(name, told, node)
        if name == "pow" and isinstance(node.args[1], int | float):
            return _power(told[0], node.args[1])
        raise NotImplementedError(f"a rule with {name}")

    def _clamped(self, name: str, told: list[str], node: Any) -> str:
        low, high = ([*told[1:], None, None])[:2] if name == "clamp" else (None, None)
        low = self._value(node.kwargs["min"]) if "min" in node.kwargs else low
        high = self._value(node.kwargs["max"]) if "max" in node.kwargs else high
        low, high = (told[1], high) if name == "clamp_min" else (low, told[1] if name == "clamp_max" else high)
        found = told[0]
        for bound, which in ((low, "maximum"), (high, "minimum")):
            if bound not in (None, "None"):
                found = f"tl.{which}({found}, {bound}, propagate_nan=tl.PropagateNan.ALL)"
        return found

    def _value(self, argument: Any) -> str:
        """A name, or a number written out; infinite ones as they are read back."""
        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, float) and (argument != argument or abs(argument) == float("inf")):
            return f"float('{argument}')"
        if isinstance(argument, float) and self.double:  # a bare number would be read as float32
            return f"tl.full((), {argument!r}, tl.float64)"
        return repr(argument)

    def _place(self, name: str) -> str:
        """Where an element of this tensor lies: of the whole row, of the run, or the one there is."""
        shape = self.shapes[name]
        return f"p_{name} + row" if shape == (2, 3) else f"p_{name} + run" if shape else f"p_{name}"

    def _masked(self, name: str) -> str:
        return ", mask=there" if self.shapes[name] == (2, 3) else ""

    def _lost(self, name: str) -> str:
        """Whether anything in it is not finite."""
        lost = f"((x_{name} != x_{name}) | (tl.abs(x_{name}) == float('inf')))"
        return f"tl.max({lost}.to(tl.int32), 0) > 0" if self._masked(name) else lost

    def source(self, finite: Sequence[str]) -> str:
        """The whole kernel."""
        used = " ".join([*self.lines, *self.stores, *(f"x_{name}" for name in finite)])
        loads = []
        for name in self.names:
            if f"x_{name}" in used:
                other = ", other=0" if self._masked(name) else ""
                loads.append(f"x_{name} = tl.load({self._place(name)}{self._masked(name)}{other})")
        checks = [f"tl.atomic_min(bad + run, tl.load(now), mask={self._lost(name)})" for name in finite]
        body = [
            "run = tl.program_id(1)",
            "at = tl.program_id(0) * B + tl.arange(0, B)",
            "there = at < count",
            "row = run.to(tl.int64) * count + at",
            *loads,
            *self.lines,
            *self.stores,
            *checks,
        ]
        head = f"def rule(bad, now, count, {', '.join(f'p_{name}' for name in self.names)}, B: tl.constexpr):"
        return "\n".join([head, *(f"    {line}" for line in body)]) + "\n"


def _power(base: str, exponent: float) -> str:
    known = {2: f"{base} * {base}", 0.5: f"tl.sqrt({base})", -0.5: f"1.0 / tl.sqrt({base})", -1: f"1.0 / {base}"}
    return known.get(exponent, f"libdevice.pow({base}, tl.full({base}.shape, {float(exponent)!r}, {base}.dtype))")


@cache
def _compiled(source: str) -> Any:
    """The kernel of a source; the compiler wants to read it in a file."""
    name = f"<rule {hashlib.blake2b(source.encode(), digest_size=8).hexdigest()}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"tl": tl, "libdevice": libdevice, "__name__": __name__}
    exec(compile(source, name, "exec"), space)
    return triton.jit(space["rule"])
