"""The GPT of examples/finetune_language_model.py, which knows code and learns prose, and batches of both."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

Batch = tuple[Tensor, Tensor]
EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune_language_model.py"
REFERENCE, HELD_OUT = 32, 16
"""The numbers of batches of the reference, and of what is held out of each domain."""


class CodeAndProse:
    """A GPT that knows code, and the texts. It is trained once and kept in a file.

    Args:
        size_name: the key of the size in the example.
        folder: has the file of the GPT, such as small.pt.
        device: where the GPT and the batches are.
        batch: the number of sequences of each batch; by default that of the size.
        steps: the number of batches of prose to train on; by default that of the size.

    Attributes:
        size: the size, with these numbers.
        gpt: the GPT.
    """

    def __init__(
        self, size_name: str, folder: Path, device: str, *, batch: int | None = None, steps: int | None = None
    ) -> None:
        self.example: Any = load_example()
        size = self.example.SIZES[size_name]
        self._domains = self.example.read_domains(200_000 if size_name == "tiny" else 10_000_000)
        self.gpt = self.example.pretrained(size, self._domains["code"][0], folder / f"{size_name}.pt", device)
        self.size, self._device = replace(size, batch=batch or size.batch, tuning=steps or size.tuning), device

    def draw(self, domain: str, held_out: bool, seed: int, count: int) -> Iterator[Batch]:
        """Yield batches from random places of "code" or "prose"."""
        text = self._domains[domain][held_out]
        return self.example.batches_of(text, self.size, seed, count, self._device)

    def reference(self) -> list[Batch]:
        """Return the batches of code that a method may use in training."""
        return list(self.draw("code", False, 2, REFERENCE))

    def training(self, seed: int) -> list[Batch]:
        """Return the batches of prose to train on, drawn and on the device before training starts."""
        return list(self.draw("prose", False, 3 + seed, self.size.tuning))

    def held_out(self, domain: str) -> list[Batch]:
        """Return batches of a domain that are not trained on."""
        return list(self.draw(domain, True, 0, HELD_OUT))


def load_example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[EXAMPLE.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
