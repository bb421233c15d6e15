"""`mooring doctor`: the environment, what is missing in it, and how to get it."""

import typer

from mooring_lab.cli.environment import as_text, examine
from mooring_lab.cli.flags import AsJson
from mooring_lab.cli.terminal_tables import as_json


def doctor(json: AsJson = False) -> None:
    """Run `mooring doctor`."""
    environment = examine()
    typer.echo(as_json(environment) if json else as_text(environment))
    if not environment["torch"]["ready"]:
        raise typer.Exit(1)
