"""How a study gets on, on stderr: bars on a terminal, a line for each task elsewhere, nothing when quiet."""

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mooring.lab.engines.reporting import Reporter, Seen, Silent
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["Bars", "Lines", "reporter"]


def reporter(quiet: bool, console: Console | None = None) -> Reporter:
    """What suits where stderr goes.

    Example:
        >>> type(reporter(quiet=True)).__name__
        'Silent'
    """
    if quiet:
        return Silent()
    console = console or Console(stderr=True)
    return Bars(console) if console.is_terminal else Lines(sys.stderr)


class Bars:
    """Two bars: the whole study with the time left, and the fleet that sails now."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Show the bars."""
        told = TextColumn("{task.fields[told]}", style="dim")
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, TimeRemainingColumn(), told, console=self.console, transient=True)
        self.work, self.done = list(work), [0] * len(work)
        self.study = self.bars.add_task("study", total=sum(work), told=planned(fleets, done))
        self.fleet = self.bars.add_task("fleet 1", total=work[0], told="")
        self.bars.start()

    def sailing(self, number: int, fleet: Seen, done: int) -> None:
        """Move them on."""
        label = f"fleet {number + 1}"
        self.bars.update(self.fleet, description=label, total=self.work[number], completed=done, told=describe(fleet))
        self._come(number, done)

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """A fleet is done."""
        self._come(number, self.work[number])

    def _come(self, number: int, done: int) -> None:
        """A fleet has come so far; several may be under way."""
        self.done[number] = done
        self.bars.update(self.study, completed=sum(self.done))

    def note(self, line: str) -> None:
        """Print above the bars."""
        self.console.print(f"note: {line}", markup=False, highlight=False)

    def close(self) -> None:
        """Take the bars away, where there are any."""
        if hasattr(self, "bars"):
            self.bars.stop()


class Lines:
    """A line for each task of each fleet."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.told = ""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Say what there is to do."""
        self.count = len(fleets)
        self._say(planned(fleets, done))

    def sailing(self, number: int, fleet: Seen, done: int) -> None:
        """Say that a task is done."""
        if fleet.position.epoch == fleet.position.step == 0 and fleet.position.task:
            told = f"fleet {number + 1} of {self.count}: {describe(fleet)}"
            if told != self.told:
                self._say(told)
            self.told = told

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Say that a fleet is done."""
        lost = sum(result.status != "finished" for result in results)
        what = f", {pluralize(lost, 'run')} unstable or rejected" if lost else ""
        self._say(f"fleet {number + 1} of {self.count}: done{what}")

    def note(self, line: str) -> None:
        """Say it."""
        self._say(f"note: {line}")

    def close(self) -> None:
        """Nothing to take away."""

    def _say(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


def planned(fleets: Sequence[Sequence[RunSpec]], done: int) -> str:
    """What there is to do: runs that train together are a fleet."""
    known = f", {done} known already" if done else ""
    return f"{pluralize(sum(map(len, fleets)), 'run')} to train in {pluralize(len(fleets), 'fleet')}{known}"


def describe(fleet: Seen) -> str:
    """Where a fleet is, and how accurate its runs are on the tasks behind them."""
    tasks, runs = fleet.tasks, pluralize(fleet.runs, "run")
    place = f"{runs}, task {min(fleet.position.task + 1, tasks)} of {tasks}"
    if fleet.position.epoch == fleet.position.step == 0 and fleet.position.task:
        place = f"{runs}, {fleet.position.task} of {tasks} tasks done"
    return place if fleet.accuracy is None else f"{place}, accuracy {fleet.accuracy:.1f} %"
