"""`mooring frontier`: every method at several strengths, and the methods on the frontier."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooring.cli.option_groups import (
    METHODS_HELP,
    AsJson,
    Seeds,
    StreamFlags,
    StudyFlags,
    TrainingFlags,
    complete_list,
    with_option_groups,
)
from mooring.cli.terminal_tables import as_json, print_table
from mooring.errors import MooringError
from mooring.lab.methods import registry
from mooring.lab.study.defaults import SWEPT_METHODS

if TYPE_CHECKING:
    from mooring.lab.study.frontier import Frontier, Sweep

__all__ = ["frontier"]


@with_option_groups
def frontier(
    stream_flags: StreamFlags,
    training_flags: TrainingFlags,
    study_flags: StudyFlags,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help=f"{METHODS_HELP} {len(SWEPT_METHODS.split(','))} by default.",
            autocompletion=complete_list(lambda: registry.METHODS),
            show_default=False,
        ),
    ] = SWEPT_METHODS,
    seeds: Seeds = "5",
    strength: Annotated[
        list[str] | None,
        typer.Option("--strength", help="METHOD=NUMBERS in place of the method's own strengths; repeatable."),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="The learning rate of all methods.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write figures and numbers here.", metavar="DIR")] = None,
    json: AsJson = False,
) -> None:
    """Run `mooring frontier`."""
    from mooring.cli.output import command_line, open_study
    from mooring.cli.parse import parse_seeds
    from mooring.lab.study.comparison import comparison
    from mooring.lab.study.frontier import build_frontiers, dials

    names = registry.resolve_methods(methods)
    compared = comparison(
        stream_flags.options(),
        names,
        parse_seeds(seeds),
        strength={**dials(names), **_strengths(strength or [])},
        lr=lr,
        **asdict(training_flags),
    )
    study = open_study(study_flags, out)
    by_stream = build_frontiers(study.compare(compared))
    study.store.log(command_line())
    files = [] if out is None else _write(by_stream, out)
    if json:
        contents = [stream_frontier.to_json() for stream_frontier in by_stream]
        typer.echo(
            as_json({"study": str(study.store.path), "frontiers": contents, "files": [str(path) for path in files]})
        )
        return
    for stream_frontier in by_stream:
        _print(stream_frontier)
    figures = [f"figure:  {path}" for path in files if path.suffix == ".png"]
    typer.echo("\n".join([f"results: {study.store.path}", *(figures or ["--out DIR writes the figure"])]))


def _strengths(values: list[str]) -> dict[str, list[float]]:
    """Return strengths by method; the same numbers mean something else to each method."""
    from mooring.cli.parse import parse_numbers_by_method

    by_method = parse_numbers_by_method("--strength", values)
    if by_method is not None and not isinstance(by_method, dict):
        raise MooringError("--strength takes METHOD=NUMBERS here: each method has its own range of strengths")
    return by_method or {}


def _print(frontier: Frontier) -> None:
    from mooring.lab.study.frontier import GOOD_POINTS

    header = ("method", "best at", "accuracy %", "forgetting", "learned", "good from", "to", "decades", "area %", "")
    on_frontier = {id(row) for _, row in frontier.envelope}
    rows = [_cells(sweep, on_frontier) for sweep in frontier.sweeps]
    print_table(header, rows, f"{frontier.stream}: each method at its best strength")
    typer.echo(
        f"good: within {GOOD_POINTS:g} points of the best. "
        "area: under the curve of learned over retained, at most 100.\n"
        f"on the frontier: {', '.join(row.label for _, row in frontier.envelope)}"
    )
    for _, row in frontier.envelope:
        rival, difference = frontier.rival(row.setting.method), frontier.lead(row.setting.method)
        if rival and rival.best and difference and row is next(s.best for s in frontier.sweeps if row in s.rows):
            interval = f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"
            versus = f"{row.label} against {rival.best.label}, the best of another kind"
            typer.echo(f"{versus}: {interval} points of accuracy")


def _cells(sweep: Sweep, on_frontier: set[int]) -> list[str]:
    best, good, area = sweep.best, sweep.good_range, sweep.area
    if best is None:
        return [sweep.method, *[""] * 8, "no setting finished with every seed"]
    metrics = [str(best.metrics[name]) for name in ("accuracy", "forgetting", "learned")]
    good_range = ["", "", ""] if good is None else [f"{good[0]:g}", f"{good[1]:g}", f"{sweep.decades:.1f}"]
    strength = best.setting.strength
    best_at = "" if strength is None else f"{strength:g}"
    mark = "on the frontier" if any(id(row) in on_frontier for row in sweep.rows) else ""
    return [sweep.method, best_at, *metrics, *good_range, "" if area is None else str(area), mark]


def _write(by_stream: list[Frontier], out: Path) -> list[Path]:
    """Write the figure of every stream and `frontier.json`, and return the files."""
    from mooring.lab.model.atomic_files import check_writable, write_atomically
    from mooring.report.figures.frontier_figure import draw
    from mooring.report.picture import render_drawing
    from mooring.report.section import slug
    from mooring.report.style import figure_style

    check_writable(out)
    files, slugs = list[Path](), list[str]()
    with figure_style():
        for stream_frontier in by_stream:
            slugs.append(slug(stream_frontier.stream, slugs))
            image = render_drawing(draw(stream_frontier), slugs[-1])
            for ending, content in (("svg", image.svg), ("png", image.png)):
                files.append(out / f"{image.name}.{ending}")
                write_atomically(files[-1], content)
    files.append(out / "frontier.json")
    write_atomically(files[-1], (as_json([stream_frontier.to_json() for stream_frontier in by_stream]) + "\n").encode())
    return files
