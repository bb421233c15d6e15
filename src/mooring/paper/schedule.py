"""The schedule of several targets: what they all need is trained first, in shared fleets."""

from collections.abc import Sequence

from mooring.paper.context.paper_context import MissingRuns, PaperContext
from mooring.paper.context.target_result import TargetResult
from mooring.paper.targets import Target

__all__ = ["run_targets"]


def run_targets(targets: Sequence[Target], context: PaperContext) -> list[TargetResult]:
    """Return the results of targets, in order.

    Every target requests the runs that it needs next. All requested runs are trained together, and this repeats until
    no target needs more. Fleets are therefore as large as possible, and targets share first-task work. Runs that decide
    which other runs are needed, such as those of a search, are trained before the others, so that the others form one
    batch.

    Args:
        targets: targets of `mooring.paper.targets`.
        context: specifies and trains their runs.

    Example:
        >>> import tempfile
        >>> from mooring.lab.study.study import Study
        >>> from mooring.paper.context.scale import MINIATURE
        >>> from mooring.paper.targets import select_targets
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
