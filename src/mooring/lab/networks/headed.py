"""A backbone with a head for each task, or one for all."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.lazy import LazyModuleMixin

from mooring.errors import MooringError

__all__ = ["MultiHeadNetwork", "is_standard_layer"]


class MultiHeadNetwork(nn.Module):
    """Logits of one head over the features of a shared backbone: heads[head](backbone(x)).

    Args:
        backbone: from images to features of shape (batch, width).
        outputs: classes of each head.
        heads: how many heads there are.
        shape: channels, height and width of an image, to find the width of the features.

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
            raise MooringError(f"a backbone gives features of shape (batch, width), not {_kind(features)}")
        self.heads = nn.ModuleList(nn.Linear(features.shape[1], outputs) for _ in range(heads))

    def forward(self, x: Tensor, head: int | Tensor = 0) -> Tensor:
        """Logits of shape (batch, outputs), of one head, or of a head for each sample as int64 of shape (batch,)."""
        features = self.backbone(x)
        if isinstance(head, int):
            logits: Tensor = self.heads[head](features)
            return logits
        return self.every(features).take_along_dim(head[:, None, None], 1).squeeze(1)

    def every(self, features: Tensor) -> Tensor:
        """Logits of every head, of shape (batch, heads, outputs)."""
        return torch.stack([each(features) for each in self.heads], 1)

    @torch.no_grad()
    def inherit(self, head: int, ancestor: int) -> None:
        """Start a head from another: the paper's heads begin where the one before ended."""
        for mine, other in zip(self.heads[head].parameters(), self.heads[ancestor].parameters(), strict=True):
            mine.copy_(other)


def is_standard_layer(module: nn.Module) -> bool:
    """Whether a layer is torch's or ours, whole and as it was made: others may look at values, or keep what they see.

    Example:
        >>> is_standard_layer(nn.Linear(2, 3)), is_standard_layer(nn.LazyLinear(3))
        (True, False)
    """
    ours = type(module).__module__.startswith(("torch.nn.modules.", "mooring.lab.networks."))
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return ours and not changed and not isinstance(module, LazyModuleMixin)


@torch.no_grad()
def _features(backbone: nn.Module, shape: tuple[int, int, int]) -> object:
    """What a backbone makes of one image; of known layers their shapes tell it, without any arithmetic."""
    training = backbone.training
    backbone.eval()
    try:
        if not all(is_standard_layer(module) for module in backbone.modules()):
            return backbone(torch.zeros(1, *shape))
        bare = {name: tensor.to("meta") for name, tensor in backbone.state_dict().items()}
        return functional_call(backbone, bare, torch.zeros(1, *shape, device="meta"))
    finally:
        backbone.train(training)


def _kind(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
