"""`mooring data`: the image sets that have a name, fetching them, and looking at a folder of your own."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mooring.cli.option_groups import AsJson
from mooring.cli.progress_bar import progress_bar
from mooring.cli.terminal_tables import print_table
from mooring.errors import MooringError
from mooring.lab.streams.inspection import Inspection, inspect_folder
from mooring.lab.streams.named_datasets import (
    NAMED_DATASETS,
    NamedDataset,
    default_folder,
    fetched_folder,
    find_dataset,
)

__all__ = ["app"]

SHOWN = 20
"""So many broken images are named; --json names all."""

app = typer.Typer(
    name="data",
    help="Image sets: which have a name, fetch one, check a folder of your own.",
    no_args_is_help=True,
)


@app.command("list")
def list_sets(as_json: AsJson = False) -> None:
    """Every named set, and where it is on this machine."""
    if as_json:
        typer.echo(json.dumps([_described(named) for named in NAMED_DATASETS.values()], indent=1))
        return
    rows = []
    for named in NAMED_DATASETS.values():
        tasks = f"{named.tasks} x {named.per_task}"
        images = f"{named.train + named.test:,}"
        where = str(fetched_folder(named) or "not fetched")
        rows.append((named.name, str(named.classes), tasks, images, _size(named.bytes), where))
    print_table(("name", "classes", "tasks x classes", "images", "size", "where"), rows)


@app.command()
def info(name: Annotated[str, typer.Argument(help="A named set.")], as_json: AsJson = False) -> None:
    """What a named set holds, how it is cut, and where it comes from."""
    named = find_dataset(name)
    if as_json:
        typer.echo(json.dumps(_described(named), indent=1))
        return
    source = f"{named.repository} on the Hub, revision {named.revision[:7]}" if named.repository else named.homepage
    rows = [
        ("name", named.name),
        ("what", named.description),
        ("classes", f"{named.classes}, {named.per_task} in a task: {named.tasks} tasks"),
        ("images", f"about {named.train:,} to learn from, {named.test:,} to score on"),
        ("size", f"about {_size(named.bytes)} to fetch"),
        ("source", source),
        ("homepage", named.homepage),
        ("licence", named.licence),
        ("note", named.note),
        ("get it", named.manual_steps or f"mooring data fetch {named.name}"),
        ("where", str(fetched_folder(named) or f"not fetched; it would go to {default_folder(named.name)}")),
    ]
    for key, value in rows:
        typer.echo(f"{key + ':':<10}{value}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A named set.")],
    to: Annotated[Path | None, typer.Option(help="The folder to make; by default where streams look.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a named set from the Hub. The size is said first; an interrupted fetch goes on where it stopped."""
    from mooring.lab.streams import hub  # the Hub's client is slow to import, and only needed here

    named = find_dataset(name)
    folder = to or default_folder(named.name)
    if hub.is_fetched(named, folder):
        return _made(named, folder, as_json)
    if named.repository and not yes and not _asks():
        raise MooringError(f"fetching {name} takes about {_size(named.bytes)}: add --yes to agree")
    planned = hub.plan_fetch(named)
    commit = planned.commit[:7]
    size = f"{len(planned.files)} files, {_size(planned.bytes)}"
    typer.echo(f"{name}: {size}, from {named.repository} at {commit} to {folder}", err=True)
    if not yes:
        typer.confirm("Fetch it?", abort=True, err=True)
    with progress_bar(in_bytes=True) as report:
        hub.fetch(named, folder, planned=planned, progress=report)
    return _made(named, folder, as_json)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="A folder of Parquet files in the Hub's layout, or of class folders.")],
    label: Annotated[str | None, typer.Option(help="The label column of Parquet files.")] = None,
    size: Annotated[int, typer.Option(min=1, help="Height and width to resize to.")] = 32,
    leave_out: Annotated[list[str] | None, typer.Option(help="A class folder to ignore; may be repeated.")] = None,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Broken images are no failure.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every image of a folder; exit with 1 if any is broken."""
    with progress_bar() as report:
        seen = inspect_folder(path, label=label, leave_out=tuple(leave_out or ()), size=(size, size), progress=report)
    if as_json:
        typer.echo(json.dumps(seen.to_json(), indent=1))
    else:
        _say(seen, size)
    if seen.broken and not skip_broken:
        raise typer.Exit(1)


def _asks() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def _made(named: NamedDataset, folder: Path, as_json: bool) -> None:
    typer.echo(json.dumps({"name": named.name, "folder": str(folder)}) if as_json else f"{named.name} is in {folder}")


def _say(seen: Inspection, size: int) -> None:
    smallest, largest = seen.smallest, seen.largest
    typer.echo(f"{seen.folder}: {'Parquet files' if seen.layout == 'parquet' else 'class folders'}")
    counts = [("train", f"{sum(seen.train):,}"), ("test", f"{sum(seen.test):,}")]
    print_table(("split", "images"), counts)
    spread = f"from {smallest[1]:,} ({smallest[0]}) to {largest[1]:,} ({largest[0]}) training images"
    typer.echo(f"{len(seen.classes)} classes, {spread}")
    if seen.sizes:
        (low, high), sizes = (seen.sizes[0], seen.sizes[-1]), len(seen.sizes)
        several = f"{sizes} sizes from {low[1]}x{low[0]} to {high[1]}x{high[0]}" if sizes > 1 else f"{low[1]}x{low[0]}"
        typer.echo(f"images are {several} pixels, and become {size}x{size}")
    typer.echo(f"classes in a task: {', '.join(map(str, seen.per_task))}")
    for name in seen.empty:
        typer.echo(f"class {name} has no training or no test images: a task of it alone is refused")
    for where in seen.broken[:SHOWN]:
        typer.echo(f"broken: {where}")
    if len(seen.broken) > SHOWN:
        typer.echo(f"and {len(seen.broken) - SHOWN:,} more: --json names all")
    typer.echo(f"{len(seen.broken):,} broken images" if seen.broken else "every image can be read")


def _described(named: NamedDataset) -> dict[str, Any]:
    where = fetched_folder(named)
    return {
        "name": named.name,
        "description": named.description,
        "classes": named.classes,
        "per_task": named.per_task,
        "tasks": named.tasks,
        "train": named.train,
        "test": named.test,
        "bytes": named.bytes,
        "layout": named.layout,
        "repository": named.repository or None,
        "revision": named.revision or None,
        "homepage": named.homepage,
        "licence": named.licence,
        "note": named.note,
        "get": named.manual_steps or f"mooring data fetch {named.name}",
        "where": str(where) if where else None,
    }


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count:,} bytes"
