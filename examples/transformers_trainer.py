"""Train a language model on two texts, one after the other, with transformers' Trainer, plain and moored.

pip install "mooring[transformers]"
python examples/transformers_trainer.py
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import mooring
from mooring.integrations.transformers import MooringCallback

FIRST = "the tide comes in and the tide goes out and the boat stays where it is moored. "
SECOND = "while (x < n) { y[x] = f(x); x += 1; } return y; /* nothing here is prose */ "
LETTERS = sorted(set(FIRST + SECOND))
LENGTH = 32


def windows(text: str) -> list[dict[str, torch.Tensor]]:
    """Return overlapping windows of a text, as letters."""
    letters = torch.tensor([LETTERS.index(letter) for letter in text * 2])
    pieces = letters.unfold(0, LENGTH, 1)[: len(text)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def loss(model: GPT2LMHeadModel, text: str) -> float:
    """Return the loss in nats per letter."""
    tokens = torch.stack([window["input_ids"] for window in windows(text)])
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def main() -> None:
    """Train two tasks, one `train()` each; the callback consolidates after each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of each task")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for moored in (False, True):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                n_layer=2,
                n_embd=32,
                n_head=2,
                vocab_size=len(LETTERS),
                n_positions=LENGTH,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        callback = MooringCallback(importance="ewc", pull=mooring.Interpolation(stiffness=0.3))
        with tempfile.TemporaryDirectory() as folder:
            for number, text in enumerate((FIRST, SECOND)):
                arguments = TrainingArguments(
                    output_dir=str(Path(folder) / f"task{number}"),
                    max_steps=options.steps,
                    per_device_train_batch_size=16,
                    learning_rate=3e-3,
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=True,
                )
                trainer = Trainer(model, arguments, train_dataset=windows(text), callbacks=[callback] if moored else [])
                trainer.train()
                if number == 0:
                    first_loss = loss(model, FIRST)
        losses = f"first text {first_loss:.2f} -> {loss(model, FIRST):.2f}, second text {loss(model, SECOND):.2f}"
        print(f"{'moored' if moored else 'plain':7s} {losses} nats per letter")


if __name__ == "__main__":
    main()
