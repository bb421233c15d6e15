"""ResNet-18 with a third of the usual filters, as the paper's appendix uses it on small images."""

import torch
from torch import Tensor, nn

__all__ = ["ResNet18Third", "resnet18_third"]


class ResidualBlock(nn.Module):
    """A residual block: relu(norm(conv(relu(norm(conv(x))))) + shortcut(x))."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (batch, width, height / stride, width / stride)."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet18Third(nn.Module):
    """A 3x3 stem and four stages of two blocks, 21, 42, 85 and 170 filters wide, then a global average.

    Example:
        >>> ResNet18Third()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 170])
    """

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        widths = [width // 3 for width in (64, 128, 256, 512)]
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks, inputs = [], widths[0]
        for stage, width in enumerate(widths):
            blocks += [ResidualBlock(inputs, width, 1 if stage == 0 else 2), ResidualBlock(width, width, 1)]
            inputs = width
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (batch, 170)."""
        features: Tensor = self.blocks(torch.relu(self.norm(self.stem(x))))
        return features.mean((2, 3))


def resnet18_third(shape: tuple[int, int, int]) -> nn.Module:
    """Return the backbone for images of shape (channels, height, width).

    Example:
        >>> sum(p.numel() for p in resnet18_third((3, 32, 32)).parameters())
        1231646
    """
    return ResNet18Third(shape[0])
