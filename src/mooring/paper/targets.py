"""The targets of `mooring paper`, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooring.errors import unknown
from mooring.paper import ablations
from mooring.paper.claims import claims_table
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import Condition, Scale
from mooring.paper.context.target_result import TargetResult
from mooring.paper.figures import cka, effective_lr, importance_by_layer, negative_importance, roots, violations
from mooring.paper.tables import accuracy_tables, grid_search

__all__ = ["TARGETS", "Target", "select_targets"]


@dataclass(frozen=True)
class Target:
    """A table, a figure or the list of claims.

    Attributes:
        name: its name on the command line.
        summary: what it shows, in one line.
        count: how many models it trains at a scale; those of the grid search count as the search's.
        run: trains them and returns the result.
        needs: the targets whose runs it reads.
        conditions: what it trains on, with the same number of models for each.
        search: whether it trains on the searched tasks instead of the others.
    """

    name: str
    summary: str
    count: Callable[[Scale], int]
    run: Callable[[PaperContext], TargetResult]
    needs: tuple[str, ...] = ()
    conditions: Callable[[Scale], list[Condition]] = Scale.first_conditions
    search: bool = False


_CLAIM_SOURCES = ("grids", "table1", "resnet", "fig-negative", "fig-violations", "fig-importance", "fig-cka", "roots")

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "grids",
            "the hyper-parameters of our grid search and the paper's",
            grid_search.count,
            grid_search.run,
            conditions=grid_search.search_conditions,
            search=True,
        ),
        Target(
            "table1",
            "accuracy and forgetting of every method",
            accuracy_tables.count_table1,
            accuracy_tables.table1,
            ("grids",),
            Scale.conditions,
        ),
        Target(
            "resnet",
            "the same table with the second network",
            accuracy_tables.count_resnet,
            accuracy_tables.resnet,
            ("grids",),
            Scale.second_conditions,
        ),
        Target(
            "fig-negative",
            "stability of SI with negative importance",
            negative_importance.count,
            negative_importance.run,
        ),
        Target(
            "fig-violations",
            "violations of the stability bound, instability and clamping",
            violations.count,
            violations.run,
        ),
        Target("fig-importance", "mean importance by layer", importance_by_layer.count, importance_by_layer.run),
        Target("fig-cka", "CKA by layer, with and without balanced importance", cka.count, cka.run, ("grids",)),
        Target("roots", "square root, cube root and plain ratio in the explicit step", roots.count, roots.run),
        Target("effective-lr", "the unrolled form against the iterates", effective_lr.count, effective_lr.run),
        Target("reasons", "why cells differ from the paper: one change at a time", ablations.count, ablations.run),
        Target(
            "claims", "the paper's claims, tested by our runs", claims_table.count, claims_table.run, _CLAIM_SOURCES
        ),
    )
}


def select_targets(names: Sequence[str]) -> list[Target]:
    """Return the targets with these names, without duplicates; "all" stands for every target.

    Example:
        >>> [target.name for target in select_targets(["table1", "all"])][:3]
        ['table1', 'grids', 'resnet']
    """
    selected: dict[str, Target] = {}
    for name in names:
        if name != "all" and name not in TARGETS:
            raise unknown("target", name, [*TARGETS, "all"])
        selected |= TARGETS if name == "all" else {name: TARGETS[name]}
    return list(selected.values())
