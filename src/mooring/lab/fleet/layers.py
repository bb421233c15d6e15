"""Layers that know about runs: the parts of a network with parameters, for all runs of a stack at once.

A network's own forward pass works sample by sample everywhere else, so it can run as it is on the samples of all runs
as one batch, run after run; only the layers here look at which run a sample belongs to.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d

from mooring.lab.fleet.chain import Link, run_chain
from mooring.lab.fleet.convolution import takes

__all__ = ["LAYERS", "widened"]

Tensors = Mapping[str, Tensor]


class Linear(torch.autograd.Function):
    """x W' + b for each run, with gradients that lie in memory as the weights do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x of shape (runs, batch, inputs), weight (runs, outputs, inputs), bias (runs, outputs)."""
        ctx.save_for_backward(x, weight)
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """g W, g' x, and g summed over the batch."""
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            torch.bmm(g, weight) if wanted[0] else None,
            torch.bmm(g.mT, x) if wanted[1] else None,
            g.sum(1) if wanted[2] else None,
        )


def linear(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of a linear layer; x of shape (runs * batch, ..., inputs)."""
    rows = x.reshape(runs, -1, x.shape[-1])
    told = {name: tensor.to(x.dtype) for name, tensor in own.items()}
    out: Tensor = Linear.apply(rows, told["weight"], told.get("bias"))  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def convolution(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of a convolution: by kernels of our own on a GPU, else one after the other or as groups of one."""
    assert isinstance(layer, nn.Conv2d)
    bias = own.get("bias")
    if takes(layer, x):
        return run_chain(x, (_link(layer),), [own["weight"]], [bias])
    if x.device.type == "cpu" or layer.padding_mode != "zeros":
        each = zip(x.chunk(runs), own["weight"].unbind(), bias.unbind() if bias is not None else [None] * runs)  # noqa: B905
        return torch.cat([layer._conv_forward(images, weight, shift) for images, weight, shift in each])
    grouped = _by_channel(x, runs)
    shift = None if bias is None else bias.flatten()
    out = conv2d(
        grouped, own["weight"].flatten(0, 1), shift, layer.stride, layer.padding, layer.dilation, runs * layer.groups
    )
    return _by_run(out, runs)


def _link(layer: nn.Conv2d, *, relu: bool = False, pool: bool = False) -> Link:
    assert isinstance(layer.padding[0], int)
    return Link(layer.stride[0], layer.padding[0], relu, pool)


def normalisation(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of a batch norm, each over its own samples."""
    assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    if layer.training and "num_batches_tracked" in own:
        own["num_batches_tracked"].add_(1)
    training = layer.training or "running_mean" not in own
    names = ("running_mean", "running_var", "weight", "bias")
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if x.device.type == "cpu":
        each = [own[name].unbind() if name in own else [None] * runs for name in names]
        parts = zip(x.chunk(runs), *each, strict=True)
        return torch.cat([batch_norm(p, m, v, w, b, training, momentum, layer.eps) for p, m, v, w, b in parts])
    channels = _by_channel(x, runs)
    mean, var, weight, bias = (own[name].flatten() if name in own else None for name in names)
    out = batch_norm(channels, mean, var, weight, bias, training, momentum, layer.eps)
    return _by_run(out, runs)


def _by_channel(x: Tensor, runs: int) -> Tensor:
    """(runs * batch, channels, ...) as (batch, runs * channels, ...)."""
    return x.reshape(runs, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def _by_run(x: Tensor, runs: int) -> Tensor:
    """And back."""
    return x.reshape(x.shape[0], runs, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)


LAYERS: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensors, int], Tensor]] = {
    nn.Linear: linear,
    nn.Conv2d: convolution,
    nn.BatchNorm1d: normalisation,
    nn.BatchNorm2d: normalisation,
}
"""How each kind of layer runs for all runs at once."""


class Wide(nn.Module):
    """A layer of the network that takes its tensors from the stack.

    Args:
        layer: the layer as it is in one network.
        own: gives the layer's parameters and buffers as they are now, each with a leading run axis.
    """

    def __init__(self, layer: nn.Module, own: Callable[[], tuple[Tensors, int]]) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: its own parameters are never used
        self.own = own
        self.rule = LAYERS[type(layer)]

    def train(self, mode: bool = True) -> "Wide":
        """As any module, and the layer with it."""
        self.__dict__["layer"].train(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """x of shape (runs * batch, ...)."""
        return self.rule(self.__dict__["layer"], x, *self.own())


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
    for name, module in list(wide.named_modules()):
        if type(module) in LAYERS and name:
            parent, _, child = name.rpartition(".")
            setattr(wide.get_submodule(parent), child, Wide(module, _asking(own, name)))
        elif any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            return None
    for module in list(wide.modules()):
        if type(module) is nn.Sequential:
            _join(module)
    return wide


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
        if not all(takes(each.__dict__["layer"], x) for each in self.convolutions) or not self._even(x):
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
        if isinstance(layer, Wide) and layer.rule is convolution:
            begin = begin if parts else number
        elif not (parts and ready and (_halves(layer) or (type(layer) is nn.ReLU and isinstance(parts[-1], Wide)))):
            if parts:
                layers[begin] = WideChain(parts)
                for other in range(begin + 1, begin + len(parts)):
                    layers[other] = nn.Identity()
            parts = []
            continue
        parts.append(layer)


def _halves(layer: nn.Module) -> bool:
    """Whether it takes the largest of each two by two positions."""
    told = (2, 2, 0, 1, False, False)
    return isinstance(layer, nn.MaxPool2d) and told == (
        *(layer.kernel_size, layer.stride, layer.padding, layer.dilation),
        *(layer.ceil_mode, layer.return_indices),
    )


def _asking(own: Callable[[str], tuple[Tensors, int]], name: str) -> Callable[[], tuple[Tensors, int]]:
    return lambda: own(name)
