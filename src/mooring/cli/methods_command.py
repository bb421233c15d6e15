"""`mooring methods`: a table of all methods, or of the checks that one of them passes."""

from typing import Annotated

import typer

from mooring.cli.flags import AsJson, option
from mooring.cli.terminal_tables import as_json, print_table
from mooring.lab.methods import METHODS
from mooring.lab.methods.registry import default_strength


def methods(
    check: Annotated[
        str | None,
        option("Check this method, or package.module:METHOD, and print every check.", metavar="METHOD"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Run `mooring methods`."""
    if check is not None:
        _check(check, json)
        return
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


def _check(name: str, json: bool) -> None:
    """Print what every check of a method found, and exit with 1 if one failed."""
    from mooring.lab.study.method_checks import check_method

    outcomes = check_method(name)
    if json:
        typer.echo(as_json([{"check": o.check, "passed": o.passed, "problem": o.problem} for o in outcomes]))
    else:
        print_table(("check", "outcome"), [[o.check, o.problem or "passed"] for o in outcomes], name)
    if not all(outcome.passed for outcome in outcomes):
        raise typer.Exit(1)
