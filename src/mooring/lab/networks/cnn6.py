"""The paper's 6-layer network: 64, 64, pool, 128, 128, pool, 256, 256, pool."""

from torch import Tensor, nn

__all__ = ["CNN6", "cnn6"]


class CNN6(nn.Module):
    """Six 3x3 convolutions with ReLU and a max pool after every second; 256 * (height / 8) * (width / 8) features.

    Args:
        channels: the number of channels of an image.

    Example:
        >>> import torch
        >>> CNN6()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 4096])
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


def cnn6(shape: tuple[int, int, int]) -> nn.Module:
    """Return the backbone for images of shape (channels, height, width).

    Example:
        >>> sum(p.numel() for p in cnn6((3, 32, 32)).parameters())
        1145408
    """
    return CNN6(shape[0])
