"""The GPT of examples/finetune_language_model.py: it knows code and learns prose, as a whole or by LoRA adapters."""

import copy
from pathlib import Path
from typing import Any

import torch
from code_and_prose import CodeAndProse
from torch import Tensor, nn

from real_networks.low_rank import add_adapters
from real_networks.problem import Batch, Problem, TwoHeads

RANK = 8


class Body(nn.Module):
    """The GPT without its last layer."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions) to features (batch, positions, width)."""
        features: Tensor = self.gpt(x)
        return features


def text_problem(size_name: str, cache: Path, *, adapters: bool, device: torch.device) -> Problem:
    """Return the problem of prose after code; the network that knows code is trained once and kept in a folder.

    Args:
        size_name: "tiny", "small" or "large".
        cache: the folder.
        adapters: whether LoRA adapters are trained, and all other parameters are frozen.
        device: where all of it is kept.
    """
    texts = CodeAndProse(size_name, cache, str(device))
    gpt, size = texts.gpt, texts.size
    head, gpt.head = gpt.head, nn.Identity()

    def network(seed: int) -> nn.Module:
        model = TwoHeads(Body(copy.deepcopy(gpt)), copy.deepcopy(head), None)
        if adapters:
            torch.manual_seed(seed)
            model.requires_grad_(False)
            add_adapters(model.body, RANK)
        return model

    def optimizer(parameters: Any, factor: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=size.tuning_lr * factor, weight_decay=0.0)

    old = joined(texts.reference()), joined(texts.held_out("code"))
    new = joined(texts.training(0)), joined(texts.held_out("prose"))
    return Problem(network, *old, *new, optimizer, 1, size.batch, size.batch)


def joined(batches: list[Batch]) -> Batch:
    """Return one batch with the rows of all."""
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    return x, y
