"""A backbone with one head per task, or one head for all tasks."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.lazy import LazyModuleMixin

from mooring.errors import MooringError

Head = int | Tensor | tuple[int, ...]
"""One head for all samples, one for each of them, or several for all."""


class MultiHeadNetwork(nn.Module):
    """Linear heads over the features of a shared backbone: heads[head](backbone(x)).

    Args:
        backbone: a module that maps images to features of shape (batch, width).
        outputs: the number of classes of each head.
        heads: the number of heads.
        shape: the channels, height and width of an image; they decide the width of the features.

    Example:
        >>> network = MultiHeadNetwork(nn.Flatten(), outputs=2, heads=3, shape=(1, 8, 8))
        >>> network(torch.zeros(5, 1, 8, 8), head=1).shape
        torch.Size([5, 2])
    """

    def __init__(self, backbone: nn.Module, outputs: int, heads: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.backbone = backbone
        self.shape = shape
        features = _features(backbone, shape)
        if not isinstance(features, Tensor) or features.ndim != 2:
            kind = type(features).__name__
            if isinstance(features, Tensor):
                kind = f"a tensor of shape {tuple(features.shape)}"
            raise MooringError(f"a backbone returns features of shape (batch, width), not {kind}")
        self.heads = nn.ModuleList(nn.Linear(features.shape[1], outputs) for _ in range(heads))

    def forward(self, x: Tensor, head: Head = 0) -> Tensor:
        """Return logits of shape (batch, outputs), or (batch, heads, outputs) of several heads.

        Args:
            x: images of shape (batch, channels, height, width).
            head: the head's number, or the head of each sample as int64 of shape (batch,), or several heads' numbers.
        """
        features = self.backbone(x)
        if isinstance(head, int):
            logits: Tensor = self.heads[head](features)
            return logits
        if isinstance(head, tuple):
            return torch.stack([self.heads[number](features) for number in head], 1)
        all_logits = torch.stack([linear(features) for linear in self.heads], 1)  # (batch, heads, outputs)
        return all_logits.take_along_dim(head[:, None, None], 1).squeeze(1)

    @torch.no_grad()
    def inherit(self, head: int, ancestor: int) -> None:
        """Copy one head's parameters to another; in the paper, a task's head starts from the previous head."""
        for parameter, source in zip(self.heads[head].parameters(), self.heads[ancestor].parameters(), strict=True):
            parameter.copy_(source)


def is_standard_layer(module: nn.Module) -> bool:
    """Return whether a layer is an unmodified layer of torch or of this package, without hooks.

    Other layers may depend on the values of their inputs, or may keep state between calls.

    Example:
        >>> is_standard_layer(nn.Linear(2, 3)), is_standard_layer(nn.LazyLinear(3))
        (True, False)
    """
    standard = type(module).__module__.startswith(("torch.nn.modules.", "mooring_lab.networks."))
    modified = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return standard and not modified and not isinstance(module, LazyModuleMixin)


@torch.no_grad()
def _features(backbone: nn.Module, shape: tuple[int, int, int]) -> object:
    """Return the features of one image; standard layers run on the meta device, without arithmetic."""
    training = backbone.training
    backbone.eval()
    try:
        if not all(is_standard_layer(module) for module in backbone.modules()):
            return backbone(torch.zeros(1, *shape))
        meta = {name: tensor.to("meta") for name, tensor in backbone.state_dict().items()}
        return functional_call(backbone, meta, torch.zeros(1, *shape, device="meta"))
    finally:
        backbone.train(training)
