"""Fine-tune LoRA adapters from upright to rotated digits: what is kept and what is learned, mean over seeds.

A network learns upright digits, then adapters of rank 8 learn digits on their side.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --seeds 10 --json
"""

import copy
import functools
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rotated_digits import Options, accuracy, compare_settings, digits, pretrained, train
from torch import nn

import mooring
from mooring import Budget
from mooring.curvature import Product

SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain LoRA": None,
    'adapters="parameters"': {"adapters": "parameters"},
    "the default, Budget(0.03)": {},
    "Budget(0.03, average=False)": {"pull": Budget(0.03, average=False)},
    "Budget(0.1)": {"pull": Budget(0.1)},
    "Budget(0.01)": {"pull": Budget(0.01)},
    "Budget(0.01, measured=False)": {"pull": Budget(0.01, measured=False)},
    "Product(damping=0)": {"adapters": Product(damping=0.0)},
    "Product(largest=64)": {"adapters": Product(largest=64)},
    "Product(largest=16)": {"adapters": Product(largest=16)},
    "Product(largest=8)": {"adapters": Product(largest=8)},
    "Product(dtype=bfloat16)": {"adapters": Product(dtype=torch.bfloat16)},
}


@functools.cache
def base_of(seed: int) -> nn.Module:
    """Return the network of a seed that knows upright digits."""
    return pretrained(seed, 12)


def finetune(options: Options, seed: int, epochs: int) -> tuple[float, float]:
    """Train adapters on digits on their side; return the accuracy on upright ones and on these, in percent."""
    upright, rotated, y = digits()
    base = base_of(seed)
    torch.manual_seed(100 + seed)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, lora_alpha=8, target_modules=["0", "2"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    moor = None
    if options is not None:
        moor = mooring.attach(model, optimizer, reference=upright[:640].split(20), progress=False, **options)
    train(model, optimizer, rotated, y, epochs)
    if moor is not None and moor.running_forgetting is not None:
        moor.finish()
    return accuracy(model, upright, y), accuracy(model, rotated, y)


def main(arguments: list[str] | None = None) -> None:
    """Measure every setting and print the results."""
    upright, _, y = digits()
    compare_settings(
        SETTINGS,
        finetune,
        arguments,
        description=__doc__,
        epochs=18,
        before=lambda seed: accuracy(base_of(seed), upright, y),
    )


if __name__ == "__main__":
    main()
