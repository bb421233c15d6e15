"""The winner of a metric: the row that is surely better than every other, if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooring_lab.model.summary import Row

SMALLER_IS_BETTER = ("forgetting", "forgetting_earlier", "intransigence")

MIN_SEEDS = 3
"""With fewer seeds no row is called the best."""

JOINT = "joint"
"""The method that sees all tasks at once; it takes no part."""


def winner(rows: Sequence[Row], metric: str) -> Row | None:
    """Return the row whose difference from every other, paired by seed, has a 95 % interval on the better side of 0.

    Rows in which a run did not finish neither win nor lose. Nothing wins alone or with fewer than `MIN_SEEDS` seeds.

    Args:
        rows: rows of one stream.
        metric: the name of the metric.
    """
    complete = [row for row in rows if not row.unfinished and row.setting.method != JOINT]
    if len(complete) < 2:
        return None
    sign = -1 if metric in SMALLER_IS_BETTER else 1
    best = max(complete, key=lambda row: sign * row.metrics[metric].mean)
    others = (row for row in complete if row is not best)
    return best if all(surely_better(best, other, metric) for other in others) else None


def surely_better(row: Row, other: Row, metric: str) -> bool:
    """Return whether the difference of two rows, paired by seed, has an interval on the better side of 0.

    Seeds in which a run did not finish are left out; fewer than `MIN_SEEDS` others are not enough.
    """
    from mooring_lab.model.metrics import paired_difference  # imports torch, which tables of methods do without

    sign = -1 if metric in SMALLER_IS_BETTER else 1
    ours, theirs = (
        {result.spec.seed: sign * result.metrics[metric] for result in r.results if result.status == "finished"}
        for r in (row, other)
    )
    seeds = sorted(ours.keys() & theirs.keys())
    return len(seeds) >= MIN_SEEDS and paired_difference([ours[s] for s in seeds], [theirs[s] for s in seeds]).low > 0
