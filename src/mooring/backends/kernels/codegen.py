"""Triton source generated from a rule in PyTorch: the rule is traced once, and each operation becomes a line.

The rule itself stays ordinary PyTorch in its own module, so no formula is written twice. torch.compile takes seconds
for what this does in a tenth of one, and a study has many rules.
"""

import hashlib
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[dict[str, Any]], None]
"""A function that changes some of its named tensors in place."""

UNARY = {name: f"tl.{name}({{}})" for name in ("abs", "sqrt", "exp", "exp2", "log")} | {
    "rsqrt": "1.0 / tl.sqrt({})",
    "reciprocal": "1.0 / {}",
    "neg": "-{}",
    "isnan": "{0} != {0}",
    "isinf": "tl.abs({}) == float('inf')",
    "logical_not": "{} == 0",
    "relu": "tl.maximum({}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
COMPARISONS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
LOGIC = {"logical_and": "&", "logical_or": "|", "bitwise_and": "&", "bitwise_or": "|"}
BINARY = {name: f"{{}} {symbol} {{}}" for name, symbol in (ARITHMETIC | COMPARISONS | LOGIC).items()}
BINARY |= {name: f"tl.{name}({{}}, {{}}, propagate_nan=tl.PropagateNan.ALL)" for name in ("maximum", "minimum")}
SAME_NAME = ("float32", "float64", "bfloat16", "float16", "uint8")
TRITON_DTYPES = {getattr(torch, name): f"tl.{name}" for name in SAME_NAME} | {torch.bool: "tl.int1"}
"""The name of each dtype in a kernel."""

VIEWS = ("alias", "detach", "expand", "reshape", "squeeze", "unsqueeze", "view")
NOT_FINITE = "({0} != {0}) | (tl.abs({0}) == float('inf'))"
"""The expression of whether a value is not finite."""

NO_OPERATIONS = (*VIEWS, "clone", "lift_fresh_copy", "scalar_tensor")
"""Operations that leave an element as it is."""


class TracedRule:
    """The lines of a kernel, one for each operation, and what it stores.

    The value of a tensor is called x_ and the tensor's name.

    Attributes:
        lines: the assignments, in order.
        stores: the tensors that are changed, each with its new value, in order.
    """

    def __init__(self, names: Sequence[str], double: bool) -> None:
        self.unassigned_names, self.double = list(names), double
        self.values: dict[Any, str] = {}
        self.lines: list[str] = []
        self.stores: list[tuple[str, str]] = []

    def reads(self, name: str) -> bool:
        """Return whether the previous value of a tensor is used."""
        text = " ".join([*self.lines, *(value for _, value in self.stores)])
        return re.search(rf"\bx_{name}\b", text) is not None

    def add(self, node: Any) -> None:
        """Translate one node of the traced graph."""
        if node.op == "placeholder":
            self.values[node] = f"x_{self.unassigned_names.pop(0)}"
        elif node.op == "call_function":
            self._call(node)
        elif node.op != "output":
            raise NotImplementedError(f"a rule that reads {node.target}, which is not one of its tensors")

    def _call(self, node: Any) -> None:
        name = node.target.name().split("::")[1].split(".")[0]
        arguments = [self._value(argument) for argument in node.args]
        if name in NO_OPERATIONS:
            self.values[node] = arguments[0]
        elif name == "copy_":
            self.stores.append((self.values[node.args[0]].removeprefix("x_"), arguments[1]))
        elif name in ("copy", "full", "full_like"):
            self.values[node] = arguments[1]
        else:
            self.values[node] = f"v{len(self.lines) + 1}"
            self.lines.append(f"{self.values[node]} = {self._expression(name, arguments, node)}")

    def _expression(self, name: str, arguments: list[str], node: Any) -> str:
        if name in UNARY:
            return UNARY[name].format(arguments[0])
        if name in BINARY and node.kwargs.get("rounding_mode") is None:
            alpha = node.kwargs.get("alpha", 1)
            second = arguments[1] if alpha == 1 else f"{self._value(alpha)} * {arguments[1]}"
            return BINARY[name].format(arguments[0], second)
        if name == "where":
            return f"tl.where({', '.join(arguments)})"
        if name in ("clamp", "clamp_min", "clamp_max"):
            return self._clamped(name, arguments, node)
        if name == "_to_copy" and node.kwargs.get("dtype") in TRITON_DTYPES:
            return f"({arguments[0]}).to({TRITON_DTYPES[node.kwargs['dtype']]})"
        if name == "pow" and isinstance(node.args[1], int | float):
            return _power(arguments[0], node.args[1])
        raise NotImplementedError(f"a rule with {name}")

    def _clamped(self, name: str, arguments: list[str], node: Any) -> str:
        names = ("max",) if name == "clamp_max" else ("min", "max")
        bounds = dict(zip(names, arguments[1:], strict=False))
        bounds |= {bound: self._value(number) for bound, number in node.kwargs.items()}
        value = arguments[0]
        for bound, function in (("min", "maximum"), ("max", "minimum")):
            if bounds.get(bound, "None") != "None":
                value = BINARY[function].format(value, bounds[bound])
        return value

    def _value(self, argument: Any) -> str:
        """Return a variable name, or a number as a literal."""
        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, float) and (argument != argument or abs(argument) == float("inf")):
            return f"float('{argument}')"
        if isinstance(argument, float) and self.double:  # Triton reads a bare number as float32
            return f"tl.full((), {argument!r}, tl.float64)"
        return repr(argument)


def trace_rule(rule: Rule, example: Mapping[str, Tensor]) -> TracedRule:
    """Trace what a rule does to its tensors.

    Args:
        rule: takes tensors by name and changes some of them in place; elementwise.
        example: tensors of those names, of any size.

    Raises:
        NotImplementedError: if the rule has an operation without a translation.

    Example:
        >>> def halve(tensors):
        ...     tensors["theta"].mul_(0.5)
        >>> traced = trace_rule(halve, {"theta": torch.ones(2, 3)})
        >>> traced.lines, traced.stores
        (['v1 = x_theta * 0.5'], [('theta', 'v1')])
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(example)

    def flat(*tensors: Tensor) -> None:
        rule(dict(zip(names, tensors, strict=True)))

    pure = torch.func.functionalize(flat, remove="mutations")
    traced = TracedRule(names, any(t.dtype == torch.float64 for t in example.values()))
    for node in make_fx(pure, decomposition_table=_decompositions())(*example.values()).graph.nodes:
        traced.add(node)
    return traced


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of operations into fewer ones; collecting them takes a while."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())


def load_line(name: str, place: str, mask: str, dtype: torch.dtype | None) -> str:
    """Return the line of a kernel that loads the value of a tensor.

    Args:
        name: the name of the tensor.
        place: the expression of its addresses.
        mask: the end of the arguments that hides what is beyond the tensor; empty if all is loaded.
        dtype: the dtype to compute in; None for that of the tensor.

    Example:
        >>> load_line("theta", "p_theta + at", ", mask=at < count", torch.float32)
        'x_theta = tl.load(p_theta + at, mask=at < count, other=0).to(tl.float32)'
    """
    cast = "" if dtype is None else f".to({TRITON_DTYPES[dtype]})"
    return f"x_{name} = tl.load({place}{mask}{', other=0' if mask else ''}){cast}"


def kernel_source(arguments: Sequence[str], lines: Sequence[str], constants: Sequence[str] = ("B", "ALIGNED")) -> str:
    """Return the source of a kernel called `rule`, as `compile_kernel` takes it.

    Example:
        >>> print(kernel_source(["p_theta"], ["tl.store(p_theta, 0.0)"], ["B"]))
        def rule(p_theta, B: tl.constexpr):
            tl.store(p_theta, 0.0)
        <BLANKLINE>
    """
    head = ", ".join([*arguments, *(f"{name}: tl.constexpr" for name in constants)])
    return "\n".join([f"def rule({head}):", *(f"    {line}" for line in lines)]) + "\n"


def _power(base: str, exponent: float) -> str:
    known = {2: f"{base} * {base}", 0.5: f"tl.sqrt({base})", -0.5: f"1.0 / tl.sqrt({base})", -1: f"1.0 / {base}"}
    return known.get(exponent, f"libdevice.pow({base}, tl.full({base}.shape, {float(exponent)!r}, {base}.dtype))")


@cache
def compile_kernel(source: str, unaligned: tuple[str, ...] = ()) -> Any:
    """Compile the kernel called `rule` in a source; equal sources give one kernel.

    Args:
        source: the text. Triton reads it through `linecache`, as if it were a file.
        unaligned: pointer arguments to a few numbers, for which the kernel is not specialized on alignment.
    """
    import triton  # slow to import, and optional
    from triton import language as tl
    from triton.language.extra import libdevice

    name = f"<rule {hashlib.blake2b(source.encode(), digest_size=8).hexdigest()}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"tl": tl, "libdevice": libdevice, "__name__": __name__}
    exec(compile(source, name, "exec"), namespace)
    return triton.jit(namespace["rule"], do_not_specialize_on_alignment=list(unaligned))
