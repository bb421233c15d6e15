"""`mooring doctor`: what is here, what is missing, and the command to get it."""

import typer

from mooring.cli.environment import examine
from mooring.cli.option_groups import AsJson
from mooring.cli.terminal_tables import as_json

__all__ = ["doctor"]


def doctor(json: AsJson = False) -> None:
    """Tell what is here (torch, devices, extras, data), what is missing, and the command to get it."""
    found = examine()
    typer.echo(as_json(found.to_dict()) if json else str(found))
    if not found.torch["ready"]:
        raise typer.Exit(1)
