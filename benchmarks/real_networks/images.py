"""EfficientNet-Lite0, with ImageNet as what it knows, and a new task with a head of its own."""

import copy
from pathlib import Path
from typing import Any

import torch
from efficientnet_lite import FEATURES, MEAN, PIXELS, STD, pretrained
from torch import Tensor, nn

from real_networks.problem import Problem, TwoHeads
from real_networks.stored_images import Encoded, decoded

REFERENCE = 0.3
"""The part of the ImageNet images that is the reference; the others are for the test."""


class Features(nn.Module):
    """EfficientNet-Lite0 without its last layer; its batch norm always uses the statistics that it has."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, (n, 1280)."""
        features: Tensor = self.network.features(x)
        return features

    def train(self, mode: bool = True) -> "Features":
        """Stay in eval mode."""
        return super().train(False)


def image_problem(
    images: dict[str, Encoded],
    weights: Path | None,
    epochs: int | None,
    device: torch.device,
    *,
    channels_last: bool = False,
) -> Problem:
    """Return the problem of a new task.

    Args:
        images: "known" ones of ImageNet, and those of the new task, "train" and "test".
        weights: a state_dict; None for that of the package.
        epochs: of the new task; None for the default.
        device: where all of it is kept.
        channels_last: whether images and convolutions are in that memory format.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    known, new_train, new_test = (decoded(images[name], PIXELS, device) for name in ("known", "train", "test"))
    order = torch.randperm(len(known[0]), generator=torch.Generator().manual_seed(0)).to(device)
    size = round(REFERENCE * len(order))
    reference, old_test = ((known[0][i], known[1][i]) for i in (order[:size], order[size:]))
    classes = 1 + max(int(labels.max()) for _, labels in (new_train, new_test))
    original: Any = pretrained(weights).to(device, memory_format=layout)
    old, original.fc = original.fc, nn.Identity()

    def network(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return TwoHeads(Features(copy.deepcopy(original)), copy.deepcopy(old), nn.Linear(FEATURES, classes).to(device))

    def optimizer(parameters: Any, factor: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4 * factor, fused=device.type == "cuda")

    def prepare(images: Tensor) -> Tensor:
        return images.to(torch.float32, memory_format=layout).mul_(1 / (255 * STD)).sub_(MEAN / STD)

    data = reference, old_test, new_train, new_test
    return Problem(network, *data, optimizer, epochs or 14, 64, 32, 10.0, prepare)
