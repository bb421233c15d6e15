"""`mooring tune`: the paper's protocol, search first, then train on the rest."""

from dataclasses import asdict
from typing import Annotated

import typer

from mooring.cli import parse as text
from mooring.cli.option_groups import (
    METHODS,
    Methods,
    OutputFlags,
    Seeds,
    StreamFlags,
    StudyFlags,
    TrainingFlags,
    spread,
)
from mooring.cli.output import command_line, opened, tell_tuned
from mooring.lab.study import protocol

__all__ = ["tune"]


def _told(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


@spread
def tune(
    streams: StreamFlags,
    training: TrainingFlags,
    kept: StudyFlags,
    output: OutputFlags,
    methods: Methods = METHODS,
    seeds: Seeds = "5",
    search_tasks: Annotated[int, typer.Option("--search-tasks", help="Tasks to search on; the rest is trained.")] = 3,
    search_seeds: Annotated[str, typer.Option("--search-seeds", help="Seeds of the search.")] = "1",
    lrs: Annotated[str, typer.Option("--lrs", help="Learning rates to try.")] = _told(protocol.LRS),
    strengths: Annotated[
        str, typer.Option("--strengths", help="Strengths to try; by default the paper's, or a method's own dial.")
    ] = "",
) -> None:
    """Search learning rate and strength on the first tasks, then train every method on the rest with the best."""
    study = opened(kept, output.report)
    tuned = protocol.tune(
        study,
        tasks=search_tasks,
        lrs=text.numbers("--lrs", lrs),
        strengths=text.numbers("--strengths", strengths) if strengths else None,
        search_seeds=text.seeds(search_seeds, "--search-seeds"),
        baseline=output.baseline,
        stream=streams.options(),
        methods=methods,
        seeds=text.seeds(seeds),
        **asdict(training),
    )
    study.store.log(command_line())
    tell_tuned(study, tuned, output)
