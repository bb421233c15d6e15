"""The targets of `mooring paper`: what they are, what they cost, and how several are trained together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooring.errors import unknown
from mooring_lab.streams.digits import digits
from mooring_lab.streams.options import StreamOptions
from mooring_paper import ablations, changes
from mooring_paper.claims import claims_table
from mooring_paper.context.paper_context import MissingRuns, PaperContext
from mooring_paper.context.scale import CONTROLS, REGULARIZERS, ROWS, Condition, Scale
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
from mooring_paper.published.numbering import PaperItem, find_item, item_ranges, join_numbers
from mooring_paper.tables import accuracy_tables, grid_search


@dataclass(frozen=True)
class Target:
    """A table, a figure or the list of claims.

    Attributes:
        name: its name on the command line.
        summary: what it shows, in one line.
        run: trains its models and returns the result.
        models: how many models it trains at most, for each condition and seed, or for each condition at a scale;
            those of targets that it needs count as theirs.
        needs: the targets whose runs it reads.
        conditions: what it trains on.
        search: whether it trains on the searched tasks instead of the others.
    """

    name: str
    summary: str
    run: Callable[[PaperContext], TargetResult]
    models: int | Callable[[Scale], int] = 0
    needs: tuple[str, ...] = ()
    conditions: Callable[[Scale], list[Condition]] = Scale.first_conditions
    search: bool = False

    def count(self, scale: Scale) -> int:
        """Return how many models it trains at most.

        Example:
            >>> from mooring_paper.context.scale import MINIATURE, PAPER
            >>> [target.count(PAPER) for target in TARGETS.values()]  # fig-cka: 11 methods, 5 seeds, 3 data sets
            [3150, 870, 375, 615, 972, 60, 165, 180, 0, 720, 3228, 5544]
            >>> TARGETS["fig-negative"].count(MINIATURE), TARGETS["fig-violations"].count(MINIATURE)
            (26, 120)
        """
        models = self.models * scale.seeds if isinstance(self.models, int) else self.models(scale)
        return models * len(self.conditions(scale))


_CLAIM_SOURCES = ("grids", "table1", "resnet", "fig-negative", "fig-violations", "fig-importance", "fig-cka", "roots")

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "grids",
            "the hyper-parameters of our grid search and the paper's",
            grid_search.run,
            grid_search.count_settings,
            conditions=grid_search.search_conditions,
            search=True,
        ),
        # Every row of the tables is trained at our settings and at the paper's.
        Target(
            "table1",
            "accuracy and forgetting of every method",
            accuracy_tables.table1,
            2 * len(ROWS) + len(CONTROLS),
            ("grids",),
            Scale.conditions,
        ),
        Target(
            "resnet",
            "the same table with the second network",
            accuracy_tables.resnet,
            2 * len(accuracy_tables.SECOND_ROWS) + len(CONTROLS),
            ("grids",),
            Scale.second_conditions,
        ),
        Target(
            "fig-negative",
            "stability of SI with negative importance",
            negative_importance.run,
            lambda scale: (len(negative_importance.VARIANTS) * len(scale.strengths) + 1) * scale.seeds,
        ),
        Target(
            "fig-violations",
            "violations of the stability bound, instability and clamping",
            violations.run,
            violations.count_models,
        ),
        Target("fig-importance", "mean importance by layer", importance_by_layer.run, len(REGULARIZERS)),
        Target(
            "fig-cka",
            "CKA by layer, with and without balanced importance",
            cka.run,
            len(cka.SETTING_SOURCES),
            ("grids",),
        ),
        Target("roots", "square root, cube root and plain ratio in the explicit step", roots.run, len(roots.METHODS)),
        Target("effective-lr", "the unrolled form against the iterates", effective_lr.run),
        Target(
            "fig-backbone",
            "forgetting and accuracy against the backbone's accuracy",
            backbone_accuracy.run,
            backbone_accuracy.count_models,
        ),
        Target(
            "reasons",
            "why cells differ from the paper: one change at a time",
            ablations.run,
            changes.count_models,
            conditions=Scale.conditions,
        ),
        Target(
            "claims",
            "the paper's claims, tested by our runs",
            claims_table.run,
            claims_table.count_added_models,
            _CLAIM_SOURCES,
        ),
    )
}


def select_targets(names: Sequence[str], missing_data: Sequence[str] = ()) -> list[Target]:
    """Return the targets with these names, without duplicates; "all" stands for every target.

    A name may also be a number of the paper, such as "fig3" or "table 2". Items of the paper without a target, and
    items that show only missing data sets, select nothing; `describe_items` says why.

    Args:
        names: names of targets, or numbers of the paper.
        missing_data: data sets that this reproduction does not have.

    Example:
        >>> [target.name for target in select_targets(["table1", "all"])][:3]
        ['table1', 'grids', 'resnet']
        >>> [target.name for target in select_targets(["fig3", "Table", "2", "eq7"])]
        ['fig-importance', 'grids']
    """
    selected: dict[str, Target] = {}
    for name in join_numbers(names):
        if name == "all":
            selected |= TARGETS
        elif name in TARGETS:
            selected[name] = TARGETS[name]
        elif (item := find_item(name)) is None:
            raise unknown("target", name, [*TARGETS, "all", *item_ranges()])
        elif item.target and not lacks_data(item, missing_data):
            selected[item.target] = TARGETS[item.target]
    return list(selected.values())


def describe_items(names: Sequence[str], missing_data: Sequence[str] = ()) -> list[str]:
    """Return a line for each name that is a number of the paper: what it is, and what reproduces it.

    Example:
        >>> describe_items(["fig3", "grids"])
        ['Figure 3 of the paper is fig-importance: mean importance by layer']
    """
    items = [item for name in join_numbers(names) if (item := find_item(name)) is not None]
    return [f"{item.name} of the paper{describe_item(item, missing_data)}" for item in items]


def describe_item(item: PaperItem, missing_data: Sequence[str] = ()) -> str:
    """Return what reproduces an item of the paper, as the end of a sentence.

    Example:
        >>> describe_item(find_item("eq7"))
        ', the explicit step, is a formula without runs: mooring.backends.eager.apply_pull computes it'
    """
    summary = f"{item.target}: {TARGETS[item.target].summary}" if item.target else ""
    if item.function:
        tested = f"is tested by {summary}" if summary else "is a formula without runs"
        return f", {item.subject}, {tested}{';' if summary else ':'} {item.function} computes it"
    if lacks_data(item, missing_data):
        names = " and ".join(item.data)
        return f", {item.subject}, is not reproduced: give --data with {names}, and `{item.target}` draws it"
    return f" is {summary}{f' ({item.remark})' if item.remark else ''}"


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
                    results[target.name] = target.run(context)
                except MissingRuns as request:
                    requests.append(request)
            context.train([request for request in requests if request.decides] or requests)
    finally:
        context.defers_training = False
    return [results[target.name] for target in targets]


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a target.

    Attributes:
        models: an upper bound on the models that are trained.
        steps: an estimate of the iterations, summed over models; it ignores changes of the batch size.
    """

    models: int
    steps: int


def training_cost(targets: Sequence[Target], scale: Scale) -> dict[str, TrainingCost]:
    """Return the cost of targets and of those whose runs they read, before any data is read.

    Example:
        >>> from mooring_paper.context.scale import MINIATURE
        >>> {name: cost.models for name, cost in training_cost(select_targets(["table1"]), MINIATURE).items()}
        {'grids': 112, 'table1': 116}
    """
    costs = {}
    for name in [name for target in targets for name in (*target.needs, target.name)]:
        target = TARGETS[name]
        models, conditions = target.count(scale), target.conditions(scale)
        # Every condition of a target trains the same number of models.
        mean_steps = sum(_steps(scale, condition, search=target.search) for condition in conditions) / len(conditions)
        costs[name] = TrainingCost(models, round(models * mean_steps))
    return costs


def _steps(scale: Scale, condition: Condition, *, search: bool) -> int:
    """Return the iterations of one model on the searched tasks, or on the others."""
    images, tasks = _stream_size(scale.streams[condition.data])
    trained = scale.search_tasks if search else tasks - scale.search_tasks
    return max(0, trained) * math.ceil(images / condition.regime.batch) * condition.regime.epochs


def _stream_size(options: StreamOptions) -> tuple[int, int]:
    """Return training images per task and tasks, from the documented size of the data set.

    Example:
        >>> _stream_size(StreamOptions("cifar100")), _stream_size(StreamOptions("digits", limit=60))
        ((5000, 10), (60, 5))
    """
    dataset = options.dataset
    images, classes = (dataset.train, dataset.classes) if dataset else (len(digits().train), 10)
    tasks = classes // options.classes_per_task
    return min(options.limit or images, images // tasks), tasks
