"""`mooring methods`: a table of all methods."""

import typer

from mooring.cli.flags import AsJson
from mooring.cli.terminal_tables import as_json, print_table
from mooring.lab.methods import METHODS
from mooring.lab.methods.registry import default_strength


def methods(json: AsJson = False) -> None:
    """Run `mooring methods`."""
    strengths = {m.name: [default_strength(m, paper=paper) for paper in (False, True)] for m in METHODS.values()}
    if json:
        entries = []
        for m in METHODS.values():
            digits, elsewhere = strengths[m.name]
            strength = {"on_digits": digits, "elsewhere": elsewhere}
            entries.append({"name": m.name, "line": m.line, "strength": strength, "memory": m.memory})
        typer.echo(as_json(entries))
        return
    rows = [[m.name, m.line, *("" if s is None else f"{s:g}" for s in strengths[m.name])] for m in METHODS.values()]
    print_table(("method", "what it does", "strength on digits", "elsewhere"), rows)
