"""`mooring tune`: the paper's protocol, a search on the first tasks, then training on the others."""

from dataclasses import asdict
from typing import Annotated

import typer

from mooring.cli.option_groups import (
    Methods,
    OutputFlags,
    Seeds,
    StreamFlags,
    StudyFlags,
    TrainingFlags,
    with_option_groups,
)
from mooring.lab.study.defaults import COMPARED_METHODS, LRS

__all__ = ["tune"]


@with_option_groups
def tune(
    stream_flags: StreamFlags,
    training_flags: TrainingFlags,
    study_flags: StudyFlags,
    output_flags: OutputFlags,
    methods: Methods = COMPARED_METHODS,
    seeds: Seeds = "5",
    search_tasks: Annotated[
        int, typer.Option("--search-tasks", help="Tasks to search on; methods are then trained on the others.")
    ] = 3,
    search_seeds: Annotated[str, typer.Option("--search-seeds", help="Seeds of the search.")] = "1",
    lrs: Annotated[str, typer.Option("--lrs", help="Learning rates to search.")] = ",".join(f"{lr:g}" for lr in LRS),
    strengths: Annotated[
        str,
        typer.Option("--strengths", help="Strengths to search; by default the paper's, or the method's own range."),
    ] = "",
) -> None:
    """Run `mooring tune`."""
    from mooring.cli.output import command_line, open_study, print_tuned
    from mooring.cli.parse import parse_numbers, parse_seeds
    from mooring.lab.study import protocol

    study = open_study(study_flags, output_flags.report)
    tuned = protocol.tune(
        study,
        tasks=search_tasks,
        lrs=parse_numbers("--lrs", lrs),
        strengths=parse_numbers("--strengths", strengths) if strengths else None,
        search_seeds=parse_seeds(search_seeds, "--search-seeds"),
        baseline=output_flags.baseline,
        stream=stream_flags.options(),
        methods=methods,
        seeds=parse_seeds(seeds),
        **asdict(training_flags),
    )
    study.store.log(command_line())
    print_tuned(study, tuned, output_flags)
