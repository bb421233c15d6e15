"""Progress of a study on stderr: bars on a terminal, one line per task elsewhere, nothing with --quiet."""

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mooring_lab.engines.runner import FleetProgress, Reporter, SilentReporter
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec


def reporter(quiet: bool, console: Console | None = None) -> Reporter:
    """Return bars for a terminal, lines for a file or a pipe, and nothing if quiet.

    Example:
        >>> type(reporter(quiet=True)).__name__
        'SilentReporter'
    """
    if quiet:
        return SilentReporter()
    console = console or Console(stderr=True)
    return BarReporter(console) if console.is_terminal else LineReporter(sys.stderr)


class BarReporter(Reporter):
    """Two bars: the study with its remaining time, and the fleet that reported last."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Show the bars."""
        status = TextColumn("{task.fields[status]}", style="dim")
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, TimeRemainingColumn(), status, console=self.console, transient=True)
        self.work, self.done = list(work), [0] * len(work)
        self.study = self.bars.add_task("study", total=sum(work), status=planned(fleets, done))
        self.fleet = self.bars.add_task("fleet 1", total=work[0], status="")
        self.bars.start()

    def advanced(self, number: int, fleet: FleetProgress, done: int) -> None:
        """Advance both bars."""
        label, status = f"fleet {number + 1}", describe(fleet)
        self.bars.update(self.fleet, description=label, total=self.work[number], completed=done, status=status)
        self._advance(number, done)

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Advance the study by the whole fleet."""
        self._advance(number, self.work[number])

    def _advance(self, number: int, done: int) -> None:
        """Set the progress of one fleet; several may train at once."""
        self.done[number] = done
        self.bars.update(self.study, completed=sum(self.done))

    def note(self, line: str) -> None:
        """Print a line above the bars."""
        self.console.print(f"note: {line}", markup=False, highlight=False)

    def close(self) -> None:
        """Remove the bars, if they were shown."""
        if hasattr(self, "bars"):
            self.bars.stop()


class LineReporter(Reporter):
    """One line for each finished task of each fleet."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.last = ""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Print the number of runs to train."""
        self.count = len(fleets)
        self._print(planned(fleets, done))

    def advanced(self, number: int, fleet: FleetProgress, done: int) -> None:
        """Print a line when a task is finished."""
        if fleet.position.epoch == fleet.position.step == 0 and fleet.position.task:
            line = f"fleet {number + 1} of {self.count}: {describe(fleet)}"
            if line != self.last:
                self._print(line)
            self.last = line

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Print that a fleet is finished, and how many of its runs failed."""
        failed = sum(result.status != "finished" for result in results)
        failures = f", {pluralize(failed, 'run')} unstable or rejected" if failed else ""
        self._print(f"fleet {number + 1} of {self.count}: done{failures}")

    def note(self, line: str) -> None:
        """Print a note."""
        self._print(f"note: {line}")

    def close(self) -> None:
        """Do nothing: lines stay."""

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


def planned(fleets: Sequence[Sequence[RunSpec]], done: int) -> str:
    """Describe the runs to train; runs that train together are a fleet."""
    known = f", {done} known already" if done else ""
    return f"{pluralize(sum(map(len, fleets)), 'run')} to train in {pluralize(len(fleets), 'fleet')}{known}"


def describe(fleet: FleetProgress) -> str:
    """Describe the position of a fleet, and the mean accuracy of its runs on the finished tasks."""
    tasks, runs = fleet.tasks, pluralize(fleet.runs, "run")
    position = f"{runs}, task {min(fleet.position.task + 1, tasks)} of {tasks}"
    if fleet.position.epoch == fleet.position.step == 0 and fleet.position.task:
        position = f"{runs}, {fleet.position.task} of {tasks} tasks done"
    return position if fleet.accuracy is None else f"{position}, accuracy {fleet.accuracy:.1f} %"
