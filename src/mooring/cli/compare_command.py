"""`mooring compare`: several methods on the same stream."""

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
from mooring.lab.study.defaults import COMPARED_METHODS

__all__ = ["compare"]


@with_option_groups
def compare(
    stream_flags: StreamFlags,
    training_flags: TrainingFlags,
    study_flags: StudyFlags,
    output_flags: OutputFlags,
    methods: Methods = COMPARED_METHODS,
    seeds: Seeds = "5",
    strength: Annotated[
        list[str] | None,
        typer.Option("--strength", help="NUMBERS for every method with a strength, or METHOD=NUMBERS; repeatable."),
    ] = None,
    lr: Annotated[
        list[str] | None,
        typer.Option("--lr", help="Learning rates: NUMBERS for every method, or METHOD=NUMBERS; repeatable."),
    ] = None,
) -> None:
    """Run `mooring compare`."""
    from mooring.cli.output import command_line, open_study, print_results
    from mooring.cli.parse import parse_numbers_by_method, parse_seeds
    from mooring.lab.study.comparison import comparison

    compared = comparison(
        stream_flags.options(),
        methods,
        parse_seeds(seeds),
        strength=parse_numbers_by_method("--strength", strength or []),
        lr=parse_numbers_by_method("--lr", lr or []),
        **asdict(training_flags),
    )
    study = open_study(study_flags, output_flags.report)
    rows = study.compare(compared, baseline=output_flags.baseline)
    study.store.log(command_line())
    print_results(study, rows, output_flags)
