"""Multi-head attention of a whole stack of networks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mooring_lab.fleet.stack.linear import batched_linear


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
    tensors: Mapping[str, Tensor],
    runs: int,
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax(Q K' / sqrt(d) + mask) V for each head of each run.

    The arguments are those of `nn.MultiheadAttention`.

    Args:
        layer: the layer of one network.
        query: of shape (runs * batch, length, width).
        key: of shape (runs * batch, source length, width).
        value: of shape (runs * batch, source length, width).
        key_padding_mask: of shape (runs * batch, source length); True hides a position, a number is added to its score.
        need_weights: whether to return the attention weights.
        attn_mask: likewise, of shape (length, source length) or (runs * batch * heads, length, source length).
        average_attn_weights: whether to average the returned weights over the heads.
        is_causal: a hint that `attn_mask` is the causal mask.
        tensors: the parameters, each with a leading run axis.
        runs: the number of runs.
    """
    assert isinstance(layer, nn.MultiheadAttention)
    unusual = layer.bias_k is not None or layer.add_zero_attn or not layer._qkv_same_embed_dim
    if not layer.batch_first or query.ndim != 3 or unusual or (layer.training and layer.dropout > 0):
        raise NotImplementedError("only attention with batch_first, of one width, without extras and without dropout")
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is a hint about attn_mask: give both")
    projections = _projections(query, key, value, tensors)  # then (batch, heads, length, width)
    q, k, v = (x.view(*x.shape[:2], layer.num_heads, -1).transpose(1, 2) for x in projections)
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _merge_masks(attn_mask, key_padding_mask, q)
    weights = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        out = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    joined = out.transpose(1, 2).flatten(2)
    return batched_linear(joined, tensors["out_proj.weight"], tensors.get("out_proj.bias")), weights


def _projections(query: Tensor, key: Tensor, value: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the projected queries, keys and values; one matrix product if all have the same input."""
    weight, bias = tensors["in_proj_weight"], tensors.get("in_proj_bias")
    if query is key and key is value:
        return batched_linear(query, weight, bias).chunk(3, -1)
    biases = (None,) * 3 if bias is None else bias.chunk(3, 1)
    projections = zip((query, key, value), weight.chunk(3, 1), biases, strict=True)
    return tuple(batched_linear(*arguments) for arguments in projections)


def _merge_masks(mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """Merge both masks into one additive mask that broadcasts to (batch, heads, length, source length)."""
    masks = [_additive(m, query.dtype) for m in (mask, padding) if m is not None]
    if mask is not None and mask.ndim == 3:
        masks[0] = masks[0].view(*query.shape[:2], *mask.shape[1:])
    if padding is not None:
        masks[-1] = masks[-1][:, None, None]
    return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to values that are added to the scores: -inf where a boolean mask is True."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)
