"""What a language model keeps and learns: divergence from the original model, losses and accuracy, by token."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from language_models.problem import Problem
from language_models.texts import Batch, Text, by_length, without_labels

ROWS = 4096
"""The number of predictions that are compared at a time, because of the memory that their probabilities take."""


def divergence(original: Tensor, logits: Tensor, attended: Tensor) -> Tensor:
    """Return the mean KL(original || model) of the next token over all attended positions, in nats.

    Args:
        original: outputs of the original model, (texts, positions, vocabulary).
        logits: those of the model.
        attended: (texts, positions); where it is 0 there is padding, which does not count.
    """
    counted = attended.bool()
    p, q = (outputs[counted].float().log_softmax(-1) for outputs in (original, logits))
    return kl_div(q, p, reduction="batchmean", log_target=True)


def predictions(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits and the labels of all tokens that have one, each predicted from those before it."""
    labels = batch["labels"][:, 1:]
    learned = labels >= 0
    return model(**without_labels(batch)).logits[:, :-1][learned], labels[learned]


def batches_of(problem: Problem, texts: list[Text]) -> Iterator[Batch]:
    """Yield texts in batches of similar length."""
    for group in by_length(texts, problem.tokens):
        yield problem.collate([texts[place] for place in group])


@torch.no_grad()
def answers(problem: Problem, model: Any, texts: list[Text]) -> dict[str, float]:
    """Return the mean loss of the labelled tokens, and which percentage of them the model predicts."""
    loss, right = torch.zeros(2, dtype=torch.float64, device=problem.device).unbind()
    count = 0
    for batch in batches_of(problem, texts):
        for logits, labels in zip(*(part.split(ROWS) for part in predictions(model, batch)), strict=True):
            loss += cross_entropy(logits.float(), labels, reduction="sum")
            right += (logits.argmax(-1) == labels).sum()
            count += len(labels)
    return {"loss": float(loss) / count, "accuracy": 100 * float(right) / count}


@torch.no_grad()
def kept(problem: Problem, model: Any, texts: list[Text]) -> float:
    """Return the mean divergence of the original model from a model over all tokens of texts."""
    total, count = 0.0, 0
    for batch in batches_of(problem, texts):
        inputs, attended = without_labels(batch), batch["attention_mask"].bool()
        original, logits = (m(**inputs).logits[attended] for m in (problem.original, model))
        for p, q in zip(original.split(ROWS), logits.split(ROWS), strict=True):
            total += float(divergence(p, q, torch.ones_like(p[..., 0]))) * len(p)
        count += len(logits)
    return total / count


def before(problem: Problem) -> dict[str, float]:
    """Return what the original model knows of the new task and of old chats; it is computed once."""
    if "before" not in problem.shared:
        new, old = (answers(problem, problem.original, texts) for texts in (problem.test, problem.chats))
        named = {"loss": new["loss"], "accuracy": new["accuracy"], "chat_loss": old["loss"]}
        problem.shared["before"] = {f"{name}_before": value for name, value in named.items()}
    return dict(problem.shared["before"])


def results(problem: Problem, model: Any) -> dict[str, float]:
    """Return what a model keeps and has learned, with what the original model knows."""
    model.eval()
    new, old = answers(problem, model, problem.test), answers(problem, model, problem.chats)
    return {"kl": kept(problem, model, problem.chats), "chat_loss": old["loss"], **new, **before(problem)}
