"""Accuracy and forgetting of every method, ours beside the paper's: the main table, and the second network's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mooring.lab.model.metrics import paired_difference
from mooring.lab.model.summary import Row
from mooring.paper.context.cell import METRICS, Cell, cell
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import CONTROLS, REPLAY, ROWS, Case, Scale
from mooring.paper.context.seed_rows import over_seeds
from mooring.paper.published.published_numbers import PLAINS, Published, Setting, published, published_setting
from mooring.paper.tables.grid_search import found_settings, search

__all__ = ["count_resnet", "count_table1", "resnet", "rows_at_our_settings", "table1"]


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


def _finding(lab: Laboratory, name: str, cases: Sequence[Case], methods: Sequence[str]) -> Finding:
    """Both settings of every case, trained together."""
    every = (*methods, *CONTROLS)
    chosen = {case: found_settings(choices) for case, choices in search(lab, cases, every).items()}
    theirs = {case: _published_settings(case, methods, chosen[case]) for case in cases}
    wanted = [(case, settings) for both in (chosen, theirs) for case, settings in both.items()]
    known = lab.run([spec for case, settings in wanted for spec in _specs(lab, case, settings)])
    tables: list[Table] = []
    cells: dict[tuple[str, ...], dict[str, Any]] = {}
    beaten: list[str] = []
    for case, settings in wanted:
        rows = over_seeds(known[spec] for spec in _specs(lab, case, settings))
        at_papers = settings is not chosen[case]
        beside = [_beside(case, row, at_papers) for row in rows]
        told = [_row(case, row, found) for row, found in zip(rows, beside, strict=True)]
        which = "at the paper's settings" if at_papers else "at our settings"
        if told:
            both = [each for found in beside for each in found.values() if each is not None]
            tables.append(Table(f"{case}, {which}", list(told[0]), told, both))
        cells |= {(str(case), each["method"], each["lr"]): each for each in told}  # once, where both settings are one
        beaten += _beaten(str(case), rows)
    for case, settings in chosen.items():
        if missing := [method for method in every if method not in settings]:
            beaten.append(f"{case}: no setting of {', '.join(missing)} finished the search.")
    text = [*_said(list(cells.values()), tables), *_of_plain(cases), *beaten]
    return Finding(name, text, tables, list(known.values()))


def rows_at_our_settings(lab: Laboratory, cases: Sequence[Case], methods: Sequence[str]) -> dict[Case, list[Row]]:
    """The rows of the tables, each method at what the search found for it."""
    chosen = {case: found_settings(found) for case, found in search(lab, cases, (*methods, *CONTROLS)).items()}
    wanted = {
        case: _specs(lab, case, {name: settings[name] for name in methods if name in settings})
        for case, settings in chosen.items()
    }
    known = lab.run([spec for specs in wanted.values() for spec in specs])
    return {case: over_seeds(known[spec] for spec in specs) for case, specs in wanted.items()}


def _published_settings(case: Case, methods: Sequence[str], ours: Mapping[str, Setting]) -> dict[str, Setting]:
    """The paper's; plain fine-tuning's, which it does not name, is the explicit step's or else our own."""
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


def _beside(case: Case, row: Row, at_papers: bool) -> dict[str, Cell | None]:
    method, found = row.setting.method, row.metrics
    return {metric: cell(case, method, metric, found.get(metric), at_papers=at_papers) for metric in METRICS}


def _row(case: Case, row: Row, beside: Mapping[str, Cell | None]) -> dict[str, Any]:
    """Ours, the paper's, and whether they agree."""
    paper = published(case.network, case.regime.name, case.data, row.setting.method)
    told: dict[str, Any] = {"method": row.label, "lr": f"{row.setting.lr:g}"}
    for metric, found in beside.items():
        ours = row.metrics.get(metric)
        told[metric] = None if ours is None else str(ours)
        told[f"paper's {metric}"] = None if paper is None else _written(paper, metric)
        told[f"{metric} differs by"] = None if found is None else round(found.difference, 2)
        told[f"{metric} agrees"] = None if found is None else found.agrees
    return {**told, "verdict": row.verdict}


def _beaten(case: str, rows: Sequence[Row]) -> list[str]:
    """Which methods are no better than a control without any method at all, seed by seed."""
    found = []
    by_name = {row.setting.method: row for row in rows if not row.unfinished}
    for control in ("frozen", "frozen-after-first"):
        if control not in by_name:
            continue
        base = {result.spec.seed: result.metrics["accuracy"] for result in by_name[control].results}
        worse: list[str] = []
        no_better: list[str] = []
        for name, row in by_name.items():
            ours = [result.metrics["accuracy"] for result in row.results]
            apart = paired_difference(ours, [base[result.spec.seed] for result in row.results])
            if name not in CONTROLS and apart.low <= 0:  # of one seed there is no interval, and nothing to say
                (worse if apart.high < 0 else no_better).append(name)
        if worse:
            found.append(f"{case}: the control {control} is surely more accurate than {', '.join(worse)}.")
        if no_better:
            named = ", ".join(no_better)
            found.append(f"{case}: with {len(base)} seeds {named} cannot be told to be more accurate than {control}.")
    return found


def _written(paper: Published, metric: str) -> str:
    mean, std = getattr(paper, metric), getattr(paper, f"{metric}_std")
    return f"{mean:g}" if std is None else f"{mean:g} ± {std:g}"


def _of_plain(cases: Sequence[Case]) -> list[str]:
    """What stands for plain fine-tuning's setting, where the paper has settings at all."""
    named = [published_setting(case.network, case.regime.name, case.data, "explicit-ewc") for case in cases]
    return [PLAINS] if any(named) else []


def _said(cells: Sequence[Mapping[str, Any]], tables: Sequence[Table]) -> list[str]:
    """How many agree, and why others were not judged."""
    decided, why = [], Counter[str]()
    for told, metric in product(cells, METRICS):
        verdict, theirs = told[f"{metric} agrees"], told[f"paper's {metric}"]
        if verdict is not None:
            decided.append(verdict)
        elif theirs is None:
            why["the paper has no number"] += 1
        elif told[metric] is None:
            why["no run of ours finished"] += 1
        else:
            why["there is no standard deviation"] += 1
    text = []
    if decided:
        others = "".join(f"; for {count} {reason}" for reason, count in why.items())
        text.append(
            f"{sum(decided)} of {len(decided)} cells agree with the paper within the 95 % interval of the difference"
            f"{others}."
        )
    unstable = [f"{cell['method']} ({table.title})" for table in tables for cell in table.rows if cell["verdict"]]
    if unstable:
        text.append(f"Not all seeds finished: {', '.join(unstable)}.")
    return text
