"""`mooring salvage`: what can still be read of a damaged study."""

from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.option_groups import AsJson
from mooring.cli.terminal_tables import as_json
from mooring.lab.model.plurals import pluralize
from mooring.lab.study import salvage as rescue

__all__ = ["salvage"]


def salvage(
    study: Annotated[Path, typer.Argument(help="The damaged study.", metavar="FILE")],
    json: AsJson = False,
) -> None:
    """Keep every run of a damaged study that can be read; the damaged file is put aside."""
    found = rescue.salvage(study)
    if json:
        aside = None if found.aside is None else str(found.aside)
        typer.echo(as_json({"study": str(study), "kept": found.kept, "lost": found.lost, "aside": aside}))
    elif found.aside is None:
        typer.echo(f"{study}: nothing is wrong with its {pluralize(found.kept, 'run')}")
    else:
        lost = f"lost {', '.join(found.lost)}; " if found.lost else ""
        typer.echo(
            f"{study}: kept {pluralize(found.kept, 'run')}; {lost}the damaged file is {found.aside}; "
            "the command that made the study trains again what is missing"
        )
