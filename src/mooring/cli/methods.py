"""`mooring methods`: every method, a line each."""

import typer

from mooring.cli.options import AsJson
from mooring.cli.tables import as_json, print_table
from mooring.lab.methods import METHODS

__all__ = ["methods"]


def methods(json: AsJson = False) -> None:
    """List every method with a line about it, and the strength it has when none is given."""
    if json:
        told = [{"name": m.name, "line": m.line, "strength": m.strength, "memory": m.memory} for m in METHODS.values()]
        typer.echo(as_json(told))
        return
    rows = [[m.name, m.line, "" if m.strength is None else f"{m.strength:g}"] for m in METHODS.values()]
    print_table(("method", "what it does", "strength"), rows)
