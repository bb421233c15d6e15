"""`mooring frontier`: every method over its own dial, and who is on the frontier."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mooring.cli import parse as text
from mooring.cli.option_groups import AsJson, Seeds, StreamFlags, StudyFlags, TrainingFlags, one_of, spread
from mooring.cli.output import command_line, opened
from mooring.cli.terminal_tables import as_json, print_table
from mooring.errors import MooringError
from mooring.lab.methods import registry, resolve_methods
from mooring.lab.model.atomic_files import check_writable, write_atomically
from mooring.lab.study.comparison import comparison
from mooring.lab.study.frontier import METHODS, NEAR, Frontier, Swept, dials, frontiers

__all__ = ["frontier"]


@spread
def frontier(
    streams: StreamFlags,
    training: TrainingFlags,
    kept: StudyFlags,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help=f"Names with commas, or all; `mooring methods` lists them. {len(METHODS.split(','))} by default.",
            autocompletion=one_of(lambda: registry.METHODS),
            show_default=False,
        ),
    ] = METHODS,
    seeds: Seeds = "5",
    strength: Annotated[
        list[str] | None,
        typer.Option("--strength", help="METHOD=NUMBERS instead of the method's own dial; may be repeated."),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="The learning rate of all methods.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write figures and numbers here.", metavar="DIR")] = None,
    json: AsJson = False,
) -> None:
    """Sweep every method over its dial, and draw what was learned against what was kept."""
    names = resolve_methods(methods)
    asked = comparison(
        streams.options(),
        names,
        text.seeds(seeds),
        strength={**dials(names), **_told(strength or [])},
        lr=lr,
        **asdict(training),
    )
    study = opened(kept, out)
    found = frontiers(study.compare(asked))
    study.store.log(command_line())
    files = [] if out is None else _write(found, out)
    if json:
        told = {"study": str(study.store.path), "frontiers": [each.to_json() for each in found]}
        typer.echo(as_json({**told, "files": [str(path) for path in files]}))
        return
    for each in found:
        _print(each)
    figures = [f"figure:  {path}" for path in files if path.suffix == ".png"]
    typer.echo("\n".join([f"results: {study.store.path}", *(figures or ["--out DIR draws it"])]))


def _told(given: list[str]) -> dict[str, list[float]]:
    """Dials by method; numbers for all would mean something else to each."""
    found = text.numbers_by_method("--strength", given)
    if found is not None and not isinstance(found, dict):
        raise MooringError("--strength wants METHOD=NUMBERS here: each method has a dial of its own")
    return found or {}


def _print(found: Frontier) -> None:
    header = ("method", "best at", "accuracy %", "forgetting", "learned", "good from", "to", "decades", "area %", "")
    on = {id(row) for _, row in found.hull}
    rows = [_cells(each, on) for each in found.swept]
    print_table(header, rows, f"{found.stream}: each method at the best of its dial")
    typer.echo(
        f"good: within {NEAR:g} points of the best. area: under what was learned over what was kept, 100 is all.\n"
        f"on the frontier: {', '.join(row.label for _, row in found.hull)}"
    )
    for _, row in found.hull:
        rival, apart = found.rival(row.setting.method), found.ahead(row.setting.method)
        if rival and rival.best and apart and row is next(e.best for e in found.swept if row in e.rows):
            against = f"{row.label} against {rival.best.label}, the best of another kind"
            typer.echo(f"{against}: {apart.mean:+.2f} [{apart.low:+.2f}, {apart.high:+.2f}] points of accuracy")


def _cells(each: Swept, on: set[int]) -> list[str]:
    best, good, size = each.best, each.good, each.area
    if best is None:
        return [each.method, *[""] * 8, "no setting finished with every seed"]
    told = [str(best.metrics[name]) for name in ("accuracy", "forgetting", "learned")]
    dial = ["", "", ""] if good is None else [f"{good[0]:g}", f"{good[1]:g}", f"{each.decades:.1f}"]
    strength = best.setting.strength
    at = "" if strength is None else f"{strength:g}"
    standing = "on the frontier" if any(id(row) in on for row in each.rows) else ""
    return [each.method, at, *told, *dial, "" if size is None else str(size), standing]


def _write(found: list[Frontier], out: Path) -> list[Path]:
    """Figures of every stream, and `frontier.json`."""
    from mooring.report.figures.frontier_figure import draw  # matplotlib is slow to import
    from mooring.report.picture import picture
    from mooring.report.section import slug
    from mooring.report.style import drawing

    check_writable(out)
    files, slugs = list[Path](), list[str]()
    with drawing():
        for each in found:
            slugs.append(slug(each.stream, slugs))
            made = picture(draw(each), slugs[-1])
            for ending, content in (("svg", made.svg), ("png", made.png)):
                files.append(out / f"{made.name}.{ending}")
                write_atomically(files[-1], content)
    files.append(out / "frontier.json")
    write_atomically(files[-1], (as_json([each.to_json() for each in found]) + "\n").encode())
    return files
