"""`mooring run`: a study from a TOML file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mooring_lab.cli import flags


def run(
    file: Annotated[Path, typer.Argument(help="The description of the study.", metavar="STUDY.toml")],
    device: Annotated[str | None, flags.option("Train here, not on the device of the file.")] = None,
    engine: flags.EngineName = "local",
    address: flags.Address = None,
    share: flags.Share = 1.0,
    deterministic: flags.Deterministic = False,
    wait: flags.Wait = False,
    quiet: flags.Quiet = False,
    json: flags.AsJson = False,
    format: flags.Format = "table",
) -> None:
    """Run `mooring run`."""
    from mooring_lab.cli.output import choose_baseline, command_line, open_study, print_results, print_tuned
    from mooring_lab.study import protocol
    from mooring_lab.study.comparison import comparison
    from mooring_lab.study.study_file import read_study_file

    sys.path.insert(0, str(file.resolve().parent))  # so that networks and methods in the folder of the file are found
    content = read_study_file(file)
    output_flags = flags.OutputFlags(content.baseline, content.report, json, format)
    compared = comparison(**content.comparison)
    study_flags = flags.StudyFlags(
        content.study, device or content.device, content.fleet, engine, address, share, deterministic, wait, quiet
    )
    study = open_study(study_flags, content.report)
    baseline = choose_baseline(content.baseline, compared.methods)
    if content.search is None:
        rows = study.compare(compared, baseline=baseline)
        study.store.log(command_line())
        print_results(study, rows, output_flags)
        return
    tuned = protocol.tune(study, baseline=baseline, **content.search, **content.comparison)
    study.store.log(command_line())
    print_tuned(study, tuned, output_flags)
