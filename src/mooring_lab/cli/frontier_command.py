"""`mooring frontier`: every method at several strengths, and the methods on the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooring.errors import MooringError
from mooring_lab.cli import flags
from mooring_lab.cli.pasted_tables import check_format
from mooring_lab.cli.terminal_tables import (
    as_json,
    print_definitions,
    print_notes,
    print_records,
    print_table,
)
from mooring_lab.methods import registry
from mooring_lab.model.metric_definitions import DEFINITIONS
from mooring_lab.study.defaults import SWEPT_METHODS

if TYPE_CHECKING:
    from mooring_lab.study.frontier import Frontier, Sweep

SHOWN_METRICS = ("accuracy", "forgetting", "learned")
"""The metrics of the table; what was kept is 100 minus forgetting."""


@flags.with_option_groups
def frontier(
    stream_flags: flags.StreamFlags,
    training_flags: flags.TrainingFlags,
    study_flags: flags.StudyFlags,
    methods: flags.SweptMethods = SWEPT_METHODS,
    seeds: flags.Seeds = "5",
    search_seeds: Annotated[
        str,
        flags.option(
            "Seeds that choose the strengths on held-out training images: how many, or which; others than --seeds.",
            metavar="SEEDS",
        ),
    ] = "2",
    strength: Annotated[
        list[str] | None,
        flags.option(
            "Strengths to try, separated by commas, in place of the method's own; repeatable.", metavar="METHOD=NUMBERS"
        ),
    ] = None,
    lr: Annotated[float | None, flags.option("The learning rate of all methods.")] = None,
    out: Annotated[Path | None, flags.option("Write figures and numbers here.", metavar="DIR")] = None,
    json: flags.AsJson = False,
    format: flags.Format = "table",
) -> None:
    """Run `mooring frontier`."""
    from mooring_lab.cli.output import check_any_finished, command_line, open_study
    from mooring_lab.cli.parse import parse_numbers_by_method, parse_seeds
    from mooring_lab.study.comparison import comparison
    from mooring_lab.study.frontier import dials, sweep_frontiers

    form = check_format(format, json)
    names = registry.resolve_methods(methods)
    strengths = parse_numbers_by_method("--strength", strength) if strength else {}
    if not isinstance(strengths, dict):
        raise MooringError("--strength takes METHOD=NUMBERS here: each method has its own range of strengths")
    compared = comparison(
        stream_flags.options(),
        names,
        parse_seeds(seeds),
        strength={**dials(names), **strengths},
        lr=lr,
        **asdict(training_flags),
    )
    study = open_study(study_flags, out)
    chosen_by = _search_seeds(parse_seeds(search_seeds, "--search-seeds"), compared.seeds)
    by_stream = sweep_frontiers(study, compared, chosen_by)
    study.store.log(command_line())
    files = [] if out is None else _write(by_stream, out)
    rows = [row for stream_frontier in by_stream for sweep in stream_frontier.sweeps for row in sweep.rows]
    if form == "json":
        contents = [stream_frontier.to_json() for stream_frontier in by_stream]
        paths = [str(path) for path in files]
        described = {name: str(definition) for name, definition in DEFINITIONS.items()}
        content = {"study": str(study.store.path), "metrics": described, "frontiers": contents, "files": paths}
        typer.echo(as_json(content))
    else:
        if form == "csv":
            sweeps = (sweep for stream_frontier in by_stream for sweep in stream_frontier.sweeps)
            print_records([{**row.to_record(), "chosen": row is s.best} for s in sweeps for row in s.rows])
        else:
            for stream_frontier in by_stream:
                _print(stream_frontier, form)
            print_definitions(SHOWN_METRICS, form)
        figures = [f"figure:  {path}" for path in files if path.suffix == ".png"]
        where = [f"results: {study.store.path}", *(figures or ["--out DIR writes the figure"])]
        typer.echo("\n".join(where), err=form != "table")
    check_any_finished(rows)


def _print(frontier: Frontier, form: str) -> None:
    from mooring_lab.study.frontier import GOOD_POINTS

    metrics = [DEFINITIONS[name].column for name in SHOWN_METRICS]
    header = ("method", "chosen", *metrics, "good from", "to", "decades", "area %", "")
    on_frontier = {id(row) for _, row in frontier.envelope}
    rows = [_cells(sweep, on_frontier) for sweep in frontier.sweeps]
    scored = f"test images, seeds {_numbers(frontier.scored_seeds)}"
    print_table(header, rows, f"{frontier.stream}: {scored}", form)
    notes = []
    if frontier.search_seeds:
        held_out = f"held-out training images, seeds {_numbers(frontier.search_seeds)}"
        notes.append(f"chosen: the strength with the highest accuracy on {held_out}")
    notes.append(f"good: within {GOOD_POINTS:g} points of the chosen one")
    notes.append("area: under the curve of learning accuracy over 100 minus forgetting (T), at most 100")
    print_notes(notes, form)
    if form == "markdown":
        typer.echo()  # what follows is another paragraph
    if form != "table":
        return
    typer.echo(f"on the frontier: {', '.join(row.label for _, row in frontier.envelope)}")
    for _, row in frontier.envelope:
        rival, difference = frontier.rival(row.setting.method), frontier.lead(row.setting.method)
        if rival and rival.best and difference and row is next(s.best for s in frontier.sweeps if row in s.rows):
            versus = f"{row.label} against {rival.best.label}, the best of another kind"
            typer.echo(f"{versus}: {difference.as_difference()} points of accuracy")


def _search_seeds(given: int | list[int], scored: Sequence[int]) -> list[int]:
    """Return the seeds of the search: those that are given, or as many after the last that scores."""
    return given if isinstance(given, list) else [max(scored) + 1 + number for number in range(given)]


def _numbers(seeds: Sequence[int]) -> str:
    """Return seeds as --seeds takes them."""
    contiguous = len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}-{seeds[-1]}" if contiguous else ",".join(map(str, seeds))


def _cells(sweep: Sweep, on_frontier: set[int]) -> list[str]:
    best, good, area = sweep.best, sweep.good_range, sweep.area
    if best is None:
        return [sweep.name, *[""] * 8, "no setting finished with every seed"]
    metrics = [str(best.metrics.get(name, "")) for name in SHOWN_METRICS]
    good_range = ["", "", ""] if good is None else [f"{good[0]:g}", f"{good[1]:g}", _decades(sweep)]
    best_at = "" if best.setting.strength is None else f"{best.setting.strength:g}"
    mark = "on the frontier" if any(id(row) in on_frontier for row in sweep.rows) else ""
    return [sweep.name, best_at, *metrics, *good_range, "" if area is None else str(area), mark]


def _decades(sweep: Sweep) -> str:
    return "" if sweep.decades is None else f"{sweep.decades:.1f}"


def _write(by_stream: list[Frontier], out: Path) -> list[Path]:
    """Write the figure of every stream and `frontier.json`, and return the files."""
    from mooring_lab.model.atomic_files import check_writable, write_atomically
    from mooring_lab.report.frontier_figure import draw
    from mooring_lab.report.picture import render_drawing
    from mooring_lab.report.section import slug
    from mooring_lab.report.style import figure_style

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
