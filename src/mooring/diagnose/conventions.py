"""What a strength means in other code, and which one means the same here: 1/2 or no 1/2, batches or samples."""

from dataclasses import dataclass
from typing import Literal

from mooring.errors import MooringError, check_number, check_whole, unknown

__all__ = ["CONVENTIONS", "Convention", "convert_strength"]

KINDS = {"batch": "squares", "sample": "squares", "sum": "outputs", "mean": "outputs", "path": "path"}
"""Scores of one kind differ by a power of the batch size alone."""

POWERS = {"batch": -1, "sample": 0, "sum": 1, "mean": 0, "path": 0}
"""How a score grows with the batch size B: the square of a batch mean is about 1/B of the mean of samples' squares."""

HERE = {"squares": "ewc", "outputs": "mas", "path": "si"}


@dataclass(frozen=True)
class Convention:
    """How a penalty is written: strength * sum(score * d^2), with 1/2 or without, and the scale of its scores.

    Args:
        half: whether there is a 1/2 before the sum.
        score: what is summed up or averaged over a task: the square of a "batch" mean's gradient, or that of each
            "sample"; the absolute gradient of a "sum" of outputs' norms over the batch, or of their "mean"; or what
            a step contributed along the "path".

    Example:
        >>> Convention(half=False, score="sample").scale(batch_size=None)
        1.0
    """

    half: bool
    score: Literal["batch", "sample", "sum", "mean", "path"]

    def __post_init__(self) -> None:
        """Refuse options outside their range."""
        if self.score not in KINDS:
            raise unknown("score", self.score, KINDS)

    def scale(self, batch_size: int | None) -> float:
        """w * B^power: the weight of d^2 at strength 1, where a score of a single sample is 1."""
        power = POWERS[self.score]
        if power and batch_size is None:
            raise MooringError("these scores depend on the batch size: give batch_size, that of their estimate")
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
"""Those of Mooring's own importances, then of others, as their code has them."""


def convert_strength(
    strength: float, convention: str | Convention, *, to: str | Convention | None = None, batch_size: int | None = None
) -> float:
    """The strength that means under one convention what another means under its own.

    strength' = strength * (w * s) / (w' * s'): w is 1/2 or 1, s the scale of scores, both of the convention that
    `strength` comes from; w' and s' are those of the one it goes to. Then both penalties have the same gradient, and
    p = lr * strength' * importance tells whether either is stable. Halves and sums over a task are converted exactly.
    Between the squares of batches and those of samples it is a rule of thumb, exact where samples' gradients are
    uncorrelated, as those of labels that the model drew are.

    Importances of several tasks are summed almost everywhere: `attach(..., merge="sum")`, since Mooring's default,
    the average, counts the first task half.

    Args:
        strength: the number that you have.
        convention: where it comes from: a name in `CONVENTIONS`, or a `Convention` for code of your own.
        to: where it goes; by default Mooring's importance of the same kind with its default options, "ewc", "mas" or
            "si".
        batch_size: of the passes that importances are estimated in, where scores depend on it.

    Example:
        >>> convert_strength(100.0, "avalanche-ewc")  # no 1/2 there
        200.0
        >>> convert_strength(100.0, "avalanche-ewc", to="ewc-per-sample", batch_size=32)
        6.25
        >>> mine = Convention(half=True, score="sample")  # (strength / 2) * sum(fisher * d^2), sample by sample
        >>> convert_strength(100.0, mine, batch_size=32)
        3200.0
    """
    check_number("strength", strength, 0)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1)
    there = _found(convention)
    here = _found(HERE[KINDS[there.score]] if to is None else to)
    if KINDS[there.score] != KINDS[here.score]:
        raise MooringError(
            f"scores of {KINDS[there.score]} and of {KINDS[here.score]} are not on one scale: "
            "compare them by Mooring.diagnose(), which tells p"
        )
    if there.score == here.score:
        batch_size = batch_size or 1  # it cancels
    return strength * there.scale(batch_size) / here.scale(batch_size)


def _found(convention: str | Convention) -> Convention:
    if isinstance(convention, Convention):
        return convention
    if convention not in CONVENTIONS:
        raise unknown("convention", convention, CONVENTIONS)
    return CONVENTIONS[convention]
