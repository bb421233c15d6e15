"""Multi-head attention of a whole stack of networks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mooring.lab.fleet.stack.linear import project

__all__ = ["attention"]


def attention(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    own: Mapping[str, Tensor],
    runs: int,
) -> tuple[Tensor, Tensor | None]:
    """softmax(Q K' / sqrt(d) + mask) V for each head of each run, as `nn.MultiheadAttention` is called.

    Args:
        layer: the layer as it is in one network.
        query: of shape (runs * batch, length, width).
        key: of shape (runs * batch, places, width).
        value: of shape (runs * batch, places, width).
        key_padding_mask: of shape (runs * batch, places); True, or a number to add, where a place is not to be seen.
        need_weights: whether to give the attention weights too.
        attn_mask: likewise, of shape (length, places) or (runs * batch * heads, length, places).
        average_attn_weights: over the heads.
        is_causal: a hint that `attn_mask` is the causal mask.
        own: the parameters, each with a leading run axis.
        runs: how many there are.
    """
    assert isinstance(layer, nn.MultiheadAttention)
    _check(layer, query)
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is a hint about attn_mask: give both")
    q, k, v = (_by_head(each, layer.num_heads) for each in _projected(query, key, value, own))
    hinted = is_causal and key_padding_mask is None and not need_weights
    mask = None if hinted else _merged(attn_mask, key_padding_mask, q)
    weights = None
    if need_weights:
        weights = _weights(q, k, mask)
        seen = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=hinted)
    joined = seen.transpose(1, 2).flatten(2)
    return project(joined, own["out_proj.weight"], own.get("out_proj.bias")), weights


def _check(layer: nn.MultiheadAttention, query: Tensor) -> None:
    """Leave to other ways what this one does not do."""
    odd = layer.bias_k is not None or layer.add_zero_attn or not layer._qkv_same_embed_dim
    if not layer.batch_first or query.ndim != 3 or odd or (layer.training and layer.dropout > 0):
        raise NotImplementedError("only attention with batch_first, of one width, without extras and without dropout")


def _projected(query: Tensor, key: Tensor, value: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Queries, keys and values; one product where all are made from the same."""
    weight, bias = own["in_proj_weight"], own.get("in_proj_bias")
    if query is key and key is value:
        return project(query, weight, bias).chunk(3, -1)
    biases = (None,) * 3 if bias is None else bias.chunk(3, 1)
    each = zip((query, key, value), weight.chunk(3, 1), biases, strict=True)
    return tuple(project(*told) for told in each)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads * width) as (batch, heads, length, width)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _merged(mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """Both masks as one, in numbers to add, that fits (batch, heads, length, places)."""
    found = [_added(each, query.dtype) for each in (mask, padding) if each is not None]
    if mask is not None and mask.ndim == 3:
        found[0] = found[0].view(*query.shape[:2], *mask.shape[1:])
    if padding is not None:
        found[-1] = found[-1][:, None, None]
    return sum(found[1:], found[0]) if found else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is True is not to be seen."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Of shape (batch, heads, length, places)."""
    scores = (query / math.sqrt(query.shape[-1])) @ key.mT
    return (scores if mask is None else scores + mask).softmax(-1)
