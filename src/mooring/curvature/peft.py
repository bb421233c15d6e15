"""The low-rank products of PEFT's LoRA layers, and what holds the parameters of its other adapters."""

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn

from mooring.curvature.low_rank import LowRank

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
        return [], _reasons(module, f"parameters of {_kind(module)} {SUMMARY}")
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


def _kind(module: Any) -> str:
    """Return the name of an adapter method, such as ia3 or adalora."""
    return type(module).__module__.removeprefix("peft.tuners.").partition(".")[0]


def _reasons(module: Any, reason: str) -> dict[Tensor, str]:
    """Return the reason for each parameter that belongs to the adapters of a layer."""
    base = {*module.get_base_layer().parameters()}
    return {p: reason for p in module.parameters() if p not in base}
