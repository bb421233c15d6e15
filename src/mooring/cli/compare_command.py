"""`mooring compare`: methods side by side on a stream."""

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
from mooring.cli.output import command_line, opened, tell
from mooring.lab.study.comparison import comparison

__all__ = ["compare"]


@spread
def compare(
    streams: StreamFlags,
    training: TrainingFlags,
    kept: StudyFlags,
    output: OutputFlags,
    methods: Methods = METHODS,
    seeds: Seeds = "5",
    strength: Annotated[
        list[str] | None,
        typer.Option("--strength", help="NUMBERS for all methods with one, or METHOD=NUMBERS; may be repeated."),
    ] = None,
    lr: Annotated[
        list[str] | None, typer.Option("--lr", help="NUMBERS for all methods, or METHOD=NUMBERS; may be repeated.")
    ] = None,
) -> None:
    """Train every method with every seed on the stream, and show what was learned and what was forgotten."""
    asked = comparison(
        streams.options(),
        methods,
        text.seeds(seeds),
        strength=text.numbers_by_method("--strength", strength or []),
        lr=text.numbers_by_method("--lr", lr or []),
        **asdict(training),
    )
    study = opened(kept, output.report)
    rows = study.compare(asked, baseline=output.baseline)
    study.store.log(command_line())
    tell(study, rows, output)
