"""`mooring show` and `mooring report`: a study as tables, and as a page."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from mooring.errors import MooringError
from mooring_lab.cli.flags import AsJson, Baseline, Format, option
from mooring_lab.cli.pasted_tables import check_format

if TYPE_CHECKING:
    from mooring_lab.model.results import Result
    from mooring_lab.model.spec import RunSpec
    from mooring_lab.study.store import Store

P = ParamSpec("P")

StudyFile = Annotated[Path, typer.Argument(help="The study.", metavar="FILE")]
DEFAULT_STUDY = Path("mooring.sqlite")


def _without_gc(command: Callable[P, None]) -> Callable[P, None]:
    """Return a command during which the garbage collector does not run: it reads thousands of results that stay."""

    @wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        from mooring.backends.eager import gc_disabled

        gc_disabled(command)(*args, **kwargs)

    return wrapper


@_without_gc
def show(
    file: StudyFile = DEFAULT_STUDY,
    baseline: Baseline = None,
    runs: Annotated[bool, option("With --json, add every run with its full record.", "--runs")] = False,
    json: AsJson = False,
    format: Format = "table",
) -> None:
    """Run `mooring show`."""
    from mooring_lab.cli.output import choose_baseline
    from mooring_lab.cli.terminal_tables import as_json, print_rows
    from mooring_lab.model.metric_definitions import DEFINITIONS
    from mooring_lab.model.summary import summarize

    form = check_format(format, json)
    store, results = _read(file)
    baseline = choose_baseline(baseline, [result.spec.method for result in results])
    rows = summarize(results, baseline)
    if form != "json":
        print_rows(rows, baseline, form)
        return
    described = {name: str(definition) for name, definition in DEFINITIONS.items()}
    content: dict[str, Any] = {"study": str(file), "commands": store.commands(), "metrics": described}
    content["rows"] = [row.to_json() for row in rows]
    if runs:
        content["runs"] = [{"key": result.spec.key, **result.to_json()} for result in results]
    typer.echo(as_json(content))


@_without_gc
def report(
    file: StudyFile = DEFAULT_STUDY,
    to: Annotated[Path | None, option("The folder to write.", "--to", "--out", metavar="DIR")] = None,
    baseline: Baseline = None,
    title: Annotated[str | None, option("The title of the page; by default its methods and streams.")] = None,
    json: AsJson = False,
) -> None:
    """Run `mooring report`."""
    from mooring_lab.cli.output import choose_baseline
    from mooring_lab.cli.terminal_tables import as_json
    from mooring_lab.report import write_report

    store, results = _read(file)
    baseline = choose_baseline(baseline, [result.spec.method for result in results])
    folder = to or file.with_name(f"{file.stem}-report")
    commands = "\n".join(dict.fromkeys(store.commands()))
    page = write_report(results, folder, title=title, command=commands, baseline=baseline)
    typer.echo(as_json({"page": str(page), "runs": len(results)}) if json else f"page: {page}")


def _read(path: Path) -> tuple[Store, list[Result]]:
    """Return the study and its results, sorted by stream, method, setting and seed."""
    from mooring_lab.methods import METHODS
    from mooring_lab.study.store import Store, checkpoint_folder

    if not path.exists():
        if checkpoint_folder(path).is_dir():
            raise MooringError(f"no run of {path} has finished yet: repeat the command that began it to continue")
        raise MooringError(f"there is no study {path}: `mooring compare --study {path}` makes one")
    store = Store(path)
    ranks = {name: rank for rank, name in enumerate(METHODS)}

    def order(spec: RunSpec) -> tuple[object, ...]:
        return spec.stream, ranks.get(spec.method, len(ranks)), spec.lr, spec.strength or 0.0, spec.seed

    results = sorted(store.results(), key=lambda result: order(result.spec))
    if not results:
        raise MooringError(f"the study {path} has no finished runs yet: repeat the command that made it")
    return store, results
