"""What there is to reproduce, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooring.errors import unknown
from mooring.paper.ablations import reasons
from mooring.paper.claims import claims_table as claims
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding
from mooring.paper.context.scale import Case, Scale
from mooring.paper.context.seed_rows import first_cases
from mooring.paper.figures import cka, effective_lr, roots, violations
from mooring.paper.figures import importance_by_layer as importance
from mooring.paper.figures import negative_importance as negative
from mooring.paper.tables import accuracy_tables as tables
from mooring.paper.tables import grid_search as grids

__all__ = ["TARGETS", "Target", "chosen"]


@dataclass(frozen=True)
class Target:
    """A table, a figure or a claim.

    Attributes:
        name: what it is called.
        line: what it shows, in one line.
        count: how many models it trains at a scale; those of the grid search count there.
        run: trains them and says what came out.
        needs: the targets whose runs it reads.
        cases: what it trains on, as many models on each.
        search: whether on the searched tasks or on the others.
    """

    name: str
    line: str
    count: Callable[[Scale], int]
    run: Callable[[Laboratory], Finding]
    needs: tuple[str, ...] = ()
    cases: Callable[[Scale], list[Case]] = first_cases
    search: bool = False


READ = ("grids", "table1", "resnet", "fig-negative", "fig-violations", "fig-importance", "fig-cka", "roots")
"""What the claims are decided by."""

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "grids",
            "the hyper-parameters found, beside the paper's",
            grids.count,
            grids.run,
            cases=grids.cases,
            search=True,
        ),
        Target(
            "table1",
            "accuracy and forgetting of every method",
            tables.count_table1,
            tables.table1,
            ("grids",),
            Scale.cases,
        ),
        Target(
            "resnet",
            "the same with the second network",
            tables.count_resnet,
            tables.resnet,
            ("grids",),
            Scale.other_cases,
        ),
        Target("fig-negative", "SI with scores below 0: stable or not", negative.count, negative.run),
        Target("fig-violations", "who extrapolates, and when training breaks", violations.count, violations.run),
        Target("fig-importance", "mean importance by layer", importance.count, importance.run),
        Target("fig-cka", "how alike layers stay, balanced or not", cka.count, cka.run, ("grids",)),
        Target("roots", "square root, cube root and plain ratio in the explicit step", roots.count, roots.run),
        Target("effective-lr", "the unrolled form against the iterates", effective_lr.count, effective_lr.run),
        Target("reasons", "what moves a cell: one thing changed at a time", reasons.count, reasons.run),
        Target("claims", "each claim of the paper, and what our runs say of it", claims.count, claims.run, READ),
    )
}


def chosen(names: Sequence[str]) -> list[Target]:
    """The targets of these names; "all" stands for every one.

    Example:
        >>> [target.name for target in chosen(["table1", "all"])][:3]
        ['table1', 'grids', 'resnet']
    """
    found: dict[str, Target] = {}
    for name in names:
        if name != "all" and name not in TARGETS:
            raise unknown("target", name, [*TARGETS, "all"])
        found |= TARGETS if name == "all" else {name: TARGETS[name]}
    return list(found.values())
