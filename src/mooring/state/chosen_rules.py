"""The rules of a Mooring (importance, pull, merge, buffers): their defaults, and what a saved state decides of them."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mooring import rules
from mooring.curvature.low_rank import Product
from mooring.errors import MooringError, unknown, warn
from mooring.rules import (
    EWC,
    Budget,
    GradientPull,
    Importance,
    Interpolation,
    ParameterPull,
    Proximal,
    Pull,
    merges,
    resolve,
)
from mooring.rules.merges import Merge
from mooring.state.memory import Memory
from mooring.state.norm_statistics import BUFFERS

DEFAULT_NATS = 0.1
"""Default budget with a reference: its loss may rise by a tenth of a nat."""

DEFAULT_PRODUCT_NATS = 0.03
"""The same where low-rank adapters train, which learn hardly more with a larger one (docs/adapters.md)."""


@dataclass(frozen=True)
class Rules:
    """The rules of a Mooring, and which of them were named.

    Attributes:
        importance: the importance of a task.
        pull: the pull towards the anchors.
        merge: how a finished task joins the tasks before.
        buffers: what becomes of normalization statistics.
        named: the options that the user named. A saved state decides the others.
        adapters: how low-rank adapters are held: through their product, by their own parameters, or, with None, through
            their product if the other rules allow it.
    """

    importance: Importance
    pull: Pull
    merge: Merge
    buffers: str
    named: frozenset[str] = frozenset()
    adapters: Product | Literal["parameters"] | None = None

    @property
    def product(self) -> Product | str:
        """How low-rank adapters are held through their product; otherwise, why by their own parameters."""
        if self.adapters == "parameters":
            return 'is held by its own value, as adapters="parameters" asks'
        if self.product_refusal:
            return f"is held by its own value and not through its product, because {self.product_refusal}"
        return self.adapters or Product()

    @property
    def product_refusal(self) -> str:
        """Why these rules cannot hold a product; empty if they can."""
        curvature = self.importance.by_layer or (isinstance(self.importance, EWC) and self.importance.per_sample)
        if not isinstance(self.pull, Budget | Proximal | Interpolation) or self.pull.every == "task":
            return (
                f"{describe(self.pull)} does not act on a product: give pull=Budget(...), Proximal(...) or "
                "Interpolation()"
            )
        if not curvature:
            return (
                f"{self.importance.name} is no curvature of a product: give importance=EWC(decay=None, per_sample=True)"
            )
        if self.merge is not merges.total:
            return 'the curvatures of tasks are summed over a product: give merge="sum"'
        return ""

    def check(self, memory: Memory) -> None:
        """Refuse rules that do not fit each other or the memory."""
        memory.check(self.importance, self.pull)
        if isinstance(self.adapters, Product) and self.product_refusal:
            raise MooringError(f"adapters are not held through their product, because {self.product_refusal}")
        if self.importance.by_layer and not (isinstance(self.pull, Budget) and self.merge is merges.total):
            raise MooringError(
                f"{self.importance.name}() works only with a budget and sums tasks: give pull=Budget(...) and no merge"
            )

    def header(self) -> dict[str, str]:
        """Return the rules as text, by the keys of a saved state."""
        return {
            "importance": self.importance.name,
            "options": describe(self.importance),
            "pull": describe(self.pull),
            "merge": merges.name_of(self.merge),
            "buffers": self.buffers,
        }

    def continued(self, saved: Mapping[str, str]) -> "Rules":
        """Return the rules to continue a saved state with: its own, except for those that were named.

        Args:
            saved: the header of the state. Rules that were named and differ are warned of; another importance is
                refused, because its scores mean something else.

        Example:
            >>> saved = choose_rules(reference=True).header()
            >>> choose_rules().continued(saved).pull
            Budget(nats=0.1, every=1, measured=True, distil=None, average=None)
        """
        own, saved_merge = self.header(), merges.PUBLIC_NAMES.get(saved["merge"], saved["merge"])
        if "importance" in self.named and saved["importance"] != own["importance"]:
            raise MooringError(
                f"the state was made by importance {saved['importance']}, this Mooring has {own['importance']}: give "
                f"attach importance={saved['options']}, or none"
            )
        if saved["buffers"] not in BUFFERS:
            raise MooringError(
                f"the state was made with buffers={saved['buffers']!r}, which does not exist any more: train the task "
                'again with buffers="frozen" or "follow"'
            )
        if saved_merge and "merge" not in self.named and saved_merge not in merges.MERGES:
            raise _not_known("merge", saved_merge)
        options: dict[str, Any] = {}
        if "importance" not in self.named:
            options["importance"] = _created("importance", saved["options"], self.importance)
        elif _normalized(saved["options"]) != own["options"]:
            _warn_of_other_option("importance", saved["options"], own["options"])
        if "pull" not in self.named:
            options["pull"] = _created("pull", saved["pull"], self.pull)
        elif saved["pull"].partition("(")[0] != own["pull"].partition("(")[0]:
            _warn_of_other_option("pull", saved["pull"], own["pull"])
        for name, value in (("merge", saved_merge), ("buffers", saved["buffers"])):
            if name not in self.named and value:
                options[name] = merges.resolve(value) if name == "merge" else value
            elif value and value != own[name]:
                _warn_of_other_option(name, repr(value), repr(own[name]))
        rules = replace(self, **options)
        return self if rules.header() == own else rules

    def with_adapters(self, saved: Mapping[str, Any] | None) -> "Rules":
        """Return the rules with adapters held as in a saved state, unless they were named; refuse what does not fit.

        Args:
            saved: what the header of the state says of low-rank products; None if it held none as such.
        """
        if "adapters" in self.named:
            if (saved is None) == isinstance(self.product, Product):
                form = "parameters" if saved is None else "product"
                raise MooringError(f'the state holds adapters by their {form}: give attach adapters="{form}", or none')
            return self
        adapters: Product | Literal["parameters"] = "parameters"
        if saved is not None:
            if saved["dtype"] == "8bit":
                raise MooringError(
                    'the state was made with Product(dtype="8bit"), which does not exist any more: read the reference '
                    "again, with Product(dtype=torch.bfloat16)"
                )
            adapters = Product(saved["largest"], getattr(torch, saved["dtype"] or "", None), saved["damping"])
        return self if self.adapters == adapters else replace(self, adapters=adapters)


def choose_rules(
    importance: str | Importance | None = None,
    pull: Pull | None = None,
    merge: str | Merge | None = None,
    buffers: str | None = None,
    adapters: Product | Literal["product", "parameters"] | None = None,
    *,
    reference: bool = False,
    adapted: bool = False,
    lean: bool = False,
) -> Rules:
    """Return the rules that the options of `mooring.attach` stand for; None stands for the default.

    Args:
        importance: as for `mooring.attach`, like the other options.
        pull: a pull.
        merge: a merge.
        buffers: what becomes of normalization statistics.
        adapters: how low-rank adapters are held.
        reference: whether there is a reference, which makes a budget the default.
        adapted: whether the model trains low-rank adapters, which makes that budget smaller.
        lean: whether training accumulates no importance, which a budget does not read.

    Example:
        >>> choose_rules(reference=True).importance
        EWC(decay=None, labels='observed', per_sample=True, batch_size=None, seed=0)
    """
    options = {"importance": importance, "pull": pull, "merge": merge, "buffers": buffers, "adapters": adapters}
    named = frozenset(name for name, value in options.items() if value is not None)
    if pull is None:
        nats = DEFAULT_PRODUCT_NATS if adapted and adapters != "parameters" else DEFAULT_NATS
        pull = Budget(nats) if reference or lean else Interpolation()
    is_budget = isinstance(pull, Budget)
    default = EWC(decay=None, per_sample=True) if is_budget else EWC()
    importance = default if importance is None else resolve(importance)
    if not isinstance(pull, GradientPull | ParameterPull | Budget):
        raise MooringError(f"pull={pull!r} is not a pull: give an instance such as mooring.Budget(0.1)")
    for name in ("strength", "nats"):
        option = getattr(pull, name, None)
        if isinstance(option, Tensor) and option.ndim:
            raise MooringError(f"{name}={option.tolist()} has a value per run, but a single model takes one number")
    if buffers is not None and buffers not in BUFFERS:
        raise unknown("buffers", buffers, BUFFERS)
    if not (adapters is None or isinstance(adapters, Product)) and adapters not in ("product", "parameters"):
        raise unknown("adapters", adapters, ["product", "parameters"])
    held = Product() if adapters == "product" else adapters
    merge = merges.resolve(merge or ("sum" if is_budget else "average"))
    return Rules(importance, pull, merge, buffers or ("frozen" if reference else "follow"), named, held)


def parse_rule(text: str) -> Any:
    """Return the importance or pull that `describe` wrote; None if it is not one of Mooring's or has other values.

    Example:
        >>> parse_rule("Balanced(EWC(decay=None, per_sample=True))").importance.per_sample
        True
        >>> parse_rule("Mine(3)") is None
        True
    """
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        return None


def _evaluate(node: ast.expr) -> Any:
    """Return the value of a literal, or of a call of a class of Mooring with such values."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if (name := ast.unparse(node.func)) not in rules.__all__:
        raise ValueError(f"{name} is not a rule of Mooring")
    options = {keyword.arg or "": _evaluate(keyword.value) for keyword in node.keywords}
    return getattr(rules, name)(*map(_evaluate, node.args), **options)


def _normalized(text: str) -> str:
    """Return the description with the options that it does not name, which another version may have added."""
    rule = parse_rule(text)
    return text if rule is None else describe(rule)


def _created(option: str, saved: str, present: Importance | Pull) -> Any:
    """Return the rule that a state was made with; the present one if it is equal."""
    if saved == describe(present):
        return present
    if (rule := parse_rule(saved)) is None:
        raise _not_known(option, saved)
    return rule


def _not_known(option: str, saved: str) -> MooringError:
    return MooringError(
        f"the state was made with {option}={saved}, which Mooring cannot create by itself: give attach {option}="
    )


def _warn_of_other_option(option: str, saved: str, given: str) -> None:
    warn(
        f"the state was made with {saved}, this Mooring has {given}: unless you mean to change that, give attach "
        f"{option}={saved}",
    )


def describe(rule: object) -> str:
    """Return a pull or an importance with its options if its repr has them, else the name of its class.

    Example:
        >>> from mooring.rules import Proximal
        >>> describe(Proximal(3.0))
        'Proximal(strength=3.0)'
    """
    name = type(rule).__name__
    return repr(rule) if repr(rule).startswith(f"{name}(") else name
