"""Measure the effect of each fine-tuning option: old and new accuracy, mean over seeds.

The data are the digits of `examples/finetune.py`.

    python benchmarks/knobs.py
    python benchmarks/knobs.py --seeds 10 --json
"""

from typing import Any

import torch
from rotated_digits import Options, accuracy, compare_settings, digits, pretrained, train

import mooring
from mooring import Budget, Interpolation
from mooring.rules import Kronecker

SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "the default, Budget(0.1)": {},
    "Budget(0.1, average=False)": {"pull": Budget(0.1, average=False)},
    "Budget(0.3)": {"pull": Budget(0.3)},
    "Budget(0.01)": {"pull": Budget(0.01)},
    "Budget(0.001)": {"pull": Budget(0.001)},
    "Interpolation()": {"pull": Interpolation()},
    "Kronecker()": {"importance": Kronecker()},
    "Kronecker(), Budget(0.01)": {"importance": Kronecker(), "pull": Budget(0.01)},
    "Kronecker(), Budget(0.001)": {"importance": Kronecker(), "pull": Budget(0.001)},
}


def finetune(options: Options, seed: int, epochs: int) -> tuple[float, float]:
    """Fine-tune a network from upright to rotated digits; return its accuracy on both, in percent."""
    upright, rotated, y = digits()
    model = pretrained(seed, epochs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    moor = None
    if options is not None:
        moor = mooring.attach(model, optimizer, reference=upright[:640].split(20), progress=False, **options)
    train(model, optimizer, rotated, y, epochs)
    if moor is not None and isinstance(moor.pull, Budget):
        moor.finish()
    return accuracy(model, upright, y), accuracy(model, rotated, y)


def main(arguments: list[str] | None = None) -> None:
    """Measure every setting and print the results."""
    compare_settings(SETTINGS, finetune, arguments, description=__doc__, epochs=10)


if __name__ == "__main__":
    main()
