"""The grid search: learning rate and strength of every method, on the first tasks of every data set."""

from collections.abc import Sequence

from mooring.lab.methods import find_method
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.protocol import Choice, choose_settings
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import CONTROLS, ROWS, Condition, Scale
from mooring.paper.context.target_result import ResultTable, TargetResult
from mooring.paper.published.published_numbers import Setting, published_setting

SEARCHED_METHODS = (*ROWS, *CONTROLS)
MAX_NAMED_TIES = 3


def count_settings(scale: Scale) -> int:
    """Return how many settings the search tries under each condition, with one model each; 350 in the paper."""
    return len(scale.lrs) * sum(len(scale.strengths) if find_method(m).has_strength else 1 for m in SEARCHED_METHODS)


def search_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of both tables, without duplicates."""
    return list(dict.fromkeys([*scale.conditions(), *scale.second_conditions()]))


def search(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str] = SEARCHED_METHODS
) -> dict[Condition, list[Choice]]:
    """Return the best settings on the searched tasks, by condition; all conditions are trained together.

    Settings whose penalty does not interpolate everywhere after the first task are rejected at that point.
    """
    specs = {condition: _specs(context, condition, methods) for condition in conditions}
    known = context.run([spec for grid in specs.values() for spec in grid], reject=True, decides=True)
    return {
        condition: choose_settings(str(condition), [known[spec] for spec in grid], methods)
        for condition, grid in specs.items()
    }


def best_settings(choices: Sequence[Choice]) -> dict[str, Setting]:
    """Return the best setting of each method; methods of which no setting finished are left out."""
    best = {choice.method: choice.best.setting for choice in choices if choice.best is not None}
    return {method: Setting(spec.lr, spec.strength) for method, spec in best.items()}


def run(context: PaperContext) -> TargetResult:
    """Compare the settings of our search with those of the paper's."""
    tables, results, ties, tried, dropped, equal, comparable = [], [], [], 0, 0, 0, 0
    for condition, choices in search(context, search_conditions(context.scale)).items():
        rows = []
        for choice in choices:
            results += [result for row in choice.grid for result in row.results]
            ties += [f"{condition}, {_tie(choice)}"] if choice.as_good else []
            tried, dropped = tried + len(choice.grid), dropped + len(choice.dropped)
            theirs = published_setting(condition.network, condition.regime.name, condition.data, choice.method)
            ours = None if choice.best is None else choice.best.setting
            if theirs is not None:
                comparable += 1
                equal += ours is not None and (ours.lr, ours.strength) == (theirs.lr, theirs.strength)
            rows.append(
                {
                    "method": choice.method,
                    "lr": None if ours is None else f"{ours.lr:g}",
                    "strength": None if ours is None or ours.strength is None else f"{ours.strength:g}",
                    "paper's lr": None if theirs is None else f"{theirs.lr:g}",
                    "paper's strength": None if theirs is None or theirs.strength is None else f"{theirs.strength:g}",
                    "tried": len(choice.grid),
                    "dropped": len(choice.dropped),
                    "as good": len(choice.as_good) or None,
                }
            )
        tables.append(ResultTable(str(condition), list(rows[0]), rows))
    text = [
        f"The search tried {tried} settings on the first {context.scale.search_tasks} tasks, with one seed each. It "
        f"dropped {dropped} of them because a penalty did not interpolate everywhere or training became unstable."
    ]
    if comparable:
        text.append(f"In {equal} of {comparable} cells, learning rate and strength equal the paper's.")
    if ties:
        text.append(
            f"In {len(ties)} cells, several settings had the same accuracy. The first was chosen: the one with the "
            f"largest learning rate, then the smallest strength. These are: {'; '.join(ties)}."
        )
    return TargetResult("grids", text, tables, results)


def _tie(choice: Choice) -> str:
    settings = [row.setting for row in (choice.best, *choice.as_good) if row is not None]
    best, *others = (
        f"lr {s.lr:g}" + ("" if s.strength is None else f" with strength {s.strength:g}") for s in settings
    )
    many = len(others) > MAX_NAMED_TIES
    names = f"{others[0]} or {len(others) - 1} more" if many else " or ".join(others)
    return f"{choice.method}: {best}, not {names}"


def _specs(context: PaperContext, condition: Condition, methods: Sequence[str]) -> list[RunSpec]:
    specs = []
    for method in methods:
        strengths: Sequence[float | None] = context.scale.strengths if find_method(method).has_strength else (None,)
        for lr in context.scale.lrs:
            specs += [context.spec(condition, method, 0, Setting(lr, s), search=True) for s in strengths]
    return specs
