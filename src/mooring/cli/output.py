"""A study behind a command: its progress shown, its results told."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from mooring.cli.option_groups import OutputFlags, StudyFlags
from mooring.cli.progress_bar import progress_bar
from mooring.cli.study_progress import reporter
from mooring.cli.terminal_tables import as_json, print_choices, print_rows
from mooring.lab.engines.reporting import Silent
from mooring.lab.model.atomic_files import check_writable
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row
from mooring.lab.study.protocol import Tuned
from mooring.lab.study.study import Study

__all__ = ["command_line", "opened", "tell", "tell_tuned"]


class _Shown(Study):
    """A study that shows a bar while images are decoded, and takes its bars away whatever happens."""

    def open(self, source: Any, progress: Any = None) -> Any:
        if isinstance(self.reporter, Silent):
            return super().open(source, progress)
        with progress_bar() as shown:
            return super().open(source, progress or shown)


def opened(flags: StudyFlags, report: Path | None = None) -> Study:
    """The study that the options name, with its progress on stderr; a page that cannot be written is refused."""
    if report is not None:
        check_writable(report, create=False)
    told = reporter(flags.quiet)
    return _Shown(
        flags.study,
        device=flags.device,
        fleet=flags.fleet,
        wait=flags.wait,
        reporter=told,
        engine=flags.engine,
        address=flags.address,
        share=flags.share,
        deterministic=flags.deterministic,
    )


def tell(study: Study, rows: Sequence[Row], output: OutputFlags, searched: Sequence[Result] = (), **rest: Any) -> None:
    """Print rows as a table or as JSON, and write the page where it was asked for.

    Args:
        study: where they come from.
        rows: what to tell.
        output: how.
        searched: runs that the page has beside those of the rows.
        rest: what else the JSON has.
    """
    page = None
    if output.report is not None:
        from mooring.report import write_report  # matplotlib is slow to import

        results = [result for row in rows for result in row.results] + list(searched)
        title, command = study.store.path.stem, command_line()
        page = write_report(results, output.report, title=title, command=command, baseline=output.baseline)
    if output.json:
        told = {"study": str(study.store.path), "rows": [row.to_json() for row in rows], **rest}
        typer.echo(as_json({**told, "report": None if page is None else str(page)}))
        return
    print_rows(rows, output.baseline)
    typer.echo(f"results: {study.store.path}" + (f"\npage:    {page}" if page else ""))


def tell_tuned(study: Study, tuned: Tuned, output: OutputFlags) -> None:
    """Print what a search chose and what came of it, and write the page with both."""
    if not output.json:
        print_choices(tuned.choices)
    told = [choice.to_json() for choice in tuned.choices]
    searched = [result for choice in tuned.choices for row in choice.grid for result in row.results]
    tell(study, tuned.rows, output, searched, choices=told)


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["mooring", *sys.argv[1:]])
