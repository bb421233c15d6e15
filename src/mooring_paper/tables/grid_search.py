"""The grid search: learning rate and strength of every method, on the first tasks of every data set."""

from collections.abc import Sequence

from mooring_lab.methods import find_method
from mooring_lab.model.metrics import SCORE_TOLERANCE
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row
from mooring_lab.study.protocol import Choice, choose_settings, search_score
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import CONTROLS, ROWS, Condition, Scale
from mooring_paper.context.seed_statistics import summarize_seeds
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.published.published_numbers import Setting, published_setting

SEARCHED_METHODS = (*ROWS, *CONTROLS)
MAX_NAMED_TIES = 3

RESCORE_MARGIN = 3.0
"""Points of accuracy below the best within which a setting may be better with other seeds."""

MAX_CANDIDATES = 5
"""Settings of a method that are scored again."""


def count_settings(scale: Scale) -> int:
    """Return how many models the search trains under each condition at most; one for each of 350 settings in the paper.

    Example:
        >>> from dataclasses import replace
        >>> from mooring_paper.context.scale import PAPER
        >>> count_settings(PAPER), count_settings(replace(PAPER, rescore_seeds=3))
        (350, 510)
    """
    strengths = [len(scale.strengths) if find_method(m).has_strength else 1 for m in SEARCHED_METHODS]
    grids = [len(scale.lrs) * count for count in strengths]
    return sum(grids) + (scale.rescore_seeds - 1) * sum(min(size, MAX_CANDIDATES) for size in grids)


def search_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of both tables, without duplicates."""
    return list(dict.fromkeys([*scale.conditions(), *scale.second_conditions()]))


def search(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str] = SEARCHED_METHODS
) -> dict[Condition, list[Choice]]:
    """Return the settings to use, by condition.

    They are those of `search_grid`, unless the scale has several `rescore_seeds`: then the best settings of each method
    are run with that many seeds, and the one with the highest mean accuracy is chosen among those that every seed
    finished. Several settings are scored again if they are within `RESCORE_MARGIN` of the best, at most
    `MAX_CANDIDATES`. A method of which one setting is that good, or of which no setting finishes with every seed, keeps
    the choice of one seed.
    """
    grids = search_grid(context, conditions, methods)
    seeds = range(context.scale.rescore_seeds)
    if len(seeds) == 1:
        return grids
    specs = {
        condition: [
            context.spec(condition, choice.method, seed, Setting(row.setting.lr, row.setting.strength), search=True)
            for choice in choices
            for row in _candidates(choice)
            for seed in seeds
        ]
        for condition, choices in grids.items()
    }
    known = context.run([spec for group in specs.values() for spec in group], reject=True, decides=True)
    return {
        condition: [_rescore(choice, [known[spec] for spec in specs[condition]]) for choice in choices]
        for condition, choices in grids.items()
    }


def search_grid(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str] = SEARCHED_METHODS
) -> dict[Condition, list[Choice]]:
    """Return the best settings on the searched tasks by the paper's protocol: one seed for each setting of the grid.

    All conditions are trained together. Settings whose penalty does not interpolate everywhere after the first task are
    rejected at that point.
    """
    specs = {condition: _specs(context, condition, methods) for condition in conditions}
    known = context.run([spec for grid in specs.values() for spec in grid], reject=True, decides=True)
    return {
        condition: choose_settings(str(condition), [known[spec] for spec in grid], methods)
        for condition, grid in specs.items()
    }


def _candidates(choice: Choice) -> list[Row]:
    """Return the settings to score again, best first; none if only one is close to the best."""
    finished = [row for row in choice.grid if not row.unfinished]
    ranked = sorted(finished, key=lambda row: -search_score(row))  # stable: the order of the grid at a tie
    limit = search_score(ranked[0]) - RESCORE_MARGIN - SCORE_TOLERANCE if ranked else 0.0
    close = [row for row in ranked[:MAX_CANDIDATES] if search_score(row) >= limit]
    return close if len(close) > 1 else []


def _rescore(choice: Choice, results: Sequence[Result]) -> Choice:
    """Return the choice among the settings that were scored again; the same choice if none of them finished."""
    rows = summarize_seeds(result for result in results if result.spec.method == choice.method)
    # In the order of the grid, which decides between equal settings as in the search.
    order = {(row.setting.lr, row.setting.strength): index for index, row in enumerate(choice.grid)}
    rows = sorted(rows, key=lambda row: order[row.setting.lr, row.setting.strength])
    finished = [row for row in rows if not row.unfinished]
    best = max(finished, key=search_score, default=None)
    return choice if best is None else Choice(choice.stream, choice.method, best, tuple(rows))


def best_settings(choices: Sequence[Choice]) -> dict[str, Setting]:
    """Return the best setting of each method; methods of which no setting finished are left out."""
    best = {choice.method: choice.best.setting for choice in choices if choice.best is not None}
    return {method: Setting(spec.lr, spec.strength) for method, spec in best.items()}


def run(context: PaperContext) -> TargetResult:
    """Compare the settings of our search with those of the paper's."""
    conditions, scale = search_conditions(context.scale), context.scale
    grids, chosen = search_grid(context, conditions), search(context, conditions)
    tables, ties, tried, dropped, equal, comparable, rescored, changed = [], list[str](), 0, 0, 0, 0, 0, 0
    results: dict[RunSpec, Result] = {}
    for condition, choices in grids.items():
        rows = []
        for first, choice in zip(choices, chosen[condition], strict=True):
            results |= {result.spec: result for row in (*first.grid, *choice.grid) for result in row.results}
            ties += [f"{condition}, {_tie(choice)}"] if choice.as_good else []
            tried, dropped = tried + len(first.grid), dropped + len(first.dropped)
            theirs = published_setting(condition.network, condition.regime.name, condition.data, choice.method)
            ours = None if choice.best is None else choice.best.setting
            if theirs is not None:
                comparable += 1
                equal += ours is not None and (ours.lr, ours.strength) == (theirs.lr, theirs.strength)
            row = {
                "method": choice.method,
                "lr": None if ours is None else f"{ours.lr:g}",
                "strength": None if ours is None or ours.strength is None else f"{ours.strength:g}",
                "paper's lr": None if theirs is None else f"{theirs.lr:g}",
                "paper's strength": None if theirs is None or theirs.strength is None else f"{theirs.strength:g}",
                "tried": len(first.grid),
                "dropped": len(first.dropped),
                "as good": len(choice.as_good) or None,
            }
            if scale.rescore_seeds > 1:
                candidates = len(_candidates(first))
                differs = best_settings([first]) != best_settings([choice])
                rescored, changed = rescored + bool(candidates), changed + differs
                row |= {"scored again": candidates or None, "with one seed": _name(first.best) if differs else None}
            rows.append(row)
        tables.append(ResultTable(str(condition), list(rows[0]), rows))
    text = [
        f"The search tried {tried} settings on the first {scale.search_tasks} tasks, with one seed each. It dropped "
        f"{dropped} of them because a penalty did not interpolate everywhere or training became unstable.",
        _protocol(scale, rescored, changed),
    ]
    if comparable:
        text.append(f"In {equal} of {comparable} cells, learning rate and strength equal the paper's.")
    if ties:
        text.append(
            f"In {len(ties)} cells, several settings had the same accuracy. The first was chosen: the one with the "
            f"largest learning rate, then the smallest strength. These are: {'; '.join(ties)}."
        )
    return TargetResult("grids", text, tables, list(results.values()))


def _protocol(scale: Scale, rescored: int, changed: int) -> str:
    """Return what follows the paper and what does not."""
    exact = f"Grid, searched tasks (the first {scale.search_tasks}) and one seed for each setting are the paper's"
    if scale.rescore_seeds == 1:
        return f"{exact}, and so is the choice: the most accurate setting. A choice by one seed is partly luck."
    return (
        f"{exact}; the choice is not. For each method, settings within {RESCORE_MARGIN:g} points of the best, at most "
        f"{MAX_CANDIDATES}, are run with {scale.rescore_seeds} seeds, and the one with the highest mean is used "
        f"everywhere. {rescored} cells had several such settings; in {changed} of them this changed the choice. A cell "
        "keeps the choice of one seed if no such setting finished with every seed."
    )


def _tie(choice: Choice) -> str:
    best, *others = (_name(row) for row in (choice.best, *choice.as_good))
    many = len(others) > MAX_NAMED_TIES
    names = f"{others[0]} or {len(others) - 1} more" if many else " or ".join(map(str, others))
    return f"{choice.method}: {best}, not {names}"


def _name(row: Row | None) -> str | None:
    """Return a setting as text; None without one."""
    if row is None:
        return None
    strength = row.setting.strength
    return f"lr {row.setting.lr:g}" + ("" if strength is None else f" with strength {strength:g}")


def _specs(context: PaperContext, condition: Condition, methods: Sequence[str]) -> list[RunSpec]:
    specs = []
    for method in methods:
        strengths: Sequence[float | None] = context.scale.strengths if find_method(method).has_strength else (None,)
        for lr in context.scale.lrs:
            specs += [context.spec(condition, method, 0, Setting(lr, s), search=True) for s in strengths]
    return specs
