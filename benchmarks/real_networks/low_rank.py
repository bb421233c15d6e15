"""LoRA: linear layers and 1 x 1 convolutions with a product of low rank beside them."""

from typing import Any

import torch
from torch import Tensor, nn

from mooring.curvature import LowRank


class Adapted(nn.Module):
    """A frozen linear layer or 1 x 1 convolution plus a product of rank r: W + B A, with B = 0 at first."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        outs, ins = layer.weight.flatten(1).shape
        shape = (1, 1) if layer.weight.ndim == 4 else ()
        self.a = nn.Parameter(torch.randn(rank, ins, *shape, device=layer.weight.device) / ins**0.5)
        self.b = nn.Parameter(torch.zeros(outs, rank, *shape, device=layer.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus B A x."""
        apply = nn.functional.linear if self.a.ndim == 2 else nn.functional.conv2d
        outputs: Tensor = self.layer(x) + apply(apply(x, self.a), self.b)
        return outputs

    def mooring_low_rank(self) -> list[LowRank]:
        """Return the product, so that Mooring holds it."""
        return [LowRank(self.a, self.b, scale=1.0, layer=self.layer)]


def add_adapters(root: nn.Module, rank: int) -> None:
    """Adapt all linear layers and 1 x 1 convolutions inside a module."""
    for parent in [module for module in root.modules() if not isinstance(module, Adapted)]:
        for name, layer in list(parent.named_children()):
            pointwise = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
            if isinstance(layer, nn.Linear) or pointwise:
                setattr(parent, name, Adapted(layer, rank))


def factors_of(model: nn.Module) -> list[nn.Parameter]:
    """Return A and B of all adapted layers."""
    return [p for module in model.modules() if isinstance(module, Adapted) for p in (module.a, module.b)]
