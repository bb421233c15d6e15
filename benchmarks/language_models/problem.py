"""What is fine-tuned: a language model, a new task, and old text as a reference and to measure what is kept."""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from precision import autocast, set_precision

from language_models.texts import Batch, Text, collate, encode_all, read_jsonl
from language_models.weights import load

TASKS = ("gsm8k", "sql", "code")
HELD_OUT = 10
"""One of so many rows of a task without a test file is for the test."""


@dataclass
class Problem:
    """A language model and its texts.

    Attributes:
        original: the model before training, which does not change.
        tokenizer: that of the model.
        train, test: conversations of the new task, with labels on the answers.
        reference: batches of old conversations that may be used in training.
        chats: other old conversations.
        batch, steps, rate, adapter_rate: of training; the second rate is that of adapters.
        schedule: "decay", with a linear warm-up before, or "constant".
        precision: "float32", "tf32" or "bf16", in which training computes; it is evaluated without autocast.
        device: where all of it is.
        tokens: the number of tokens that are evaluated at a time.
        shared: results that several runs use, by their name.
    """

    original: Any
    tokenizer: Any
    train: list[Text]
    test: list[Text]
    reference: list[Batch]
    chats: list[Text]
    batch: int
    steps: int
    rate: float
    adapter_rate: float
    schedule: str
    precision: str
    device: torch.device
    tokens: int
    shared: dict[str, Any] = field(default_factory=dict)

    def autocast(self) -> Any:
        """Return the context in which training computes its loss."""
        return autocast(self.precision, self.device.type)

    def collate(self, texts: list[Text]) -> Batch:
        """Return a padded batch."""
        return collate(texts, pad_id(self.tokenizer), self.device)

    def batches(self, seed: int) -> list[Batch]:
        """Return the batches of training, in the order of a seed."""
        generator = torch.Generator().manual_seed(seed)
        order: list[int] = []
        while len(order) < self.steps * self.batch:
            order += torch.randperm(len(self.train), generator=generator).tolist()
        places = [order[start : start + self.batch] for start in range(0, self.steps * self.batch, self.batch)]
        return [self.collate([self.train[place] for place in group]) for group in places]


def pad_id(tokenizer: Any) -> int:
    """Return the id of padding: the tokenizer's own, or that of the end of a text, or 0."""
    return int(next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0))


def read_task(task: str, data: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a task to learn and to test: of the data folder, or every tenth row of a file as the test."""
    if task in TASKS:
        return read_jsonl(data / f"{task}_train.jsonl"), read_jsonl(data / f"{task}_test.jsonl")
    rows = read_jsonl(Path(task))
    return [row for place, row in enumerate(rows) if place % HELD_OUT], rows[::HELD_OUT]


def make_problem(options: Namespace) -> Problem:
    """Load the model and the texts, once for all runs."""
    device = torch.device(options.device)
    set_precision(options.precision)
    original, tokenizer = load(options.weights)
    original = original.to(device).eval().requires_grad_(False)
    original.config.use_cache = False
    train, test = read_task(options.task, options.data)
    old = encode_all(tokenizer, read_jsonl(options.reference or options.data / "alpaca.jsonl"), options.length)
    reference, chats = old[: options.references], old[options.references :][: options.chats]
    if not reference or not chats:
        raise ValueError(f"{len(old)} old texts are too few: {options.references} are the reference, others are tested")
    size = options.reference_batch
    groups = [reference[start : start + size] for start in range(0, len(reference), size)]
    return Problem(
        original=original,
        tokenizer=tokenizer,
        train=encode_all(tokenizer, train, options.length),
        test=encode_all(tokenizer, test[: options.tests], options.length),
        reference=[collate(group, pad_id(tokenizer), device) for group in groups],
        chats=chats,
        batch=options.batch,
        steps=options.steps,
        rate=options.rate,
        adapter_rate=options.adapter_rate,
        schedule=options.schedule,
        precision=options.precision,
        device=device,
        tokens=options.tokens or (16384 if device.type == "cuda" else 1024),
    )
