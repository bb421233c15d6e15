"""All low-rank products of a model: those that are held as products, and why others are not."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mooring.curvature.low_rank import (
    LowRank,
    convolution_refusal,
    is_tuner,
    low_rank_of,
    peft_low_rank,
    prompt_reasons,
)
from mooring.distributed.dtensor import sharded
from mooring.errors import MooringError

SAMPLES = 8
"""Values of each tensor of a base layer by which it is recognised."""

MAX_ROUNDING = 0.01
"""The largest difference of such values, relative to the largest of them: bfloat16 rounds by 0.004."""

SHARED = "its factors belong to several products, so each is held by its own scores"
EXCLUDED = "the other factor of its product is excluded, so it is held by its own scores"
EMPTY = "is empty: its product has rank 0 and adds nothing"
FROZEN = "only the first factor of its product trains, so it is held by its own scores"


@dataclass
class Products:
    """The low-rank products of a model.

    Attributes:
        by_b: the products by their B.
        by_a: the B of each A.
        layers: the modules that add products, with the B of each, by name.
        layer_names: the name of the module that adds the product of each B.
        reasons: why a parameter of an adapter is held by its own scores; of a product, what it does not protect.
    """

    by_b: dict[Tensor, LowRank] = field(default_factory=dict)
    by_a: dict[Tensor, Tensor] = field(default_factory=dict)
    layers: dict[nn.Module, dict[str, Tensor]] = field(default_factory=dict)
    layer_names: dict[Tensor, str] = field(default_factory=dict)
    reasons: dict[Tensor, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_b)

    def __contains__(self, p: Tensor) -> bool:
        return p in self.by_b or p in self.by_a

    def pair(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B of the product that a parameter belongs to."""
        b = self.by_a.get(p, p)
        return self.by_b[b].a, b

    @property
    def switched_off(self) -> bool:
        """Whether there are products and none of them is added at present."""
        return bool(self.by_b) and not any(product.is_active() for product in self.by_b.values())

    def of_module(self, module: nn.Module) -> dict[str, LowRank]:
        """Return the products that a module adds, by name."""
        return {name: self.by_b[b] for name, b in self.layers.get(module, {}).items()}


def find_products(names: dict[str, nn.Module], moorable: Collection[Tensor]) -> Products:
    """Return the low-rank products of a model.

    Args:
        names: the model's modules by name.
        moorable: its parameters that are not excluded.

    Example:
        >>> bool(find_products({"": nn.Linear(2, 2)}, []))
        False
    """
    result, listed = Products(), list[tuple[str, nn.Module, LowRank]]()
    for name, module in names.items():
        own = low_rank_of(module)
        if not own and is_tuner(module):
            own, reasons = peft_low_rank(module)
            result.reasons |= reasons
        result.reasons |= prompt_reasons(module)
        for product in own:
            if product.rank:
                listed.append((name, module, product))
            else:
                result.reasons |= dict.fromkeys((product.a, product.b), EMPTY)
    uses = Counter(p for _, _, product in listed for p in (product.a, product.b))
    for name, module, product in listed:
        if reason := _refusal(product, uses, moorable):
            result.reasons |= dict.fromkeys((product.a, product.b), reason)
            continue
        result.by_b[product.b], result.by_a[product.a] = product, product.b
        result.layer_names[product.b] = name
        of_module = result.layers.setdefault(module, {})
        of_module[f"product {len(of_module)}"] = product.b
        if product.note:
            result.reasons |= dict.fromkeys((product.a, product.b), product.note)
    return result


def by_parameters(products: Products, reason: str) -> Products:
    """Return no products, with the reason why those that a model has are held by their own parameters."""
    factors = (p for a, b in products.by_a.items() for p in (a, b))
    return Products(reasons=products.reasons | dict.fromkeys(factors, reason))


def sample_layer(layer: nn.Module) -> list[float]:
    """Return a few values of a base layer's parameters and buffers, by which another layer is recognised.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.ones_(layer.weight)
        >>> sample_layer(layer)
        [1.0, 1.0, 1.0, 1.0]
    """
    known = (t for t in (*layer.parameters(), *layer.buffers()) if t.numel() and not t.is_meta and not sharded(t))
    tensors = [t.detach().reshape(-1) for t in known if not t.is_complex()]
    samples = [t[:: max(1, len(t) // SAMPLES)][:SAMPLES] for t in tensors]
    return [value for sample in samples for value in sample.double().cpu().tolist()]


def same_samples(saved: Sequence[float], present: Sequence[float]) -> bool:
    """Return whether two layers are the same up to the rounding of a narrower dtype; unknown ones are.

    Example:
        >>> same_samples([1.0, 2.0], [1.001, 2.0]), same_samples([1.0], [1.2])
        (True, False)
    """
    if len(saved) != len(present):  # quantized or gathered otherwise
        return True
    size = max((abs(value) for value in saved), default=0.0)
    return all(abs(one - other) <= MAX_ROUNDING * size for one, other in zip(saved, present, strict=True))


def check_same_layers(saved: Mapping[str, Any], products: Products, names: Mapping[Tensor, str]) -> None:
    """Refuse a state whose adapters had another scale or another base.

    Args:
        saved: what the state says of its products.
        products: those of the model.
        names: the names of its parameters.
    """
    for b, product in products.by_b.items():
        name = names[b]
        scale = saved["scales"].get(name, product.scale)
        if abs(scale - product.scale) > MAX_ROUNDING * abs(scale):
            raise MooringError(
                f"the state belongs to another adapter: the product of {name!r} had the scale {scale:g} and has "
                f"{product.scale:g}; build the adapter with the same alpha and rank"
            )
        samples = saved["layers"].get(name)
        if samples is not None and product.is_active() and not same_samples(samples, sample_layer(product.layer)):
            raise MooringError(
                f"the state belongs to another base: the weights under {name!r} differ from those that it was "
                "saved with; load the same base model, with the same adapters merged"
            )


def _refusal(product: LowRank, uses: Counter[Tensor], moorable: Collection[Tensor]) -> str:
    """Return why a product is not held as one; empty if it is."""
    both = product.a, product.b
    if max(uses[p] for p in both) > 1:
        return SHARED
    if any(p not in moorable for p in both):
        return EXCLUDED
    if product.a.requires_grad and not product.b.requires_grad:
        return FROZEN
    if isinstance(product.layer, nn.Conv2d):
        return convolution_refusal(product.layer)
    return ""
