"""Rows over seeds, and where they begin: what several figures share."""

import math
from collections.abc import Iterable
from dataclasses import replace

from mooring.lab.model.metrics import Interval
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row, summarize
from mooring.paper.context.scale import Case, Scale
from mooring.paper.published.published_numbers import published_setting

__all__ = ["bounds", "first_cases", "over_seeds", "papers_rate", "unstable_in"]


def first_cases(scale: Scale) -> list[Case]:
    """Every data set in the first regime, where the paper looks closer."""
    return [Case(scale.network, scale.regimes[0], data) for data in scale.streams]


def papers_rate(scale: Scale, case: Case, method: str) -> float:
    """The learning rate that the paper's search found; where it says nothing, the first of the grid.

    Example:
        >>> from mooring.paper.context.scale import PAPER
        >>> papers_rate(PAPER, PAPER.cases()[1], "si")
        0.003
    """
    told = published_setting(case.network, case.regime.name, case.data, method)
    return scale.lrs[0] if told is None else told.lr


def over_seeds(results: Iterable[Result]) -> list[Row]:
    """One row for each setting, also where seeds start from different backbones; every result stays as it is.

    Example:
        >>> from mooring.lab.model.spec import RunSpec
        >>> specs = [RunSpec("digits", "0", "si", seed, strength=1.0, init="ab"[seed]) for seed in (0, 1)]
        >>> [row] = over_seeds(Result(spec, "finished", "", [10.0], [[90.0]]) for spec in specs)
        >>> [result.spec.init for result in row.results]
        ['a', 'b']
    """
    known = {replace(result.spec, init=""): result for result in results}
    rows = summarize(replace(result, spec=spec) for spec, result in known.items())
    return [replace(row, results=tuple(known[result.spec] for result in row.results)) for row in rows]


def unstable_in(row: Row) -> int:
    """How many seeds of a setting became unstable."""
    return sum(result.status == "unstable" for result in row.results)


def bounds(found: Interval | None) -> str | None:
    """The 95 % interval of a mean; None where there is none.

    Example:
        >>> bounds(Interval(71.5, 0.25, 71.0, 72.0, 4))
        '71.00 to 72.00'
    """
    return None if found is None or math.isnan(found.low) else f"{found.low:.2f} to {found.high:.2f}"
