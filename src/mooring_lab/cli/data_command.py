"""`mooring data`: list the named image sets, download one, check a folder, or clear the cache of decoded images."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring.errors import MooringError
from mooring_lab.cli.flags import AsJson, option
from mooring_lab.cli.progress_bar import progress_bar
from mooring_lab.cli.terminal_tables import format_bytes, print_table

if TYPE_CHECKING:
    from mooring_lab.streams.named_datasets import NamedDataset

MAX_BROKEN_LINES = 20
"""Broken images that are named as text; --json names all."""

DESCRIBED = (
    *("name", "description", "classes", "per_task", "tasks", "train", "test", "bytes", "layout"),
    *("repository", "revision", "homepage", "licence", "note"),
)
"""Attributes of a named set that --json shows."""

data = typer.Typer(no_args_is_help=True, add_completion=False)

SetName = Annotated[str, typer.Argument(help="The name of the set.")]


@data.command("list")
def list_sets(as_json: AsJson = False) -> None:
    """List the named image sets, and where they are on this machine."""
    from mooring_lab.streams.cache import cache_folder, cache_size
    from mooring_lab.streams.named_datasets import NAMED_DATASETS, fetched_folder

    if as_json:
        typer.echo(json.dumps([_described(named) for named in NAMED_DATASETS.values()], indent=1))
        return
    rows = []
    for named in NAMED_DATASETS.values():
        tasks, images = f"{named.tasks} x {named.per_task}", f"{named.train + named.test:,}"
        where = str(fetched_folder(named) or "not fetched")
        rows.append((named.name, str(named.classes), tasks, images, format_bytes(named.bytes), where))
    print_table(("name", "classes", "tasks x classes", "images", "size", "where"), rows)
    typer.echo(f"decoded images: {format_bytes(cache_size())} in {cache_folder()}; `mooring data clear` deletes them")


@data.command()
def info(name: SetName, as_json: AsJson = False) -> None:
    """Describe a named image set: classes, tasks, size, source and licence."""
    from mooring_lab.streams.named_datasets import find_dataset

    named = find_dataset(name)
    if as_json:
        typer.echo(json.dumps(_described(named), indent=1))
        return
    for key, value in _described(named).items():
        typer.echo(f"{key + ':':<13}{value if value is not None else '-'}")


@data.command()
def fetch(
    name: SetName,
    to: Annotated[
        Path | None, option("The folder to create; by default the one in which streams look for the set.")
    ] = None,
    yes: Annotated[bool, option("Do not ask for confirmation.", "--yes", "-y")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the size of a named set, ask, and download it from Hugging Face; it continues after a file that arrived."""
    from mooring_lab.streams import hub
    from mooring_lab.streams.named_datasets import default_folder, find_dataset

    named = find_dataset(name)
    folder = to or default_folder(named.name)
    if hub.is_fetched(named, folder):
        return _print_folder(named, folder, as_json)
    if named.repository and not yes and not _can_ask():
        raise MooringError(f"fetching {name} takes about {format_bytes(named.bytes)}: add --yes to agree")
    planned = hub.plan_fetch(named)
    size = f"{len(planned.files)} files, {format_bytes(planned.bytes)}"
    typer.echo(f"{name}: {size}, from {named.repository} at {planned.commit[:7]} to {folder}", err=True)
    if not yes:
        typer.confirm("Fetch it?", abort=True, err=True)
    hub.fetch(named, folder, planned=planned)
    return _print_folder(named, folder, as_json)


@data.command()
def check(
    path: Annotated[Path, typer.Argument(help="A folder of Parquet files as on Hugging Face, or of class folders.")],
    label: Annotated[str | None, option("Label column of Parquet files.")] = None,
    size: Annotated[int, option("Height and width to resize to.", min=1)] = 32,
    leave_out: Annotated[list[str] | None, option("A class folder to ignore; repeatable.")] = None,
    skip_broken: Annotated[bool, option("Exit with 0 despite broken images.", "--skip-broken")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every image of a folder, and exit with 1 if any is broken."""
    from mooring_lab.streams.inspection import inspect_folder

    with progress_bar() as report:
        left_out = tuple(leave_out or ())
        inspection = inspect_folder(path, label=label, leave_out=left_out, size=(size, size), progress=report)
    if as_json:
        typer.echo(json.dumps(inspection, indent=1))
    else:
        _print_inspection(inspection, size)
    if inspection["broken"] and not skip_broken:
        raise typer.Exit(1)


@data.command()
def clear(as_json: AsJson = False) -> None:
    """Delete the decoded images in the user's cache; a study that needs them decodes them again."""
    from mooring_lab.streams.cache import cache_folder, clear_cache

    size, folder = clear_cache(), cache_folder()
    line = f"deleted {format_bytes(size)} of decoded images from {folder}" if size else f"no decoded images in {folder}"
    typer.echo(json.dumps({"folder": str(folder), "bytes": size}) if as_json else line)


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _print_folder(named: NamedDataset, folder: Path, as_json: bool) -> None:
    typer.echo(json.dumps({"name": named.name, "folder": str(folder)}) if as_json else f"{named.name} is in {folder}")


def _print_inspection(inspection: dict[str, Any], size: int) -> None:
    classes, sizes, broken = inspection["classes"], inspection["sizes"], inspection["broken"]
    typer.echo(f"{inspection['folder']}: {'Parquet files' if inspection['layout'] == 'parquet' else 'class folders'}")
    print_table(("split", "images"), [(split, f"{inspection[split]:,}") for split in ("train", "test")])
    smallest, largest = (pick(classes, key=lambda name: classes[name]["train"]) for pick in (min, max))
    extremes = " to ".join(f"{classes[name]['train']:,} ({name})" for name in (smallest, largest))
    typer.echo(f"{len(classes)} classes, from {extremes} training images")
    if sizes:
        low, high, count = sizes[0], sizes[-1], len(sizes)
        shown = f"{count} sizes from {low[1]}x{low[0]} to {high[1]}x{high[0]}" if count > 1 else f"{low[1]}x{low[0]}"
        typer.echo(f"images are {shown} pixels, and are resized to {size}x{size}")
    typer.echo(f"classes in a task: {', '.join(map(str, inspection['per_task']))}")
    for name in inspection["empty"]:
        kind, outcome = ("test", "scored") if classes[name]["train"] else ("training", "trained")
        typer.echo(f"class {name} has no {kind} images: it is never {outcome}, and a task of it alone is refused")
    if inspection["scored"] not in (None, "test"):
        typer.echo(f"{inspection['scored']}/ is scored: there is no test/")
    for name in inspection["unused"]:
        typer.echo(f"{name}/ is not used: train/ is trained, and test/, or else val/, is scored")
    if inspection["deep"]:
        typer.echo(f"{inspection['deep']:,} images have 16 bits for each pixel, of which 65535 is white")
    for image in broken[:MAX_BROKEN_LINES]:
        typer.echo(f"broken: {image}")
    if len(broken) > MAX_BROKEN_LINES:
        typer.echo(f"and {len(broken) - MAX_BROKEN_LINES:,} more: --json names all")
    typer.echo(f"{len(broken):,} broken images" if broken else "every image can be read")


def _described(named: NamedDataset) -> dict[str, Any]:
    from mooring_lab.streams.named_datasets import fetched_folder

    folder = fetched_folder(named)
    described = {name: getattr(named, name) for name in DESCRIBED}
    described |= {"repository": named.repository or None, "revision": named.revision or None}
    get = named.manual_steps or f"mooring data fetch {named.name}"
    return {**described, "get": get, "where": str(folder) if folder else None}
