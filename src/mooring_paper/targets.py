"""The targets of `mooring paper`: what they are, and how several are trained together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooring.errors import MooringError, unknown
from mooring_paper import ablations
from mooring_paper.claims import claims_table, stand_in
from mooring_paper.context.paper_context import MissingRuns, PaperContext
from mooring_paper.context.target_result import TargetResult
from mooring_paper.figures import (
    backbone_accuracy,
    cka,
    effective_lr,
    importance_by_layer,
    negative_importance,
    roots,
    violations,
)
from mooring_paper.published.numbering import ITEM_NAMES, PaperItem, find_item
from mooring_paper.tables import accuracy_tables, as_published, grid_search


@dataclass(frozen=True)
class Target:
    """A table, a figure or the list of claims.

    Attributes:
        name: its name on the command line.
        summary: what it shows, in one line.
        run: trains its models and returns the result.
        needs: the targets whose runs it reads.
        networks: the fields of a scale that name the networks whose backbones its own runs start from.
    """

    name: str
    summary: str
    run: Callable[[PaperContext], TargetResult]
    needs: tuple[str, ...] = ()
    networks: tuple[str, ...] = ("network",)


_CLAIM_SOURCES = ("grids", "table1", "resnet", "fig-negative", "fig-violations", "fig-importance", "fig-cka", "roots")
_SECOND = ("second_network",)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "grids",
            "the hyper-parameters of our grid search and the paper's",
            grid_search.run,
            networks=("network", "second_network"),
        ),
        Target("table1", "accuracy and forgetting of every method", accuracy_tables.table1, ("grids",)),
        Target("resnet", "the same table with the second network", accuracy_tables.resnet, ("grids",), _SECOND),
        Target("fig-negative", "stability of SI with negative importance", negative_importance.run),
        Target("fig-violations", "violations of the stability bound, instability and clamping", violations.run),
        Target("fig-importance", "mean importance by layer", importance_by_layer.run),
        Target("fig-cka", "CKA by layer, with and without balanced importance", cka.run, ("grids",)),
        Target("roots", "square root, cube root and plain ratio in the explicit step", roots.run),
        Target("effective-lr", "the unrolled form against the iterates", effective_lr.run, networks=()),
        Target(
            "fig-backbone",
            "forgetting and accuracy against the backbone's accuracy",
            backbone_accuracy.run,
            networks=(),
        ),
        Target(
            "as-published",
            "both tables with the definitions of the authors' public code",
            as_published.run,
            networks=("network", "code_network"),
        ),
        Target("stand-in", "both regimes on Caltech-101, which stands in for Caltech-256", stand_in.run),
        Target("reasons", "why cells differ from the paper: one change at a time", ablations.run),
        Target("claims", "the paper's claims, tested by our runs", claims_table.run, _CLAIM_SOURCES),
    )
}


def select_targets(names: Sequence[str], missing_data: Sequence[str] = ()) -> list[Target]:
    """Return the targets with these names, without duplicates; "all" stands for every target.

    A name may also be a number of the paper, such as "fig3" or "table2".

    Args:
        names: names of targets, or numbers of the paper.
        missing_data: data sets that this reproduction does not have.

    Raises:
        MooringError: if a name is unknown, is a formula without runs, or shows only missing data sets.

    Example:
        >>> [target.name for target in select_targets(["table1", "all"])][:3]
        ['table1', 'grids', 'resnet']
        >>> [target.name for target in select_targets(["fig3", "Table 2"])]
        ['fig-importance', 'grids']
    """
    selected: dict[str, Target] = {}
    for name in names:
        if name == "all":
            selected |= TARGETS
        elif name in TARGETS:
            selected[name] = TARGETS[name]
        elif (item := find_item(name)) is None:
            raise unknown("target", name, [*TARGETS, "all", *ITEM_NAMES])
        elif not item.target:
            raise MooringError(f"{item.name}, {item.subject}, is a formula without runs: {item.function} computes it")
        elif lacks_data(item, missing_data):
            raise MooringError(f"{item.name}, {item.subject}, needs {' or '.join(item.data)}: put it into --data")
        else:
            selected[item.target] = TARGETS[item.target]
    return list(selected.values())


def lacks_data(item: PaperItem, missing_data: Sequence[str]) -> bool:
    """Return whether an item shows only data sets that are missing."""
    return bool(item.data) and set(item.data) <= set(missing_data)


def run_targets(targets: Sequence[Target], context: PaperContext) -> list[TargetResult]:
    """Return the results of targets, in order.

    Every target requests the runs that it needs next. All requested runs are trained together, and this repeats until
    no target needs more. Fleets are therefore as large as possible, and targets share first-task work. Runs that decide
    which other runs are needed, such as those of a search, are trained before the others, so that the others form one
    batch.

    Example:
        >>> import tempfile
        >>> from mooring_lab.study.study import Study
        >>> from mooring_paper.context.scale import MINIATURE
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     context = PaperContext(Study(f"{folder}/paper.sqlite"), MINIATURE.with_data(None))
        ...     [result.name for result in run_targets(select_targets(["effective-lr"]), context)]
        ['effective-lr']
    """
    context.defers_training = True
    results: dict[str, TargetResult] = {}
    try:
        while pending := [target for target in targets if target.name not in results]:
            requests: list[MissingRuns] = []
            for target in pending:
                try:
                    results[target.name] = context.kept_targets.get(target.name) or target.run(context)
                except MissingRuns as request:
                    requests.append(request)
            context.train([request for request in requests if request.decides] or requests)
    finally:
        context.defers_training = False
    return [results[target.name] for target in targets]
