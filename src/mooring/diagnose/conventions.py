"""Conversion of a penalty's strength between libraries, which differ in a factor 1/2 and in the scale of scores."""

from dataclasses import dataclass
from typing import Literal

from mooring.errors import MooringError, check_number, check_whole, unknown

KINDS = {"batch": "squares", "sample": "squares", "sum": "outputs", "mean": "outputs", "path": "path"}
"""Scores of one kind differ only by a power of the batch size."""

POWERS = {"batch": -1, "sample": 0, "sum": 1, "mean": 0, "path": 0}
"""How a score grows with the batch size B: the square of a batch mean is about 1/B of the mean of samples' squares."""

MOORING_CONVENTION = {"squares": "ewc", "outputs": "mas", "path": "si"}


@dataclass(frozen=True)
class Convention:
    """The definition of a penalty, strength * sum(score * d^2) with or without 1/2, and the scale of its scores.

    Args:
        half: whether there is a 1/2 before the sum.
        score: what is summed or averaged over a task: the squared gradient of a "batch" mean or of each "sample"; the
            absolute gradient of the "sum" or of the "mean" of the outputs' squared norms over the batch; or the
            contribution of each step to the "path" integral.

    Example:
        >>> Convention(half=False, score="sample").scale(batch_size=None)
        1.0
    """

    half: bool
    score: Literal["batch", "sample", "sum", "mean", "path"]

    def __post_init__(self) -> None:
        if self.score not in KINDS:
            raise unknown("score", self.score, KINDS)

    def scale(self, batch_size: int | None) -> float:
        """Return w * B^power: the weight of d^2 at strength 1 if the score of a single sample is 1."""
        power = POWERS[self.score]
        if power and batch_size is None:
            raise MooringError("these scores depend on the batch size: give the batch_size of their estimate")
        return (0.5 if self.half else 1.0) * float(batch_size or 1) ** power


CONVENTIONS: dict[str, Convention] = {
    "ewc": Convention(half=True, score="batch"),
    "ewc-per-sample": Convention(half=True, score="sample"),
    "mas": Convention(half=True, score="sum"),
    "si": Convention(half=True, score="path"),
    "avalanche-ewc": Convention(half=False, score="batch"),
    "avalanche-mas": Convention(half=False, score="mean"),
    "avalanche-si": Convention(half=True, score="path"),
    "mammoth-ewc": Convention(half=False, score="sample"),
    "mammoth-si": Convention(half=False, score="path"),
}
"""Conventions of Mooring's own importances, then of other libraries, as their code has them."""


def convert_strength(
    strength: float, convention: str | Convention, *, to: str | Convention | None = None, batch_size: int | None = None
) -> float:
    """Convert a strength from one convention to another, so that both penalties have the same gradient.

    strength' = strength * (w * s) / (w' * s'), where w is 1/2 or 1 and s is the scale of scores of the convention that
    `strength` comes from; w' and s' belong to the other one. p = lr * strength' * importance then says whether either
    penalty is stable. Halves and sums over a task are converted exactly. Between squares of batches and squares of
    samples the conversion is a rule of thumb, which is exact if the gradients of samples are uncorrelated, as they are
    for labels sampled from the model.

    Most libraries sum the importances of several tasks. Use `attach(..., merge="sum")` to do the same: Mooring's
    default, the average, counts the first task half.

    Args:
        strength: the strength to convert.
        convention: the convention that it comes from: a name in `CONVENTIONS`, or a `Convention` for your own code.
        to: the convention to convert to; by default that of Mooring's importance of the same kind with default
            options, "ewc", "mas" or "si".
        batch_size: the batch size that importances are estimated with, if scores depend on it.

    Example:
        >>> convert_strength(100.0, "avalanche-ewc")  # no 1/2 there
        200.0
        >>> convert_strength(100.0, "avalanche-ewc", to="ewc-per-sample", batch_size=32)
        6.25
        >>> own = Convention(half=True, score="sample")  # (strength / 2) * sum(fisher * d^2), sample by sample
        >>> convert_strength(100.0, own, batch_size=32)
        3200.0
    """
    check_number("strength", strength, 0)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1)
    source = _resolve(convention)
    target = _resolve(MOORING_CONVENTION[KINDS[source.score]] if to is None else to)
    if KINDS[source.score] != KINDS[target.score]:
        raise MooringError(
            f"scores of {KINDS[source.score]} and of {KINDS[target.score]} have no common scale: "
            "compare them by p, which Mooring.diagnose() prints"
        )
    if source.score == target.score:
        batch_size = batch_size or 1  # it cancels
    return strength * source.scale(batch_size) / target.scale(batch_size)


def _resolve(convention: str | Convention) -> Convention:
    if isinstance(convention, Convention):
        return convention
    if convention not in CONVENTIONS:
        raise unknown("convention", convention, CONVENTIONS)
    return CONVENTIONS[convention]
