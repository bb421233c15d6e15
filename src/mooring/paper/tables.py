"""Accuracy and forgetting of every method, ours beside the paper's: the main table, and the second network's."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from mooring.lab.metrics import Interval, paired_difference
from mooring.lab.summary import Row
from mooring.paper.finding import Finding, Table
from mooring.paper.grids import found_settings, search
from mooring.paper.laboratory import Laboratory
from mooring.paper.published import Published, Setting, published, published_setting
from mooring.paper.rows import over_seeds
from mooring.paper.scale import CONTROLS, REPLAY, ROWS, Case, Scale

__all__ = ["agrees", "count_resnet", "count_table1", "resnet", "rows_at_our_settings", "table1"]

PAPERS_SEEDS = 5


def count_table1(scale: Scale) -> int:
    """How many models it trains, the grid search aside: every row at our settings and at the paper's."""
    return (2 * len(ROWS) + len(CONTROLS)) * scale.seeds * len(scale.cases())


def count_resnet(scale: Scale) -> int:
    """The same for the second network, where the paper has no replay."""
    rows = [name for name in ROWS if name not in REPLAY]
    return (2 * len(rows) + len(CONTROLS)) * scale.seeds * len(scale.other_cases())


def table1(lab: Laboratory) -> Finding:
    """The main table, at the settings that our search finds and at the paper's."""
    return _finding(lab, "table1", lab.scale.cases(), ROWS)


def resnet(lab: Laboratory) -> Finding:
    """The same with the second network."""
    return _finding(lab, "resnet", lab.scale.other_cases(), [name for name in ROWS if name not in REPLAY])


def agrees(ours: Interval, mean: float, std: float | None) -> bool | None:
    """Whether two means over seeds differ by no more than chance: within the 95 % interval of their difference.

    |ours - theirs| <= t * sqrt(std^2 / n + theirs_std^2 / 5), with Welch's degrees of freedom. None where either has no
    standard deviation.

    Example:
        >>> from mooring.lab.metrics import interval
        >>> ours = interval([63.0, 64.0, 65.0, 64.0, 64.0])
        >>> agrees(ours, 64.5, 0.4), agrees(ours, 60.0, 0.4), agrees(ours, 64.5, None)
        (True, False, None)
    """
    if std is None or not math.isfinite(ours.std):
        return None
    mine, theirs = ours.std**2 / ours.count, std**2 / PAPERS_SEEDS
    if not mine + theirs:
        return ours.mean == mean
    freedom = (mine + theirs) ** 2 / (mine**2 / (ours.count - 1) + theirs**2 / (PAPERS_SEEDS - 1))
    return bool(abs(ours.mean - mean) <= float(stdtrit(freedom, 0.975)) * math.sqrt(mine + theirs))


def _finding(lab: Laboratory, name: str, cases: Sequence[Case], methods: Sequence[str]) -> Finding:
    """Both settings of every case, trained together."""
    every = (*methods, *CONTROLS)
    chosen = {case: found_settings(choices) for case, choices in search(lab, cases, every).items()}
    theirs = {case: _published_settings(case, methods, chosen[case]) for case in cases}
    wanted = [(case, settings) for both in (chosen, theirs) for case, settings in both.items()]
    results = lab.run([spec for case, settings in wanted for spec in _specs(lab, case, settings)])
    known = {result.spec.key: result for result in results}
    tables: list[Table] = []
    cells: list[dict[str, Any]] = []
    beaten: list[str] = []
    for case, settings in wanted:
        rows = over_seeds(known[spec.key] for spec in _specs(lab, case, settings))
        told = [_cell(case, row) for row in rows]
        which = "at our settings" if settings is chosen[case] else "at the paper's settings"
        if told:
            tables.append(Table(f"{case}, {which}", list(told[0]), told))
        cells += told
        beaten += _beaten(str(case), rows)
    for case, settings in chosen.items():
        if missing := [method for method in every if method not in settings]:
            beaten.append(f"{case}: no setting of {', '.join(missing)} finished the search.")
    return Finding(name, [*_said(cells, tables), *beaten], tables, results)


def rows_at_our_settings(lab: Laboratory, cases: Sequence[Case], methods: Sequence[str]) -> dict[Case, list[Row]]:
    """The rows of the tables, each method at what the search found for it."""
    chosen = {case: found_settings(found) for case, found in search(lab, cases, (*methods, *CONTROLS)).items()}
    wanted = {
        case: _specs(lab, case, {name: settings[name] for name in methods if name in settings})
        for case, settings in chosen.items()
    }
    known = {result.spec.key: result for result in lab.run([spec for specs in wanted.values() for spec in specs])}
    return {case: over_seeds(known[spec.key] for spec in specs) for case, specs in wanted.items()}


def _published_settings(case: Case, methods: Sequence[str], ours: Mapping[str, Setting]) -> dict[str, Setting]:
    """The paper's; for what it does not name, such as plain fine-tuning, our own learning rate."""
    found = {}
    for method in methods:
        told = published_setting(case.network, case.regime.name, case.data, method)
        if told is None and method == "plain":
            told = published_setting(case.network, case.regime.name, case.data, "explicit-ewc") or ours.get(method)
        if told is not None:
            found[method] = told
    return found


def _specs(lab: Laboratory, case: Case, settings: Mapping[str, Setting]) -> list[Any]:
    return [
        lab.spec(case, method, seed, setting) for method, setting in settings.items() for seed in range(lab.scale.seeds)
    ]


def _cell(case: Case, row: Row) -> dict[str, Any]:
    """Ours, the paper's, and whether they agree."""
    paper = published(case.network, case.regime.name, case.data, row.setting.method)
    told: dict[str, Any] = {"method": row.label, "lr": f"{row.setting.lr:g}"}
    for metric in ("accuracy", "forgetting"):
        ours = row.metrics.get(metric)
        told[metric] = None if ours is None else str(ours)
        told[f"paper's {metric}"] = None if paper is None else _written(paper, metric)
        told[f"{metric} differs by"] = None
        told[f"{metric} agrees"] = None
        if ours is not None and paper is not None:
            mean, std = getattr(paper, metric), getattr(paper, f"{metric}_std")
            told[f"{metric} differs by"] = round(ours.mean - mean, 2)
            told[f"{metric} agrees"] = agrees(ours, mean, std)
    return {**told, "verdict": row.verdict}


def _beaten(case: str, rows: Sequence[Row]) -> list[str]:
    """Which methods are no better than a control without any method at all, seed by seed."""
    found = []
    by_name = {row.setting.method: row for row in rows if not row.unfinished}
    for control in ("frozen", "frozen-after-first"):
        if control not in by_name:
            continue
        base = {result.spec.seed: result.metrics["accuracy"] for result in by_name[control].results}
        no_better = []
        for name, row in by_name.items():
            ours = [result.metrics["accuracy"] for result in row.results]
            apart = paired_difference(ours, [base[result.spec.seed] for result in row.results])
            if name not in CONTROLS and not apart.low > 0:  # with one seed nothing is certain
                no_better.append(name)
        if no_better:
            found.append(
                f"{case}: {', '.join(no_better)} are no more accurate than {control}, within the 95 % interval."
            )
    return found


def _written(paper: Published, metric: str) -> str:
    mean, std = getattr(paper, metric), getattr(paper, f"{metric}_std")
    return f"{mean:g}" if std is None else f"{mean:g} ± {std:g}"


def _said(cells: Sequence[Mapping[str, Any]], tables: Sequence[Table]) -> list[str]:
    judged = [cell[f"{metric} agrees"] for cell in cells for metric in ("accuracy", "forgetting")]
    decided = [each for each in judged if each is not None]
    text = []
    if decided:
        text.append(
            f"{sum(decided)} of {len(decided)} cells agree with the paper within the 95 % interval of the difference; "
            f"{len(judged) - len(decided)} could not be judged, for want of a standard deviation."
        )
    unstable = [f"{cell['method']} ({table.title})" for table in tables for cell in table.rows if cell["verdict"]]
    if unstable:
        text.append(f"Not all seeds finished: {', '.join(unstable)}.")
    return text
