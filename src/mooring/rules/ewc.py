"""EWC: the squared gradient of the loss, an estimate of the diagonal of the Fisher information."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mooring.errors import MooringError, check_whole, unknown
from mooring.rules.importance import Importance, Iteration, State


def average(current: Tensor, score: Tensor, decay: float | None, count: int, *, out: Tensor | None = None) -> Tensor:
    """Update the running average, or the mean over the task if decay is None; other importances use it too.

    current <- decay * current + (1 - decay) * score
    current <- current + (score - current) / count        (decay=None)

    Args:
        current: the average so far, of any shape.
        score: this iteration's score, of the same shape.
        decay: the weight of the past, 0 <= decay < 1, or None.
        count: the number of scores including this one, from 1.
        out: the tensor for the result, which may be `current`; by default a new one.

    Example:
        >>> average(torch.tensor([1.0]), torch.tensor([6.0]), 0.2, 2)
        tensor([5.])
        >>> average(torch.tensor([1.0]), torch.tensor([6.0]), None, 5)
        tensor([2.])
    """
    return torch.lerp(current, score, 1 / count if decay is None else 1 - decay, out=out)


def check_decay(decay: float | None) -> None:
    """Refuse a decay outside [0, 1)."""
    if decay is not None and (not isinstance(decay, int | float) or not 0 <= decay < 1):
        raise MooringError(f"decay={decay!r} is not allowed: 0 <= decay < 1, or None for the mean over the task")


@dataclass(frozen=True)
class RunningAverage(Importance):
    """An importance whose `current` is `average` of scores."""

    decay: float | None = 0.2

    def __post_init__(self) -> None:
        check_decay(self.decay)

    @property
    def averages(self) -> bool:
        """True without a decay."""
        return self.decay is None

    def averaged(self) -> "RunningAverage":
        """Return the same importance without a decay."""
        return replace(self, decay=None)


def fisher_observed(g: Tensor, samples: int | Tensor = 1) -> Tensor:
    """Return the score of one batch with its own labels: samples * g^2.

    g is the mean over the batch, so the square is taken after the mean. With samples=1 this is the paper's score,
    which shrinks as the batch grows; with samples=B it has the scale of a single sample's Fisher.

    Example:
        >>> fisher_observed(torch.tensor([3.0]), samples=10)
        tensor([90.])
    """
    return g.square() if isinstance(samples, int) and samples == 1 else g.square().mul_(samples)


def fisher_sampled(score: Tensor, samples: int | Tensor) -> Tensor:
    """Return an unbiased estimate of the Fisher diagonal from labels sampled from the model: score^2 / samples.

    score is the gradient of the log-likelihood summed over the batch. Sampled labels make the per-sample
    gradients independent with mean zero, so the cross terms of the square vanish in expectation:
    E[(sum_i s_i)^2] = sum_i E[s_i^2], and no per-sample gradient is needed.

    Example:
        >>> fisher_sampled(torch.tensor([6.0]), samples=4)
        tensor([9.])
    """
    return score.square().div_(samples)


@dataclass(frozen=True)
class EWC(RunningAverage):
    """Elastic weight consolidation: current <- decay * current + (1 - decay) * g^2.

    Args:
        decay: the weight of earlier iterations in the running average; None takes the mean over the task.
        labels: "observed" squares the batch-mean gradient that the optimizer gets. "sampled" draws labels from the
            model's prediction (softmax over the outputs' last dimension; each position of a sequence is a sample) and
            costs one extra backward pass.
        per_sample: multiply observed squares by the number of samples, so that the scale does not depend on it. These
            are the predictions that the mean loss is over: the samples of a batch, the tokens of sequences and the
            pixels of dense outputs, (samples, classes, height, width), without those that have no gradient, such as
            padding. Sampled labels always have that scale.
        batch_size: the number of samples per iteration, if the model's outputs do not show it.
        seed: the seed of the sampled labels.

    Example:
        >>> import mooring
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = mooring.attach(model, optimizer, importance=EWC(decay=None), pull=mooring.Penalty(10.0))
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> optimizer.step()
        >>> moor.current["weight"]
        tensor([[1., 1.]])
    """

    labels: Literal["observed", "sampled"] = "observed"
    per_sample: bool = False
    batch_size: int | None = None
    seed: int = 0
    needs_anchor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels not in ("observed", "sampled"):
            raise unknown("labels", self.labels, ["observed", "sampled"])
        if self.batch_size is not None:
            check_whole("batch_size", self.batch_size, 1)
            if self.labels == "observed" and not self.per_sample:
                raise MooringError("batch_size has no effect here: give per_sample=True or labels='sampled' too")

    @property
    def watches(self) -> Literal["nothing", "samples", "outputs"]:
        """Outputs with sampled labels; else the number of samples if it is needed and not given."""
        if self.labels == "sampled":
            return "outputs"
        return "samples" if self.per_sample and self.batch_size is None else "nothing"

    def update(self, state: State, it: Iteration) -> None:
        """Update current <- average(current, squared gradient)."""
        samples = self.batch_size or it.samples
        if self.labels == "sampled":
            assert it.probe is not None
            score = fisher_sampled(it.probe, samples)
        else:
            score = fisher_observed(it.g, samples if self.per_sample else 1)
        average(state["current"], score, self.decay, it.count, out=state["current"])

    def probe(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return log p(y | x) summed over the batch, with y sampled from the model's prediction."""
        if outputs.ndim not in (2, 3):
            raise MooringError(
                f"EWC(labels='sampled') cannot draw labels from outputs of shape {tuple(outputs.shape)}: pass "
                "outputs=, a function that gives (samples, classes) or (samples, positions, classes)"
            )
        if outputs.shape[-1] == 1:
            raise MooringError("EWC(labels='sampled') needs classes, but there is one output: use EWC() or MAS()")
        rows = outputs.reshape(-1, outputs.shape[-1]).log_softmax(-1)
        drawn = torch.multinomial(rows.detach().exp().nan_to_num(nan=1.0), 1, generator=generator)
        return rows.gather(1, drawn).sum()
