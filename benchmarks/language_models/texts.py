"""Conversations as token ids with labels, in padded batches."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label of tokens that are not learned."""

QUESTIONS = ("prompt", "question", "instruction")
ANSWERS = ("completion", "answer", "output", "response")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Text:
    """The token ids of one text, and its labels: -100 for tokens that are not learned."""

    ids: list[int]
    labels: list[int]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with a JSON object in each line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def messages_of(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row as messages: its own `messages`, or a question and its answer.

    Example:
        >>> messages_of({"prompt": "1 + 1?", "completion": "2"})
        [{'role': 'user', 'content': '1 + 1?'}, {'role': 'assistant', 'content': '2'}]
    """
    if "messages" in row:
        return list(row["messages"])
    question = next((row[name] for name in QUESTIONS if name in row), None)
    answer = next((row[name] for name in ANSWERS if name in row), None)
    if question is None or answer is None:
        raise ValueError(f"a row with {', '.join(row)} is no conversation: give messages, or prompt and completion")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode(tokenizer: Any, row: dict[str, Any], length: int) -> Text | None:
    """Return a conversation as tokens with labels on its last answer; None if `length` leaves nothing of that."""
    messages = messages_of(row)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if not whole.startswith(prompt):
        raise ValueError("the chat template changes a prompt when its answer follows")
    given, answer = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, whole[len(prompt) :]))
    labels = ([IGNORED_LABEL] * len(given) + answer)[:length]
    return Text((given + answer)[:length], labels) if len(labels) > len(given) else None


def encode_all(tokenizer: Any, rows: list[dict[str, Any]], length: int) -> list[Text]:
    """Return the texts of rows without those that `length` leaves no answer of."""
    return [text for row in rows if (text := encode(tokenizer, row, length)) is not None]


def collate(texts: list[Text], pad: int, device: torch.device) -> Batch:
    """Return a batch, padded on the right; padding has no attention and no label."""
    width = max(len(text.ids) for text in texts)
    ids = torch.full((len(texts), width), pad)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED_LABEL)
    for row, text in enumerate(texts):
        count = len(text.ids)
        ids[row, :count], labels[row, :count] = torch.tensor(text.ids), torch.tensor(text.labels)
        mask[row, :count] = 1
    return {name: t.to(device) for name, t in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))}


def without_labels(batch: Batch) -> Batch:
    """Return the inputs of a batch alone."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def by_length(texts: list[Text], tokens: int) -> Iterator[list[int]]:
    """Yield the places of texts of similar length, at most so many tokens with padding in a batch."""
    group: list[int] = []
    for place in sorted(range(len(texts)), key=lambda place: len(texts[place].ids)):
        if group and (len(group) + 1) * len(texts[place].ids) > tokens:
            yield group
            group = []
        group.append(place)
    if group:
        yield group
