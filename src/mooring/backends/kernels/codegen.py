"""A rule in PyTorch, traced once and written out in Triton: the lines of a kernel, wherever its tensors lie.

The rule itself is ordinary PyTorch and stands where it stands; nothing is said twice. A compiler for everything takes
seconds for what this does in a tenth of one, and a study has many rules.
"""

import hashlib
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "TracedRule", "compiled", "has_compiler", "trace_rule"]

UNARY = {
    "abs": "tl.abs({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "1.0 / tl.sqrt({})",
    "reciprocal": "1.0 / {}",
    "neg": "-{}",
    "exp": "tl.exp({})",
    "exp2": "tl.exp2({})",
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
DTYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
}
"""What each dtype is called in a kernel."""

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


class TracedRule:
    """Lines of a kernel, one for each operation, and what it stores.

    What a tensor holds is called x_ and its name.

    Attributes:
        lines: assignments, in their order.
        stores: which tensors are changed, each with the value it gets; in their order.
    """

    def __init__(self, names: Sequence[str], double: bool) -> None:
        self.waiting, self.double = list(names), double
        self.values: dict[Any, str] = {}
        self.lines: list[str] = []
        self.stores: list[tuple[str, str]] = []

    def reads(self, name: str) -> bool:
        """Whether what a tensor held before plays any part."""
        text = " ".join([*self.lines, *(value for _, value in self.stores)])
        return re.search(rf"\bx_{name}\b", text) is not None

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
            self.stores.append((whole, told[1]))
        elif name in ("copy", "full", "full_like"):
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
        if name == "_to_copy" and node.kwargs.get("dtype") in DTYPES:
            return f"({told[0]}).to({DTYPES[node.kwargs['dtype']]})"
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


def trace_rule(rule: Callable[[dict[str, Tensor]], None], example: Mapping[str, Tensor]) -> TracedRule:
    """What a rule does to its tensors.

    Args:
        rule: takes tensors by name and changes some of them in place; elementwise.
        example: tensors of those names, of any size.

    Raises:
        NotImplementedError: where the rule does something that is not known how to be written.

    Example:
        >>> def halve(tensors):
        ...     tensors["theta"].mul_(0.5)
        >>> found = trace_rule(halve, {"theta": torch.ones(2, 3)})
        >>> found.lines, found.stores
        (['v1 = x_theta * 0.5'], [('theta', 'v1')])
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(example)

    def flat(*tensors: Tensor) -> None:
        rule(dict(zip(names, tensors, strict=True)))

    pure = torch.func.functionalize(flat, remove="mutations")
    graph = make_fx(pure, decomposition_table=_decompositions())(*example.values()).graph
    found = TracedRule(names, any(t.dtype == torch.float64 for t in example.values()))
    for node in graph.nodes:
        found.add(node)
    return found


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """How torch writes operations in terms of fewer; looking them all up takes a while."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())


def _power(base: str, exponent: float) -> str:
    known = {2: f"{base} * {base}", 0.5: f"tl.sqrt({base})", -0.5: f"1.0 / tl.sqrt({base})", -1: f"1.0 / {base}"}
    return known.get(exponent, f"libdevice.pow({base}, tl.full({base}.shape, {float(exponent)!r}, {base}.dtype))")


@cache
def compiled(source: str, anywhere: tuple[str, ...] = ()) -> Any:
    """The kernel called `rule` of a source; the compiler wants to read it in a file.

    Args:
        source: the text; the same again is the same kernel.
        anywhere: arguments of a few numbers, for which it does not pay to have a kernel for each way they may lie.
    """
    import triton  # slow, and not everywhere
    from triton import language as tl
    from triton.language.extra import libdevice

    name = f"<rule {hashlib.blake2b(source.encode(), digest_size=8).hexdigest()}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"tl": tl, "libdevice": libdevice, "__name__": __name__}
    exec(compile(source, name, "exec"), space)
    return triton.jit(space["rule"], do_not_specialize_on_alignment=list(anywhere))


def has_compiler(device: torch.device) -> bool:
    """Whether kernels can be made for a device."""
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
