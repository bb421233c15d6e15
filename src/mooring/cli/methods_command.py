"""`mooring methods`: every method, a line each."""

import typer

from mooring.cli.option_groups import AsJson
from mooring.cli.terminal_tables import as_json, print_table
from mooring.lab.methods import METHODS
from mooring.lab.methods.strengths import default_strength

__all__ = ["methods"]


def methods(json: AsJson = False) -> None:
    """List every method with a line about it, and the strengths it has when none is given."""
    strengths = {m.name: [default_strength(m, paper=paper) for paper in (False, True)] for m in METHODS.values()}
    if json:
        told = []
        for m in METHODS.values():
            digits, elsewhere = strengths[m.name]
            usual = {"on_digits": digits, "elsewhere": elsewhere}
            told.append({"name": m.name, "line": m.line, "strength": usual, "memory": m.memory})
        typer.echo(as_json(told))
        return
    rows = [[m.name, m.line, *("" if s is None else f"{s:g}" for s in strengths[m.name])] for m in METHODS.values()]
    print_table(("method", "what it does", "strength on digits", "elsewhere"), rows)
