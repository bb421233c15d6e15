"""The backbones: a multilayer perceptron, the paper's 6-layer network, and a narrow ResNet-18."""

import math

import torch
from torch import Tensor, nn


def mlp(shape: tuple[int, int, int], width: int = 100) -> nn.Module:
    """Return a perceptron of two linear layers with ReLU, for small images of shape (channels, height, width).

    Example:
        >>> sum(p.numel() for p in mlp((1, 8, 8)).parameters())
        16600
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    )


class CNN6(nn.Module):
    """The paper's 6-layer network: 64, 64, pool, 128, 128, pool, 256, 256, pool; 3x3 convolutions with ReLU.

    Args:
        channels: the number of channels of an image.

    Example:
        >>> CNN6()(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in CNN6().parameters())
        (torch.Size([2, 4096]), 1145408)
    """

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (64, 128, 256):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (batch, 256 * (height / 8) * (width / 8))."""
        features: Tensor = self.features(x)
        return features.flatten(1)


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
    """ResNet-18 with a third of the usual filters, as the paper's appendix uses it on small images.

    It has a 3x3 stem and four stages of two blocks, 21, 42, 85 and 170 filters wide, then a global average.

    Args:
        channels: the number of channels of an image.
        part: the part of the usual filters; 4 gives 16, 32, 64 and 128, as the paper's public code has them.

    Example:
        >>> ResNet18Third()(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in ResNet18Third().parameters())
        (torch.Size([2, 170]), 1231646)
    """

    def __init__(self, channels: int = 3, part: int = 3) -> None:
        super().__init__()
        widths = [width // part for width in (64, 128, 256, 512)]
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks, inputs = [], widths[0]
        for stage, width in enumerate(widths):
            blocks += [ResidualBlock(inputs, width, 1 if stage == 0 else 2), ResidualBlock(width, width, 1)]
            inputs = width
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (batch, 170), or of the width of the last stage."""
        features: Tensor = self.blocks(torch.relu(self.norm(self.stem(x))))
        return features.mean((2, 3))
