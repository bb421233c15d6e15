"""Case 2: lr * strength * importance >= 1. Who violates the bound, when training breaks, and clamping."""

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import REGULARIZERS, Case, Scale
from mooring.paper.context.seed_rows import first_cases, over_seeds, papers_rate, unstable_in
from mooring.paper.figures.violation_metrics import (
    FALLEN,
    Found,
    after_first,
    broke,
    fewest_violations,
    parameters_of,
    share_violating,
    violated,
    violations_in,
)
from mooring.paper.figures.violations_figure import draw
from mooring.paper.published.published_numbers import Setting, published_violations

__all__ = ["count", "lattice", "run"]

SEEDS = 3
"""Of each strength, at most: what is looked for is where training breaks, which a finer range says more about."""

BELOW, ABOVE = 1, 2
"""Decades of strength around the first violation."""


def count(scale: Scale) -> int:
    """How many models it trains at most: some to find the range of each method, then the range, clamped and not.

    Example:
        >>> from mooring.paper.context.scale import MINIATURE, PAPER
        >>> count(MINIATURE), count(PAPER)
        (120, 972)
    """
    strengths = per_decade(scale) * (BELOW + ABOVE) + 1
    return len(REGULARIZERS) * len(scale.streams) * (1 + 2 * strengths) * _seeds(scale)


def _seeds(scale: Scale) -> int:
    return min(scale.seeds, SEEDS)


def per_decade(scale: Scale) -> int:
    """How many strengths a decade has: four, and fewer where there are few seeds."""
    return min(scale.seeds, 4)


def lattice(first: float, each: int) -> list[float]:
    """Strengths around that of the first violation: powers of ten and so many per decade, with three digits.

    They do not depend on the last digits of what was measured: another machine trains the same runs.

    Example:
        >>> lattice(73.1, 2)
        [3.16, 10.0, 31.6, 100.0, 316.0, 1000.0, 3160.0]
    """
    start = math.floor(each * math.log10(first))
    return [float(f"{10 ** (k / each):.3g}") for k in range(start - each * BELOW, start + each * ABOVE + 1)]


def run(lab: Laboratory) -> Finding:
    """How many parameters violate the bound at each strength, where training breaks, and whether clamping mends it."""
    columns = [(case, method) for case in first_cases(lab.scale) for method in REGULARIZERS]
    rates = {(case, method): papers_rate(lab.scale, case, method) for case, method in columns}
    weakest, seeds = min(lab.scale.strengths), range(_seeds(lab.scale))
    # Importance after the first task does not depend on the strength: any run tells where its first violation is.
    tried = {c: [lab.spec(*c, seed, Setting(rates[c], weakest)) for seed in seeds] for c in columns}
    probes = lab.run([spec for some in tried.values() for spec in some], decides=True)
    wanted = {}
    for column, some in tried.items():
        told = [probes[spec].stability for spec in some]
        first = min((each[0].safe_strength for each in told if each), default=math.inf)
        strengths = lattice(first, per_decade(lab.scale)) if math.isfinite(first) else []
        wanted[column] = [Setting(rates[column], strength) for strength in strengths]
    specs = [
        lab.spec(case, name, seed, setting)
        for (case, method), settings in wanted.items()
        for name in (method, f"clamped-{method}")
        for setting in settings
        for seed in seeds
    ]
    results = lab.run(specs)
    rows = {(row.setting.data, row.setting.method, row.setting.strength): row for row in over_seeds(results.values())}
    found, lost = [], []
    for (case, method), settings in wanted.items():
        data = lab.trained(case.data).fingerprint
        both = [[rows[data, name, each.strength] for each in settings] for name in (method, f"clamped-{method}")]
        if settings:
            found.append(Found(case, method, *both))
        else:
            lost.append(f"{method} on {case.data}")
    by_case = {case: [each for each in found if each.case == case] for case in first_cases(lab.scale)}
    tables = [table for case, some in by_case.items() if some for table in _tables(case, some)]
    every = list({**probes, **results}.values())
    return Finding("fig-violations", _said(found, lost), tables, every, partial(draw, by_case))


def _tables(case: Case, found: Sequence[Found]) -> list[Table]:
    """Where training first broke, beside the paper; then every strength."""
    first = [_breaking(each) for each in found]
    rows: list[dict[str, Any]] = []
    for each in found:
        for row, clamped in zip(each.rows, each.clamped, strict=True):
            strength = float(row.setting.strength or 0)
            told = [verdict for verdict in map(after_first, row.results) if verdict is not None]
            rows.append(
                {
                    "method": each.method,
                    "strength": f"{strength:g}",
                    "of first violation": f"{strength / each.first_violation:.3g}",
                    "violating": f"{fmean(map(violations_in, told)):g}" if told else None,
                    "violating, %": f"{share_violating(row):.3g}",
                    "beyond divergence": f"{fmean(one.diverge - one.negative for one in told):g}" if told else None,
                    "unstable": f"{unstable_in(row)} of {len(row.results)}",
                    "accuracy": _accuracy(row),
                    "clamped, unstable": f"{unstable_in(clamped)} of {len(clamped.results)}",
                    "clamped, accuracy": _accuracy(clamped),
                }
            )
    return [
        Table(f"{case}: where training first became unstable", list(first[0]), first),
        Table(f"{case}: violations after the first task, means over seeds", list(rows[0]), rows),
    ]


def _breaking(found: Found) -> dict[str, Any]:
    broken = found.broken
    clamped = [f"{row.setting.strength:g}" for row in found.clamped if any(map(broke, row.results))]
    told: dict[str, Any] = {
        "method": found.method,
        "lr": f"{found.rows[0].setting.lr:g}",
        "first violation at": f"{found.first_violation:.3g}",
        "unstable from": None if broken is None else f"{broken.setting.strength:g}",
        "times the first violation": None,
        "violating then": None if broken is None else fewest_violations(broken),
        "paper's violating then": published_violations(found.case.data, found.method),
        "fallen from": f"{found.fallen[0].setting.strength:g}" if found.fallen else None,
        "parameters": max(parameters_of(each) for row in found.rows for each in map(after_first, row.results) if each),
        "clamped, unstable from": clamped[0] if clamped else None,
    }
    if broken is not None:
        told["times the first violation"] = f"{(broken.setting.strength or 0) / found.first_violation:.3g}"
    return told


def _accuracy(row: Row) -> str | None:
    return str(row.metrics["accuracy"]) if row.metrics else None


def _said(found: Sequence[Found], lost: Sequence[str]) -> list[str]:
    text = []
    if lost:
        text.append(
            f"No range of strengths, because no importance was measured after the first task: {', '.join(lost)}."
        )
    runs = [result for each in found for row in each.rows for result in row.results]
    text.append(f"{len({result.spec.seed for result in runs})} seeds of every strength, with and without clamping.")
    early = sum(result.status == "unstable" and not result.stability for result in runs)
    if early:
        text.append(
            f"{early} runs became unstable within the first task, before there was a penalty; they do not count."
        )
    broken = [result for result in runs if broke(result)]
    text += (
        [_before(broken), _after(runs)] if broken else [f"None of {len(runs)} runs without clamping became unstable."]
    )
    text.append(_clamping(found))
    fallen = [row for each in found for row in each.fallen]
    if fallen:
        silent = sum(not unstable_in(row) for row in fallen)
        text.append(
            f"At {len(fallen)} settings a run finished more than {FALLEN:g} points below its clamped self, and at "
            f"{silent} of them no run counts as unstable: accuracy can fall long before anything is infinite."
        )
    for each in found:
        row, paper = each.broken, published_violations(each.case.data, each.method)
        beside = "" if paper is None else f" (the paper: {paper} of 1.2 million)"
        where = f"{each.case.data}, {each.method}: the first parameter violates at strength {each.first_violation:.3g}"
        if row is None:
            text.append(f"{where}; no run became unstable, up to strength {each.rows[-1].setting.strength:g}.")
        else:
            weakest = ", the weakest tried," if row is each.rows[0] else ""
            text.append(
                f"{where}; training first became unstable at {row.setting.strength:g}{weakest} with "
                f"{pluralize(fewest_violations(row), 'violating parameter')} in the run that had the fewest{beside}."
            )
    return text


def _before(broken: Sequence[Result]) -> str:
    """Whether instability starts only after the first violation."""
    without = [result for result in broken if not violations_in(after_first(result))]
    told = f"{len(broken)} runs without clamping became unstable"
    if not without:
        return f"{told}, every one with a violation after its first task: none before, as the paper says."
    later = sum(map(violated, without))
    return (
        f"{told}; {len(without)} of them had no violation after the first task, unlike the paper's: {later} of these "
        "had one after a later task, before they became unstable."
    )


def _after(runs: Sequence[Result]) -> str:
    """Whether a violation is enough for instability."""
    violating = [result for result in runs if violations_in(after_first(result))]
    broken = [result for result in violating if broke(result)]
    stable = [violations_in(after_first(result)) for result in violating if not broke(result)]
    if not stable:
        return f"Every one of {len(violating)} runs with a violation became unstable."
    momentum = runs[0].spec.momentum
    limit = 2 * (1 + momentum)  # of gradient descent with heavy-ball momentum
    beyond = sum(each.largest >= limit for result in broken for each in result.stability[:1])
    return (
        f"Of {len(violating)} runs with a violation after the first task {len(broken)} became unstable and "
        f"{len(stable)} did not, with up to {max(stable):,} violating parameters. With momentum {momentum:g} "
        f"a penalty alone diverges from {limit:g} and not from 1: {beyond} of the {len(broken)} had a parameter there."
    )


def _clamping(found: Sequence[Found]) -> str:
    """Whether clamping cures it."""
    pairs = [pair for each in found for pair in zip(each.rows, each.clamped, strict=True)]
    lost = [(row, clamped) for row, clamped in pairs if any(map(broke, row.results))]
    cured = sum(not any(map(broke, clamped.results)) for _, clamped in lost)
    runs = [result for _, clamped in pairs for result in clamped.results]
    told = f"Clamped, {sum(map(broke, runs))} of {len(runs)} runs became unstable"
    return f"{told}; of {len(lost)} settings that are unstable without, clamping cures {cured}." if lost else f"{told}."
