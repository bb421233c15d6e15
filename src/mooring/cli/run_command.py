"""`mooring run`: a study from a TOML file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.option_groups import AsJson, OutputFlags, StudyFlags
from mooring.cli.output import command_line, opened, tell, tell_tuned
from mooring.lab.study import protocol
from mooring.lab.study.comparison import comparison
from mooring.lab.study.study_file import read_study_file

__all__ = ["run"]


def run(
    file: Annotated[Path, typer.Argument(help="The study, as TOML.", metavar="STUDY.toml")],
    device: Annotated[str | None, typer.Option("--device", help="Instead of the file's.")] = None,
    engine: Annotated[str, typer.Option("--engine", help="local, or ray: many fleets at once.")] = "local",
    address: Annotated[str | None, typer.Option("--address", help="Of a Ray cluster.", metavar="HOST:PORT")] = None,
    share: Annotated[
        float, typer.Option("--share", help="Of a core or a GPU that a fleet takes, with Ray; 0.5: two share one.")
    ] = 1.0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits each time, on a GPU too; slower there.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait while another process runs this study.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    json: AsJson = False,
) -> None:
    """Run the study that a TOML file describes; what is done already is not done again."""
    told = read_study_file(file)
    sys.path.insert(0, str(file.resolve().parent))  # a network of one's own may lie beside its study
    asked = comparison(**told.comparison)
    kept = StudyFlags(told.study, device or told.device, told.fleet, engine, address, share, deterministic, wait, quiet)
    study = opened(kept, told.report)
    output = OutputFlags(told.baseline, told.report, json)
    if told.search is None:
        rows = study.compare(asked, baseline=told.baseline)
        study.store.log(command_line())
        tell(study, rows, output)
        return
    tuned = protocol.tune(study, baseline=told.baseline, **told.search, **told.comparison)
    study.store.log(command_line())
    tell_tuned(study, tuned, output)
