"""`mooring methods`: the methods in groups, or the checks that one of them passes."""

from typing import Annotated

import typer

from mooring_lab.cli.flags import AsJson, option
from mooring_lab.cli.terminal_tables import as_json, print_table
from mooring_lab.methods import METHODS
from mooring_lab.methods.groups import GROUPS, group_of
from mooring_lab.methods.registry import default_strength, methods_in


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
            group = group_of(m)
            entries.append({"name": m.name, "group": group, "line": m.line, "strength": strength, "memory": m.memory})
        typer.echo(as_json(entries))
        return
    for group, (title, _) in GROUPS.items():
        names = methods_in(group)
        rows = [[name, METHODS[name].line, *("" if s is None else f"{s:g}" for s in strengths[name])] for name in names]
        header = ("method", "what it does", "strength on digits", "elsewhere")
        print_table(header, rows, f"{title} (--methods {group})")
        typer.echo("")


def _check(name: str, json: bool) -> None:
    """Print what every check of a method found, and exit with 1 if one failed."""
    from mooring_lab.study.method_checks import check_method

    outcomes = check_method(name)
    if json:
        typer.echo(as_json([{"check": o.check, "passed": o.passed, "problem": o.problem} for o in outcomes]))
    else:
        print_table(("check", "outcome"), [[o.check, o.problem or "passed"] for o in outcomes], name)
    if not all(outcome.passed for outcome in outcomes):
        raise typer.Exit(1)
