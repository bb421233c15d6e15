"""Low-rank products, such as those of PEFT: each with its factors, scale and layer, and all those of a model."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import sharded
from mooring.errors import MooringError, check_number, check_whole

METHOD = "mooring_low_rank"
"""The method by which a module names its low-rank products."""


@dataclass(frozen=True)
class Product:
    """How low-rank adapters are held through their product, for `mooring.attach(adapters=...)`.

    Args:
        largest: the most inputs, or outputs, of a layer whose factor is one matrix. That of a wider side consists of
            blocks of at most that size; beyond eight blocks it is a diagonal.
        dtype: the floating-point dtype in which the factors of past tasks are kept, float32 or wider by default.
        damping: what is added to each eigenvalue of G, as a part of their mean. Outputs to which the loss is not
            sensitive, as long as all other layers stay as they are, would otherwise be free, although these change too.

    Example:
        >>> Product(dtype=torch.bfloat16)
        Product(largest=2048, dtype=torch.bfloat16, damping=0.05)
    """

    largest: int = 2048
    dtype: torch.dtype | None = None
    damping: float = 0.05

    def __post_init__(self) -> None:
        check_whole("largest", self.largest, 1)
        check_number("damping", self.damping, 0)
        floating = isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point and self.dtype.itemsize > 1
        if not (self.dtype is None or floating):
            raise MooringError(f"dtype={self.dtype!r} is not allowed: give a floating-point dtype of 16 bits or more")


@dataclass(frozen=True, eq=False)
class LowRank:
    """One low-rank product s B A that a module adds to what its base layer computes.

    A module of your own is moored through its products if it has a method `mooring_low_rank()` that returns them. Only
    the inputs and outputs of the module are read, never the weights of the base layer, so that may be quantized.

    Args:
        a: A, (rank, in) for a linear layer, (rank, channels, height, width) for a convolution.
        b: B, (out, rank), or (out, rank, 1, 1).
        scale: s.
        layer: the base layer. An `nn.Conv2d` says how inputs are unfolded, an `nn.Embedding` that they are indices; any
            other layer is linear in its inputs' last dimension.
        is_active: returns whether the product is added at present; an adapter may be switched off, or merged.
        note: what holding the product does not protect; empty if there is nothing.

    Example:
        >>> import torch
        >>> class Adapted(nn.Module):
        ...     def __init__(self, base, rank):
        ...         super().__init__()
        ...         self.base = base.requires_grad_(False)
        ...         self.a = nn.Parameter(torch.randn(rank, base.in_features))
        ...         self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        ...     def forward(self, x):
        ...         return self.base(x) + 0.5 * x @ self.a.T @ self.b.T
        ...     def mooring_low_rank(self):
        ...         return [LowRank(self.a, self.b, scale=0.5, layer=self.base)]
        >>> [tuple(product.b.shape) for product in low_rank_of(Adapted(nn.Linear(4, 3), rank=2))]
        [(3, 2)]
    """

    a: Tensor
    b: Tensor
    scale: float
    layer: nn.Module
    is_active: Callable[[], bool] = lambda: True
    note: str = ""

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return len(self.a)

    @property
    def inputs(self) -> int:
        """The number of inputs; of a convolution, channels * height * width of its kernel."""
        return self.a.shape[1:].numel()

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self.b)


def low_rank_of(module: nn.Module) -> list[LowRank]:
    """Return the products that a module names by its method.

    Example:
        >>> class Theirs(nn.Module):  # a class that cannot be edited can be given the method
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.base, self.down, self.up = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(2, 3)
        >>> Theirs.mooring_low_rank = lambda m: [LowRank(m.down.weight, m.up.weight, 1.0, m.base)]
        >>> [product.rank for product in low_rank_of(Theirs())]
        [2]
    """
    finder: Callable[[nn.Module], Iterable[LowRank]] | None = getattr(type(module), METHOD, None)
    products = list(finder(module)) if finder else []
    for product in products:
        if not isinstance(product, LowRank):
            raise MooringError(
                f"{METHOD} of {type(module).__name__} gave a {type(product).__name__}: give LowRank(a, b, scale, layer)"
            )
        rank = product.b.shape[1:].numel() if product.b.ndim > 1 else -1
        if product.a.ndim < 2 or rank != product.rank:
            shapes = f"{tuple(product.a.shape)} and {tuple(product.b.shape)}"
            raise MooringError(
                f"A and B of a {type(module).__name__} have shapes {shapes}, which is no product: give A as (rank, in) "
                "and B as (out, rank)"
            )
    return products


DORA = "the magnitudes of DoRA are held by their own scores, and its directions as if they were not normalised"
SUMMARY = "are held one by one with a diagonal curvature, which does not see what they change together"

PROMPTS = {"PromptEmbedding", "PromptEncoder", "PrefixEncoder"}
"""PEFT's classes of virtual tokens, and the bases of others."""


def is_tuner(module: nn.Module) -> bool:
    """Return whether a module is an adapter layer of PEFT; its package is not imported for that."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def prompt_reasons(module: nn.Module) -> dict[Tensor, str]:
    """Return what holds the virtual tokens of prompt tuning and similar adapters; nothing for other modules."""
    classes = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("peft.tuners.")}
    return dict.fromkeys(module.parameters(), f"virtual tokens {SUMMARY}") if classes & PROMPTS else {}


def peft_low_rank(module: Any) -> tuple[list[LowRank], dict[Tensor, str]]:
    """Return the products of an adapter layer of PEFT, and why its other parameters have none.

    Args:
        module: a module for which `is_tuner` is true. Of its adapters, the switched-off and the merged ones are
            returned too; `LowRank.is_active` knows them.
    """
    lora = sys.modules.get("peft.tuners.lora")
    if lora is None or not isinstance(module, lora.LoraLayer) or hasattr(module, "lora_E"):
        method = type(module).__module__.removeprefix("peft.tuners.").partition(".")[0]  # such as ia3 or adalora
        return [], _reasons(module, f"parameters of {method} {SUMMARY}")
    if refusal := _refusal(module):
        return [], _reasons(module, refusal)
    products, reasons = [], dict[Tensor, str]()
    for name in module.scaling:
        variant = type(module.lora_variant.get(name)).__name__
        dora = variant.startswith("Dora")
        factors = _factors(module, name)
        if factors and variant != "NoneType" and not dora:
            reasons |= dict.fromkeys(factors, f"parameters of a {variant} {SUMMARY}")
        elif factors:
            active = partial(_is_active, module, name)
            scale = float(module.scaling[name]) * _embedding_scale(module)
            products.append(LowRank(*factors, scale, module.get_base_layer(), active, DORA if dora else ""))
        if dora and name in module.lora_magnitude_vector:
            reasons |= dict.fromkeys(module.lora_magnitude_vector[name].parameters(), DORA)
    return products, reasons


def _factors(module: Any, name: str) -> tuple[Tensor, Tensor] | None:
    """Return A and B of one adapter of a layer; None if the layer does not have that adapter."""
    if name in module.lora_embedding_A:
        return module.lora_embedding_A[name], module.lora_embedding_B[name]
    if name in module.lora_A:
        return module.lora_A[name].weight, module.lora_B[name].weight
    return None


def _refusal(module: Any) -> str:
    """Return why the parameters of a LoRA layer are not held through their product; empty if they are."""
    base = module.get_base_layer()
    kind = type(base).__name__
    if type(module).__name__ == "ParamWrapper" or isinstance(base, nn.MultiheadAttention | nn.Conv1d | nn.Conv3d):
        return f"the factors of LoRA on a {kind} {SUMMARY}"
    if isinstance(base, nn.Conv2d):
        return convolution_refusal(base)
    return ""


def convolution_refusal(layer: nn.Conv2d) -> str:
    """Return why the inputs of a convolution cannot be unfolded; empty if they can.

    Example:
        >>> convolution_refusal(nn.Conv2d(4, 4, 3, groups=2))[:46]
        'the factors of a convolution in groups or with'
    """
    if layer.groups > 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return f"the factors of a convolution in groups or with other padding than numbers of zeros {SUMMARY}"
    return ""


def _is_active(module: Any, name: str) -> bool:
    return not module.disable_adapters and name in module.active_adapters and name not in module.merged_adapters


def _embedding_scale(module: Any) -> float:
    """Return the factor that some embeddings multiply their rows by."""
    scale = module._get_embed_scale() if hasattr(module, "_get_embed_scale") else None
    return 1.0 if scale is None else float(scale)


def _reasons(module: Any, reason: str) -> dict[Tensor, str]:
    """Return the reason for each parameter that belongs to the adapters of a layer."""
    base = {*module.get_base_layer().parameters()}
    return {p: reason for p in module.parameters() if p not in base}


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
        if reason := _product_refusal(product, uses, moorable):
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


def _product_refusal(product: LowRank, uses: Counter[Tensor], moorable: Collection[Tensor]) -> str:
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
