"""Open the study of a command, and print its results."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from mooring_lab.cli.flags import OutputFlags, StudyFlags
from mooring_lab.cli.progress_bar import progress_bar
from mooring_lab.cli.study_progress import reporter
from mooring_lab.cli.terminal_tables import as_json, format_bytes, print_choices, print_rows
from mooring_lab.engines.runner import SilentReporter
from mooring_lab.model.atomic_files import check_writable
from mooring_lab.model.method_versions import without_version
from mooring_lab.model.metric_definitions import DEFINITIONS
from mooring_lab.model.results import Result
from mooring_lab.model.summary import Row
from mooring_lab.streams.cache import cache_folder, cache_size
from mooring_lab.study.protocol import Tuned
from mooring_lab.study.study import Study


class _CommandStudy(Study):
    """A study that shows a progress bar while images are decoded, and says where they are kept."""

    def open(self, source: Any, progress: Any = None) -> Any:
        if isinstance(self.reporter, SilentReporter):
            return super().open(source, progress)
        before = cache_size()
        with progress_bar() as bar:
            stream = super().open(source, progress or bar)
        if added := cache_size() - before:
            place = f"{format_bytes(added)} of decoded images are kept in {cache_folder()}"
            self.reporter.note(f"{place}; `mooring data clear` deletes them")
        return stream


def open_study(flags: StudyFlags, report: Path | None = None) -> Study:
    """Open the study that the options name, with progress on stderr; refuse a page that cannot be written."""
    if report is not None:
        check_writable(report, create=False)
    settings = asdict(flags)
    return _CommandStudy(settings.pop("study"), reporter=reporter(settings.pop("quiet")), **settings)


def print_results(
    study: Study, rows: Sequence[Row], output: OutputFlags, searched: Sequence[Result] = (), **entries: Any
) -> None:
    """Print rows as tables or as JSON, and write the page if the options ask for it.

    Args:
        study: the study of the rows.
        rows: the results.
        output: the options of the output.
        searched: further runs for the page.
        entries: further entries for the JSON object.
    """
    page, baseline = None, choose_baseline(output.baseline, [row.setting.method for row in rows])
    if output.report is not None:
        from mooring_lab.report import write_report  # imports matplotlib, which is slow

        results = [result for row in rows for result in row.results] + list(searched)
        page = write_report(results, output.report, command=command_line(), baseline=baseline)
    if output.form == "json":
        described = {name: str(definition) for name, definition in DEFINITIONS.items()}
        content = {"study": str(study.store.path), "metrics": described, "rows": [row.to_json() for row in rows]}
        content |= entries
        typer.echo(as_json({**content, "report": None if page is None else str(page)}))
    else:
        print_rows(rows, baseline, output.form)
        where = f"results: {study.store.path}" + (f"\npage:    {page}" if page else "")
        typer.echo(where, err=output.form != "table")  # what is pasted is alone on stdout
    check_any_finished(rows)


def choose_baseline(baseline: str | None, methods: Sequence[str]) -> str | None:
    """Return the method to compare with: plain beside others if none is given, and None for "none".

    Args:
        baseline: what was given.
        methods: the methods of the runs.

    Example:
        >>> choose_baseline(None, ["plain", "ewc"]), choose_baseline(None, ["plain"]), choose_baseline("none", [])
        ('plain', None, None)
    """
    if baseline is None:
        baseline = "plain" if {"plain"} < set(methods) else "none"
    versions = {without_version(method): method for method in methods}  # an imported method is named without its hash
    return None if baseline == "none" else versions.get(baseline, baseline)


def check_any_finished(rows: Sequence[Row]) -> None:
    """Exit with 1 and a line on stderr if no run finished: a script must not take that for a result."""
    if not any(row.metrics for row in rows):
        remedy = "give a smaller lr or strength, or read why with `mooring show --json --runs`"
        typer.echo(f"no run finished: {remedy}", err=True)
        raise typer.Exit(1)


def print_tuned(study: Study, tuned: Tuned, output: OutputFlags) -> None:
    """Print the choices of a search and the results of training with them; the page shows both."""
    if output.form not in ("json", "csv"):  # one table in a CSV file
        print_choices(tuned.choices, output.form)
    choices = [choice.to_json() for choice in tuned.choices]
    searched = [result for choice in tuned.choices for row in choice.grid for result in row.results]
    print_results(study, tuned.rows, output, searched, choices=choices)


def command_line() -> str:
    """Return the command as it was typed."""
    return shlex.join(["mooring", *sys.argv[1:]])
