"""`mooring show` and `mooring report`: what a study holds, in the terminal and as a page."""

from pathlib import Path
from typing import Annotated

import typer

from mooring.backends.gc_control import gc_disabled
from mooring.cli.option_groups import AsJson
from mooring.cli.terminal_tables import as_json, print_rows
from mooring.errors import MooringError
from mooring.lab.methods import METHODS
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import summarize
from mooring.lab.study.store import Store, checkpoint_folder

__all__ = ["report", "show"]

StudyFile = Annotated[Path, typer.Argument(help="The study.", metavar="[FILE]")]
Baseline = Annotated[str | None, typer.Option("--baseline", help="Compare accuracy with this method.")]


@gc_disabled
def show(
    study: StudyFile = Path("mooring.sqlite"),
    baseline: Baseline = None,
    runs: Annotated[bool, typer.Option("--runs", help="With --json, every run with all that is known of it.")] = False,
    json: AsJson = False,
) -> None:
    """Show every result of a study as tables, one for each stream."""
    store, results = _read(study)
    rows = summarize(results, baseline)
    if json:
        told = {"study": str(study), "commands": store.commands(), "rows": [row.to_json() for row in rows]}
        every = {"runs": [{"key": result.spec.key, **result.to_json()} for result in results]} if runs else {}
        typer.echo(as_json({**told, **every}))
        return
    print_rows(rows, baseline)


@gc_disabled
def report(
    study: StudyFile = Path("mooring.sqlite"),
    to: Annotated[Path | None, typer.Option("--to", "--out", help="The folder to write.", metavar="DIR")] = None,
    baseline: Baseline = None,
    title: Annotated[str | None, typer.Option("--title", help="Of the page.")] = None,
    json: AsJson = False,
) -> None:
    """Write a study as one page with its figures, which needs no network to be read."""
    from mooring.report import write_report  # matplotlib is slow to import

    store, results = _read(study)
    folder = to or study.with_name(f"{study.stem}-report")
    commands = "\n".join(dict.fromkeys(store.commands()))
    page = write_report(results, folder, title=title or study.stem, command=commands, baseline=baseline)
    typer.echo(as_json({"page": str(page), "runs": len(results)}) if json else f"page: {page}")


def _place(spec: RunSpec, ranks: dict[str, int]) -> tuple[object, ...]:
    """Where a run stands in a table: by stream, method, setting and seed."""
    return spec.stream, ranks.get(spec.method, len(ranks)), spec.lr, spec.strength or 0.0, spec.seed


def _read(path: Path) -> tuple[Store, list[Result]]:
    if not path.exists():
        if checkpoint_folder(path).is_dir():
            raise MooringError(f"no run of {path} has finished yet: the command that began it goes on where it was")
        raise MooringError(f"there is no study {path}: `mooring compare --study {path}` makes one")
    store = Store(path)
    ranks = {name: rank for rank, name in enumerate(METHODS)}
    results = sorted(store.results(), key=lambda result: _place(result.spec, ranks))
    if not results:
        raise MooringError(f"the study {path} has no finished runs yet: run the command that made it again")
    return store, results
