"""The GPT of examples/finetune_language_model.py: it knows code and learns prose, as a whole or by LoRA adapters."""

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from real_networks.low_rank import add_adapters
from real_networks.problem import Batch, Problem, TwoHeads

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_language_model.py"
RANK = 8
REFERENCE, TESTED = 32, 16
"""The numbers of batches of the reference, and of each test."""


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
    example: Any = load_example()
    size, name = example.SIZES[size_name], str(device)
    domains = example.read_domains(200_000 if size_name == "tiny" else 10_000_000)
    gpt = example.pretrained(size, domains["code"][0], cache / f"{size_name}.pt", name)
    head, gpt.head = gpt.head, nn.Identity()

    def draw(domain: str, part: int, seed: int, batches: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        pairs = [example.batch_of(domains[domain][part], size, generator, name) for _ in range(batches)]
        x, y = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        return x, y

    def network(seed: int) -> nn.Module:
        model = TwoHeads(Body(copy.deepcopy(gpt)), copy.deepcopy(head), None)
        if adapters:
            torch.manual_seed(seed)
            model.requires_grad_(False)
            add_adapters(model.body, RANK)
        return model

    def optimizer(parameters: Any, factor: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=size.tuning_lr * factor, weight_decay=0.0)

    old = draw("code", 0, 2, REFERENCE), draw("code", 1, 0, TESTED)
    new = draw("prose", 0, 3, size.tuning), draw("prose", 1, 0, TESTED)
    return Problem(network, *old, *new, optimizer, 1, size.batch, size.batch)


def load_example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[EXAMPLE.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
