"""`mooring salvage`: recover the runs of a damaged study."""

from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.option_groups import AsJson
from mooring.cli.terminal_tables import as_json
from mooring.lab.model.plurals import pluralize

__all__ = ["salvage"]


def salvage(
    study: Annotated[Path, typer.Argument(help="The damaged study.", metavar="FILE")],
    json: AsJson = False,
) -> None:
    """Run `mooring salvage`."""
    from mooring.lab.study import salvage as recovery

    outcome = recovery.salvage(study)
    if json:
        aside = None if outcome.aside is None else str(outcome.aside)
        typer.echo(as_json({"study": str(study), "kept": outcome.kept, "lost": outcome.lost, "aside": aside}))
    elif outcome.aside is None:
        typer.echo(f"{study}: not damaged, {pluralize(outcome.kept, 'run')}")
    else:
        lost = f"lost {', '.join(outcome.lost)}; " if outcome.lost else ""
        typer.echo(
            f"{study}: kept {pluralize(outcome.kept, 'run')}; {lost}the damaged file is now {outcome.aside}; "
            "repeat the command that made the study to train the lost runs again"
        )
