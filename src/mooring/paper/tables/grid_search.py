"""The grid search: learning rate and strength of every method, on the first tasks of every data set."""

from collections.abc import Sequence

from mooring.lab.methods import find_method
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.protocol import Choice, choices_of
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import CONTROLS, ROWS, Case, Scale
from mooring.paper.published.published_numbers import Setting, published_setting

__all__ = ["cases", "count", "found_settings", "run", "search"]

METHODS = (*ROWS, *CONTROLS)


def count(scale: Scale) -> int:
    """How many models the search trains.

    Example:
        >>> from mooring.paper.context.scale import PAPER
        >>> count(PAPER)  # 2 regimes and a second network, 3 data sets, 350 settings each
        3150
    """
    strong = sum(find_method(name).has_strength for name in METHODS)
    each = len(scale.lrs) * (strong * len(scale.strengths) + len(METHODS) - strong)
    return each * len(cases(scale))


def cases(scale: Scale) -> list[Case]:
    """Those of both tables, each once."""
    return list(dict.fromkeys([*scale.cases(), *scale.other_cases()]))


def search(lab: Laboratory, of: Sequence[Case], methods: Sequence[str] = METHODS) -> dict[Case, list[Choice]]:
    """What was best on the searched tasks, for each case and method. All cases are trained together.

    Settings whose penalty does not interpolate everywhere after the first task are rejected there and then.
    """
    specs = {case: _specs(lab, case, methods) for case in of}
    known = lab.run([spec for some in specs.values() for spec in some], reject=True, decides=True)
    return {case: choices_of(str(case), [known[spec] for spec in some], methods) for case, some in specs.items()}


def found_settings(choices: Sequence[Choice]) -> dict[str, Setting]:
    """The setting of each method for which one was found."""
    best = {choice.method: choice.best.setting for choice in choices if choice.best is not None}
    return {method: Setting(spec.lr, spec.strength) for method, spec in best.items()}


def run(lab: Laboratory) -> Finding:
    """What the search found, beside what the paper's found."""
    found = search(lab, cases(lab.scale))
    tables, results, tried, dropped, same, told = [], [], 0, 0, 0, 0
    for case, choices in found.items():
        rows = []
        for choice in choices:
            results += [result for row in choice.grid for result in row.results]
            tried, dropped = tried + len(choice.grid), dropped + len(choice.dropped)
            theirs = published_setting(case.network, case.regime.name, case.data, choice.method)
            ours = None if choice.best is None else choice.best.setting
            told += theirs is not None
            same += theirs is not None and ours is not None and (ours.lr, ours.strength) == (theirs.lr, theirs.strength)
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
        tables.append(Table(str(case), list(rows[0]), rows))
    text = [
        f"{tried} settings were tried on the first {lab.scale.search_tasks} tasks, one seed each; {dropped} of them "
        "were dropped, because a penalty did not interpolate everywhere or training became unstable."
    ]
    if told:
        text.append(f"In {same} of {told} cells learning rate and strength are exactly the paper's.")
    if ties := [f"{case}, {_tie(choice)}" for case, some in found.items() for choice in some if choice.as_good]:
        text.append(
            f"In {len(ties)} cells others were exactly as good, and the first was taken, which has the largest "
            f"learning rate and then the smallest strength: {'; '.join(ties)}."
        )
    return Finding("grids", text, tables, results)


def _tie(choice: Choice) -> str:
    """What was taken, and what was as good; many in a few words."""
    best, *others = (_named(row.setting) for row in (choice.best, *choice.as_good) if row is not None)
    named = " or ".join(others) if len(others) < 4 else f"{others[0]} or {len(others) - 1} more"
    return f"{choice.method}: {best}, not {named}"


def _named(setting: RunSpec) -> str:
    return f"lr {setting.lr:g}" + ("" if setting.strength is None else f" with strength {setting.strength:g}")


def _specs(lab: Laboratory, case: Case, methods: Sequence[str]) -> list[RunSpec]:
    made = []
    for method in methods:
        strengths: Sequence[float | None] = lab.scale.strengths if find_method(method).has_strength else (None,)
        for lr in lab.scale.lrs:
            made += [lab.spec(case, method, 0, Setting(lr, strength), search=True) for strength in strengths]
    return made
