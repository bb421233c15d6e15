"""Targets trained together: what all of them need is asked for first, and sails in the same fleets."""

from collections.abc import Sequence

from mooring.paper.context.context import Awaited, Laboratory
from mooring.paper.context.result import Finding
from mooring.paper.targets import Target

__all__ = ["findings_of"]


def findings_of(targets: Sequence[Target], lab: Laboratory) -> list[Finding]:
    """What came out of each target, in their order.

    Every target says which runs it needs next; then all of these are trained at once, and so on until none needs more.
    Fleets are as large as they can be, and twins of different targets are one run until a pull acts. Runs that decide
    about others, such as a search, go ahead of the rest, so that the rest is one lot.

    Args:
        targets: of `mooring.paper.targets`.
        lab: makes the runs.

    Example:
        >>> import tempfile
        >>> from mooring.lab.study.study import Study
        >>> from mooring.paper.context.scale import MINIATURE
        >>> from mooring.paper.targets import chosen
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lab = Laboratory(Study(f"{folder}/paper.sqlite"), MINIATURE.on(None))
        ...     [finding.name for finding in findings_of(chosen(["effective-lr"]), lab)]
        ['effective-lr']
    """
    lab.gathers = True
    try:
        return _gathered(targets, lab)
    finally:
        lab.gathers = False


def _gathered(targets: Sequence[Target], lab: Laboratory) -> list[Finding]:
    findings: dict[str, Finding] = {}
    while True:
        awaited: list[Awaited] = []
        for target in targets:
            if target.name not in findings:
                try:
                    findings[target.name] = target.run(lab)
                except Awaited as asked:
                    awaited.append(asked)
        if not awaited:
            return [findings[target.name] for target in targets]
        lab.train([asked for asked in awaited if asked.decides] or awaited)
