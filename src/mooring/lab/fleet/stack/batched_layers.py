"""Layers that know about runs: the parts of a network with parameters, for all runs of a stack at once.

A network's own forward pass works sample by sample everywhere else, so it can run as it is on the samples of all runs
as one batch, run after run; only the layers here look at which run a sample belongs to.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import conv1d, conv2d, pad

from mooring.lab.fleet.gpu.convolution import takes
from mooring.lab.fleet.gpu.fused_convolutions import Link, run_chain
from mooring.lab.fleet.stack.attention import attention
from mooring.lab.fleet.stack.linear import linear
from mooring.lab.fleet.stack.norms import batch_norm, by_channel, by_run, group_norm, instance_norm, layer_norm
from mooring.lab.networks.multi_head import MultiHeadNetwork

__all__ = ["LAYERS", "Watcher", "Wide", "widened"]

Tensors = Mapping[str, Tensor]
Watcher = Callable[[nn.Module, Tensor, Tensor, int], None]
"""Told a layer, what went in, what came out, and how many runs that is."""


def convolution(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of a convolution: by kernels of our own on a GPU, else some runs at a time as groups of one."""
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    weight, bias = own["weight"], own.get("bias")
    if isinstance(layer, nn.Conv2d) and takes(layer, x):
        return run_chain(x, (_link(layer),), [weight], [bias])
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    some = _at_once(layer, x, runs)
    if some >= runs:
        return _grouped(layer, x, weight, bias, padding)
    parts = zip(
        torch.split(x, len(x) // runs * some),
        torch.split(weight, some),
        [None] * runs if bias is None else torch.split(bias, some),
        strict=False,
    )
    return torch.cat([_grouped(layer, *part, padding) for part in parts])


def _link(layer: nn.Conv2d, *, relu: bool = False, pool: bool = False) -> Link:
    assert isinstance(layer.padding[0], int)
    return Link(layer.stride[0], layer.padding[0], relu, pool)


def _grouped(
    layer: nn.Conv1d | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int | tuple[int, ...] | str
) -> Tensor:
    """Some runs as groups of one convolution."""
    runs = len(weight)
    odd = layer.out_channels % 16 and x.ndim == 4 and x.shape[2] * x.shape[3] >= 64
    if runs == 1 and odd and (x.device.type, x.dtype) == ("cpu", torch.float32):
        x = x.contiguous(memory_format=torch.channels_last)  # a CPU is faster at such widths this way
    convolve: Callable[..., Tensor] = conv1d if isinstance(layer, nn.Conv1d) else conv2d
    told = weight.flatten(0, 1), None if bias is None else bias.flatten()
    rest = layer.stride, padding, layer.dilation, runs * layer.groups
    return convolve(x, *told, *rest) if runs == 1 else by_run(convolve(by_channel(x, runs), *told, *rest), runs)


def _at_once(layer: nn.Conv1d | nn.Conv2d, x: Tensor, runs: int) -> int:
    """How many runs to do as groups of one convolution: on a CPU one, unless there is little to do in it.

    The limits were found by measuring. Groups whose channels fill whole vectors may be larger; weights may not, because
    they are put in another order first.
    """
    if x.device.type != "cpu":
        return runs
    weights, channels = layer.weight.numel(), layer.in_channels * math.prod(layer.stride)
    even = layer.in_channels // layer.groups % 8 == layer.out_channels // layer.groups % 8 == 0
    products = x.numel() // (runs * channels) * weights
    return 16 if weights < 1 << 17 and products < 1 << (24 if even else 20) else 1


def embedding(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of an embedding; x of shape (runs * batch, ...), a row of the run's own table for each."""
    assert isinstance(layer, nn.Embedding)
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise NotImplementedError("an embedding that is more than a table is no layer of a stack")
    size = layer.num_embeddings
    begin = torch.arange(0, runs * size, size, device=x.device).repeat_interleave(len(x) // runs)
    begin = begin.view(-1, *[1] * (x.ndim - 1))
    place = torch.where((x >= 0) & (x < size), x + begin, -1)  # what is not in the table is in no other run's either
    out = functional.embedding(place, own["weight"].flatten(0, 1))
    if layer.padding_idx is None:
        return out
    return torch.where((x == layer.padding_idx).unsqueeze(-1), out.detach(), out)


def prelu(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of a PReLU, with a slope below 0 for each channel or one for all."""
    slope = own["weight"].to(x.dtype)
    rows = x.reshape(runs, -1, *x.shape[1:])
    below = rows * slope.view(runs, 1, -1, *[1] * (rows.ndim - 3))
    return torch.where(rows > 0, rows, below).view(x.shape)


LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Embedding: embedding,
    nn.MultiheadAttention: attention,
    nn.PReLU: prelu,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.LayerNorm: layer_norm,
}
"""How each kind of layer runs for all runs at once."""


class Wide(nn.Module):
    """A layer of the network that takes its tensors from the stack.

    Args:
        layer: the layer as it is in one network.
        own: gives the layer's parameters and buffers as they are now, each with a leading run axis.
        name: what it is called in the network.
    """

    def __init__(self, layer: nn.Module, own: Callable[[], tuple[Tensors, int]], name: str = "") -> None:
        super().__init__()
        self.name = name
        self.__dict__["layer"] = layer  # not a submodule: its own parameters are never used
        self.own = own
        self.rule = LAYERS[type(layer)]
        self.watcher: Watcher | None = None

    def train(self, mode: bool = True) -> "Wide":
        """As any module, and the layer with it."""
        self.__dict__["layer"].train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """What the layer was made with, such as its width; its tensors and methods are those of one network."""
        value = getattr(self.__dict__.get("layer"), name)
        if isinstance(value, Tensor | nn.Module) or callable(value):
            raise AttributeError(f"a layer of a stack has no {name} of its own")
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer is called with; tensors of shape (runs * batch, ...)."""
        own, runs = self.own()
        out = self.rule(self.__dict__["layer"], *args, own=own, runs=runs, **kwargs)
        if self.watcher is not None:
            self.watcher(self.__dict__["layer"], args[0], out, runs)
        return out


def widened(network: nn.Module, own: Callable[[str], tuple[Tensors, int]]) -> nn.Module | None:
    """A copy of the network whose layers with parameters know about runs; None where it has others than `LAYERS`.

    Args:
        network: one network.
        own: gives the parameters and buffers of the layer of that name, and how many runs there are.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> two = {"weight": torch.ones(2, 3, 2), "bias": torch.zeros(2, 3)}
        >>> widened(network, lambda name: (two, 2))(torch.ones(2 * 5, 2)).shape
        torch.Size([10, 3])
    """
    wide = deepcopy(network)
    made: dict[nn.Module, Wide] = {}
    for name, module in list(wide.named_modules(remove_duplicate=False)):
        if type(module) in LAYERS and name:
            made.setdefault(module, Wide(module, _asking(own, name), name))
            parent, _, child = name.rpartition(".")
            setattr(wide.get_submodule(parent), child, made[module])
    left = (*wide.parameters(), *wide.buffers())
    tensors = [tensor for layer in made for tensor in layer.parameters()]
    if left or len(tensors) > len(set(tensors)):  # or layers that share a parameter
        return None
    for module in list(wide.modules()):
        if type(module) is nn.Sequential:
            _join(module)
    if isinstance(wide, MultiHeadNetwork) and all(isinstance(head, Wide) for head in wide.heads):
        wide.__dict__["every"] = lambda features: _every_head(list(wide.heads), features)
    return wide


def _every_head(heads: list[Any], features: Tensor) -> Tensor:
    """Logits of every head of every run in one product, of shape (runs * batch, heads, outputs)."""
    each, runs = [head.own()[0] for head in heads], heads[0].own()[1]
    own = {name: torch.cat([told[name] for told in each], 1) for name in each[0]}
    return linear(heads[0].__dict__["layer"], features, own, runs).reshape(len(features), len(heads), -1)


class WideChain(nn.Module):
    """Convolutions that follow each other, with their ReLUs and pools: one function where the kernels take them.

    Args:
        parts: the modules, as the network has them.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.convolutions = [part for part in parts if isinstance(part, Wide)]
        starts = [number for number, part in enumerate(parts) if isinstance(part, Wide)]
        follow = [parts[one + 1 : other] for one, other in zip(starts, [*starts[1:], len(parts)], strict=True)]
        self.links = tuple(
            _link(
                convolution.__dict__["layer"],
                relu=any(isinstance(part, nn.ReLU) for part in after),
                pool=any(isinstance(part, nn.MaxPool2d) for part in after),
            )
            for convolution, after in zip(self.convolutions, follow, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x of shape (runs * batch, channels, height, width)."""
        watched = any(each.watcher for each in self.convolutions)
        if watched or not all(takes(each.__dict__["layer"], x) for each in self.convolutions) or not self._even(x):
            out: Tensor = self.parts(x)
            return out
        own = [each.own()[0] for each in self.convolutions]
        return run_chain(x, self.links, [each["weight"] for each in own], [each.get("bias") for each in own])

    def _even(self, x: Tensor) -> bool:
        """Whether every pool finds images with even sides."""
        sides = [x.shape[2], x.shape[3]]
        for each, link in zip(self.convolutions, self.links, strict=True):
            kernel = each.__dict__["layer"].kernel_size
            sides = [(s + 2 * link.padding - k) // link.stride + 1 for s, k in zip(sides, kernel, strict=True)]
            if link.pool and any(side % 2 for side in sides):
                return False
            sides = [side // 2 for side in sides] if link.pool else sides
        return True


def _join(layers: nn.Sequential) -> None:
    """Put convolutions that follow each other, with a ReLU and a pool after each, into one chain."""
    parts: list[nn.Module] = []
    begin = 0
    for number, layer in enumerate([*layers, nn.Identity()]):
        ready = not parts or not isinstance(parts[-1], nn.MaxPool2d)
        if _links(layer):
            begin = begin if parts else number
        elif not (parts and ready and (_halves(layer) or (type(layer) is nn.ReLU and isinstance(parts[-1], Wide)))):
            if parts:
                layers[begin] = WideChain(parts)
                for other in range(begin + 1, begin + len(parts)):
                    layers[other] = nn.Identity()
            parts = []
            continue
        parts.append(layer)


def _links(layer: nn.Module) -> bool:
    """Whether it is a convolution that the kernels may take."""
    inner = layer.__dict__["layer"] if isinstance(layer, Wide) else None
    return isinstance(inner, nn.Conv2d) and not isinstance(inner.padding, str)


def _halves(layer: nn.Module) -> bool:
    """Whether it takes the largest of each two by two positions."""
    told = (2, 2, 0, 1, False, False)
    return isinstance(layer, nn.MaxPool2d) and told == (
        *(layer.kernel_size, layer.stride, layer.padding, layer.dilation),
        *(layer.ceil_mode, layer.return_indices),
    )


def _asking(own: Callable[[str], tuple[Tensors, int]], name: str) -> Callable[[], tuple[Tensors, int]]:
    return lambda: own(name)
