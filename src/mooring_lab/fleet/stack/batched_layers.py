"""Layers batched over runs: the parts of a network with parameters, for all runs of a stack at once.

Everywhere else a network's forward pass works sample by sample. It can therefore run unchanged on the samples of all
runs as one batch, run after run; only the layers in this file need to know which run a sample belongs to.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import conv1d, conv2d, pad

from mooring_lab.fleet.gpu.convolution import supports_convolution
from mooring_lab.fleet.gpu.fused_convolutions import ConvolutionSpec, fused_convolutions
from mooring_lab.fleet.stack import norms
from mooring_lab.fleet.stack.attention import attention
from mooring_lab.fleet.stack.linear import linear
from mooring_lab.networks.multi_head import MultiHeadNetwork

Tensors = Mapping[str, Tensor]
ForwardCallback = Callable[[str, nn.Module, Tensor, Any, int], None]
"""Takes a layer's name, the layer of one network, its input, its output and the number of runs."""


def convolution(layer: nn.Module, x: Tensor, tensors: Tensors, runs: int) -> Tensor:
    """Apply the convolution of every run: by our own kernels on a GPU, otherwise as groups of one convolution."""
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    weight, bias = tensors["weight"], tensors.get("bias")
    if isinstance(layer, nn.Conv2d) and supports_convolution(layer, x):
        return fused_convolutions(x, (_convolution_spec(layer),), [weight], [bias])
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    size = _runs_per_convolution(layer, x, runs)
    if size >= runs:
        return _grouped_convolution(layer, x, weight, bias, padding)
    biases = [None] * runs if bias is None else torch.split(bias, size)
    parts = zip(torch.split(x, len(x) // runs * size), torch.split(weight, size), biases, strict=False)
    return torch.cat([_grouped_convolution(layer, *part, padding) for part in parts])


def _convolution_spec(layer: nn.Conv2d, followers: Sequence[nn.Module] = ()) -> ConvolutionSpec:
    assert isinstance(layer.padding[0], int)
    relu, pool = (any(isinstance(part, kind) for part in followers) for kind in (nn.ReLU, nn.MaxPool2d))
    return ConvolutionSpec(layer.stride[0], layer.padding[0], relu, pool)


def _grouped_convolution(
    layer: nn.Conv1d | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int | tuple[int, ...] | str
) -> Tensor:
    """Convolve some runs as groups of one convolution."""
    runs = len(weight)
    odd = layer.out_channels % 16 and x.ndim == 4 and x.shape[2] * x.shape[3] >= 64
    if runs == 1 and odd and (x.device.type, x.dtype) == ("cpu", torch.float32):
        x = x.contiguous(memory_format=torch.channels_last)  # faster on a CPU for such widths
    convolve: Callable[..., Tensor] = partial(
        conv1d if isinstance(layer, nn.Conv1d) else conv2d,
        weight=weight.flatten(0, 1),
        bias=None if bias is None else bias.flatten(),
        stride=layer.stride,
        padding=padding,
        dilation=layer.dilation,
        groups=runs * layer.groups,
    )
    return convolve(x) if runs == 1 else norms.runs_to_batch(convolve(norms.runs_to_channels(x, runs)), runs)


def _runs_per_convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, runs: int) -> int:
    """Return how many runs to compute as groups of one convolution: all on a GPU, one on a CPU unless it is small.

    The limits were measured. Groups whose channels fill whole vectors may have more products. The weights may not be
    larger, because the convolution reorders them first.
    """
    if x.device.type != "cpu":
        return runs
    weights, channels = layer.weight.numel(), layer.in_channels * math.prod(layer.stride)
    even = layer.in_channels // layer.groups % 8 == layer.out_channels // layer.groups % 8 == 0
    products = x.numel() // (runs * channels) * weights
    return 16 if weights < 1 << 17 and products < 1 << (24 if even else 20) else 1


def embedding(layer: nn.Module, x: Tensor, tensors: Tensors, runs: int) -> Tensor:
    """Look up each run's own embeddings; x of shape (runs * batch, ...)."""
    assert isinstance(layer, nn.Embedding)
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise NotImplementedError("an embedding with max_norm, scale_grad_by_freq or sparse cannot be batched")
    size = layer.num_embeddings
    offset = torch.arange(0, runs * size, size, device=x.device).repeat_interleave(len(x) // runs)
    offset = offset.view(-1, *[1] * (x.ndim - 1))
    index = torch.where((x >= 0) & (x < size), x + offset, -1)  # an invalid index must not reach another run's table
    out = functional.embedding(index, tensors["weight"].flatten(0, 1))
    pad_index = layer.padding_idx
    return out if pad_index is None else torch.where((x == pad_index).unsqueeze(-1), out.detach(), out)


def prelu(layer: nn.Module, x: Tensor, tensors: Tensors, runs: int) -> Tensor:
    """Apply the PReLU of every run, with one negative slope for each channel or for all."""
    rows = x.reshape(runs, -1, *x.shape[1:])
    negative = rows * tensors["weight"].to(x.dtype).view(runs, 1, -1, *[1] * (rows.ndim - 3))
    return torch.where(rows > 0, rows, negative).view(x.shape)


LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Embedding: embedding,
    nn.MultiheadAttention: attention,
    nn.PReLU: prelu,
    nn.BatchNorm1d: norms.batch_norm,
    nn.BatchNorm2d: norms.batch_norm,
    nn.GroupNorm: norms.group_norm,
    nn.InstanceNorm2d: norms.instance_norm,
    nn.LayerNorm: norms.layer_norm,
}
"""The function that computes each type of layer for all runs at once."""


class BatchedLayer(nn.Module):
    """A layer of the network that takes its tensors from the stack.

    Args:
        layer: the layer of one network.
        tensors: returns the layer's current parameters and buffers, each with a leading run axis, and the number of
            runs.
        name: the layer's name in the network.

    Attributes:
        on_forward: called after each forward pass, if it is not None.
    """

    def __init__(self, layer: nn.Module, tensors: Callable[[], tuple[Tensors, int]], name: str = "") -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: its own parameters are never used
        self.name, self.tensors, self.function = name, tensors, LAYERS[type(layer)]
        self.on_forward: ForwardCallback | None = None

    def train(self, mode: bool = True) -> "BatchedLayer":
        """Set the training mode of this module and of the layer."""
        self.__dict__["layer"].train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """Return a setting of the layer, such as its width; its tensors and methods belong to one network only."""
        value = getattr(self.__dict__.get("layer"), name)
        if isinstance(value, Tensor | nn.Module) or callable(value):
            raise AttributeError(f"a layer that is batched over runs has no {name}")
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the layer of every run to tensors of shape (runs * batch, ...)."""
        tensors, runs = self.tensors()
        out = self.function(self.__dict__["layer"], *args, tensors=tensors, runs=runs, **kwargs)
        if self.on_forward is not None:
            self.on_forward(self.name, self.__dict__["layer"], args[0], out, runs)
        return out


def batched_network(network: nn.Module, tensors: Callable[[str], tuple[Tensors, int]]) -> nn.Module | None:
    """Copy a network with its layers batched over runs; None if a parameter is outside `LAYERS`, or shared by layers.

    Args:
        network: one network.
        tensors: returns the parameters and buffers of the layer of that name, and the number of runs.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> two = {"weight": torch.ones(2, 3, 2), "bias": torch.zeros(2, 3)}
        >>> batched_network(network, lambda name: (two, 2))(torch.ones(2 * 5, 2)).shape
        torch.Size([10, 3])
    """
    batched = deepcopy(network)
    layers: dict[nn.Module, BatchedLayer] = {}
    for name, module in list(batched.named_modules(remove_duplicate=False)):
        if type(module) in LAYERS and name:
            layers.setdefault(module, BatchedLayer(module, partial(tensors, name), name))
            parent, _, child = name.rpartition(".")
            setattr(batched.get_submodule(parent), child, layers[module])
    uncovered = (*batched.parameters(), *batched.buffers())
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    if uncovered or len(parameters) > len(set(parameters)):
        return None
    for module in list(batched.modules()):
        if type(module) is nn.Sequential:
            _fuse_convolutions(module)
    if isinstance(batched, MultiHeadNetwork) and all(isinstance(head, BatchedLayer) for head in batched.heads):
        batched.__dict__["every"] = lambda features: _every_head(list(batched.heads), features)
    return batched


def _every_head(heads: list[Any], features: Tensor) -> Tensor:
    """Compute the logits of every head of every run in one product, of shape (runs * batch, heads, outputs)."""
    by_head, runs = [head.tensors()[0] for head in heads], heads[0].tensors()[1]
    joined = {name: torch.cat([tensors[name] for tensors in by_head], 1) for name in by_head[0]}
    return linear(heads[0].__dict__["layer"], features, joined, runs).reshape(len(features), len(heads), -1)


class BatchedConvolutions(nn.Module):
    """Consecutive convolutions with their ReLUs and pools: one function if the GPU kernels support all of them.

    Args:
        parts: the modules, as the network has them.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.convolutions = [part for part in parts if isinstance(part, BatchedLayer)]
        ends = [*(number for number, part in enumerate(parts) if isinstance(part, BatchedLayer)), len(parts)]
        self.specs = tuple(
            _convolution_spec(parts[start].__dict__["layer"], parts[start + 1 : end]) for start, end in pairwise(ends)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the modules to x of shape (runs * batch, channels, height, width)."""
        observed = any(layer.on_forward for layer in self.convolutions)
        supported = all(supports_convolution(layer.__dict__["layer"], x) for layer in self.convolutions)
        if observed or not supported or not self._pools_even_sides(x):
            out: Tensor = self.parts(x)
            return out
        tensors = [layer.tensors()[0] for layer in self.convolutions]
        weights, biases = [own["weight"] for own in tensors], [own.get("bias") for own in tensors]
        return fused_convolutions(x, self.specs, weights, biases)

    def _pools_even_sides(self, x: Tensor) -> bool:
        """Return whether the input of every pool has even sides."""
        sides = [x.shape[2], x.shape[3]]
        for layer, spec in zip(self.convolutions, self.specs, strict=True):
            kernel = layer.__dict__["layer"].kernel_size
            sides = [(s + 2 * spec.padding - k) // spec.stride + 1 for s, k in zip(sides, kernel, strict=True)]
            if spec.pool and any(side % 2 for side in sides):
                return False
            sides = [side // 2 for side in sides] if spec.pool else sides
        return True


def _fuse_convolutions(layers: nn.Sequential) -> None:
    """Replace consecutive convolutions, each with an optional ReLU and pool, by one `BatchedConvolutions`."""
    parts: list[nn.Module] = []
    begin = 0
    for number, layer in enumerate([*layers, nn.Identity()]):
        after_pool = parts and isinstance(parts[-1], nn.MaxPool2d)
        inner = layer.__dict__["layer"] if isinstance(layer, BatchedLayer) else None
        if isinstance(inner, nn.Conv2d) and not isinstance(inner.padding, str):
            begin = begin if parts else number
        elif (
            not parts
            or after_pool
            or not (_is_two_by_two_pool(layer) or (type(layer) is nn.ReLU and isinstance(parts[-1], BatchedLayer)))
        ):
            if parts:
                layers[begin] = BatchedConvolutions(parts)
                for other in range(begin + 1, begin + len(parts)):
                    layers[other] = nn.Identity()
            parts = []
            continue
        parts.append(layer)


def _is_two_by_two_pool(layer: nn.Module) -> bool:
    settings = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    return isinstance(layer, nn.MaxPool2d) and [getattr(layer, name) for name in settings] == [2, 2, 0, 1, False, False]
