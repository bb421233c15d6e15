"""A cell of the paper's tables: ours beside theirs, and whether they agree."""

import math
from dataclasses import dataclass

from scipy.special import stdtrit

from mooring.lab.model.metrics import Interval
from mooring.paper.context.scale import Case
from mooring.paper.published.published_numbers import published

__all__ = ["METRICS", "Cell", "agrees", "cell"]

METRICS = ("accuracy", "forgetting")
PAPERS_SEEDS = 5


@dataclass(frozen=True)
class Cell:
    """A metric of a method.

    Attributes:
        case: network, regime and data set.
        method: a name from the registry.
        metric: "accuracy" or "forgetting".
        ours: over our seeds.
        mean, std: the paper's; it gives no standard deviation for some.
        at_papers: whether ours was trained at the paper's setting, or at what our search found.
    """

    case: Case
    method: str
    metric: str
    ours: Interval
    mean: float
    std: float | None
    at_papers: bool = True

    @property
    def difference(self) -> float:
        """Ours minus the paper's."""
        return self.ours.mean - self.mean

    @property
    def agrees(self) -> bool | None:
        """Whether they differ by no more than chance; None where that cannot be said."""
        return agrees(self.ours, self.mean, self.std)

    @property
    def near(self) -> bool | None:
        """The same with our standard deviation in place of one that the paper does not give."""
        return agrees(self.ours, self.mean, self.ours.std if self.std is None else self.std)


def cell(case: Case, method: str, metric: str, ours: Interval | None, *, at_papers: bool = True) -> Cell | None:
    """A cell; None where ours or the paper's is missing.

    Example:
        >>> from mooring.lab.model.metrics import confidence_interval
        >>> from mooring.paper.context.scale import PAPER
        >>> found = cell(PAPER.cases()[0], "explicit-mas", "accuracy", confidence_interval([63.5, 64.5, 64.0]))
        >>> found.difference, found.agrees
        (0.0, True)
    """
    paper = published(case.network, case.regime.name, case.data, method)
    if paper is None or ours is None:
        return None
    return Cell(case, method, metric, ours, getattr(paper, metric), getattr(paper, f"{metric}_std"), at_papers)


def agrees(ours: Interval, mean: float, std: float | None, count: int = PAPERS_SEEDS) -> bool | None:
    """Whether two means over seeds differ by no more than chance: within the 95 % interval of their difference.

    |ours - theirs| <= t * sqrt(std^2 / n + theirs_std^2 / count), with Welch's degrees of freedom. None where either
    has no standard deviation.

    Example:
        >>> from mooring.lab.model.metrics import confidence_interval
        >>> ours = confidence_interval([63.0, 64.0, 65.0, 64.0, 64.0])
        >>> agrees(ours, 64.5, 0.4), agrees(ours, 60.0, 0.4), agrees(ours, 64.5, None)
        (True, False, None)
    """
    if std is None or not math.isfinite(ours.std) or not math.isfinite(std):
        return None
    mine, theirs = ours.std**2 / ours.count, std**2 / count
    if not mine + theirs:
        return ours.mean == mean
    freedom = (mine + theirs) ** 2 / (mine**2 / (ours.count - 1) + theirs**2 / (count - 1))
    return bool(abs(ours.mean - mean) <= float(stdtrit(freedom, 0.975)) * math.sqrt(mine + theirs))
