"""A cell of the paper's tables: our mean, the paper's mean, and whether they agree."""

import math
from dataclasses import dataclass

from scipy.special import stdtrit

from mooring.lab.model.metrics import Interval
from mooring.paper.context.scale import Condition
from mooring.paper.published.published_numbers import published

__all__ = ["CELL_METRICS", "PaperCell", "make_cell", "means_agree"]

CELL_METRICS = ("accuracy", "forgetting")
PAPER_SEEDS = 5


@dataclass(frozen=True)
class PaperCell:
    """A metric of a method, ours and the paper's.

    Attributes:
        condition: network, regime and data set.
        method: a name from the registry.
        metric: "accuracy" or "forgetting".
        ours: our mean over seeds.
        mean, std: the paper's mean and standard deviation; std is None where the paper gives none.
        at_paper_setting: whether our runs used the paper's setting; otherwise they used that of our search.
    """

    condition: Condition
    method: str
    metric: str
    ours: Interval
    mean: float
    std: float | None
    at_paper_setting: bool = True

    @property
    def difference(self) -> float:
        """Our mean minus the paper's."""
        return self.ours.mean - self.mean

    @property
    def agrees(self) -> bool | None:
        """Whether the means differ by no more than chance; None if a standard deviation is missing."""
        return means_agree(self.ours, self.mean, self.std)

    @property
    def probably_agrees(self) -> bool | None:
        """Whether the means agree, with our standard deviation in place of one that the paper does not give."""
        return means_agree(self.ours, self.mean, self.ours.std if self.std is None else self.std)


def make_cell(
    condition: Condition, method: str, metric: str, ours: Interval | None, *, at_paper_setting: bool = True
) -> PaperCell | None:
    """Return a cell; None if our number or the paper's is missing.

    Example:
        >>> from mooring.lab.model.metrics import confidence_interval
        >>> from mooring.paper.context.scale import PAPER
        >>> cell = make_cell(PAPER.conditions()[0], "explicit-mas", "accuracy", confidence_interval([63.5, 64.5, 64.0]))
        >>> cell.difference, cell.agrees
        (0.0, True)
    """
    paper = published(condition.network, condition.regime.name, condition.data, method)
    if paper is None or ours is None:
        return None
    mean, std = getattr(paper, metric), getattr(paper, f"{metric}_std")
    return PaperCell(condition, method, metric, ours, mean, std, at_paper_setting)


def means_agree(ours: Interval, mean: float, std: float | None, count: int = PAPER_SEEDS) -> bool | None:
    """Return whether two means over seeds differ by no more than chance: Welch's t-test at 95 %.

    |ours - mean| <= t * sqrt(ours_std^2 / n + std^2 / count), with Welch's degrees of freedom. None if either has no
    standard deviation.

    Example:
        >>> from mooring.lab.model.metrics import confidence_interval
        >>> ours = confidence_interval([63.0, 64.0, 65.0, 64.0, 64.0])
        >>> means_agree(ours, 64.5, 0.4), means_agree(ours, 60.0, 0.4), means_agree(ours, 64.5, None)
        (True, False, None)
    """
    if std is None or not math.isfinite(ours.std) or not math.isfinite(std):
        return None
    our_variance, paper_variance = ours.std**2 / ours.count, std**2 / count
    variance = our_variance + paper_variance
    if not variance:
        return ours.mean == mean
    freedom = variance**2 / (our_variance**2 / (ours.count - 1) + paper_variance**2 / (count - 1))
    return bool(abs(ours.mean - mean) <= float(stdtrit(freedom, 0.975)) * math.sqrt(variance))
