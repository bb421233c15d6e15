"""A file with a JSON line for each run of a benchmark, so that an interrupted benchmark continues."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Choice = tuple[str, float, int]
"""A method, the value of its dial, and a seed."""

STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""The 97.5 % quantile of Student's distribution, by the number of seeds."""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; none if it does not exist. A last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def rows_to_continue(path: Path, settings: Row, parser: argparse.ArgumentParser) -> list[Row]:
    """Return the rows of a file, which must all be of these settings; end the program with one line otherwise."""
    rows = read_rows(path)
    for row in rows:
        if (other := row.get("settings", {})) != settings:
            parser.error(f"{path} has results of {other}: give another --out")
    return rows


def append_row(path: Path, row: Row) -> None:
    """Add a row to a file, also after a line that was cut off."""
    with path.open("a+") as file:
        file.seek(max(0, file.tell() - 1))
        whole = file.read() in ("", "\n")
        file.write(("" if whole else "\n") + json.dumps(row) + "\n")


def choice_of(row: Row) -> Choice:
    """Return which run a row is of."""
    return row["method"], row["dial"], row["seed"]


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean over seeds; nan for one seed.

    Example:
        >>> half_width([1.0, 2.0, 3.0])
        2.482...
    """
    if len(values) < 2:
        return float("nan")
    return STUDENT.get(len(values), 1.96) * statistics.stdev(values) / len(values) ** 0.5


def part_of(text: str) -> tuple[int, int]:
    """Return the numbers of "0/3".

    Example:
        >>> part_of("1/3")
        (1, 3)
    """
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: give one such as 0/3, 1/3 or 2/3")
    return int(index), int(count)


class Schedule:
    """Runs in their order, as long as there is time for the next one.

    A method's next run is expected to take as long as its earlier ones, or as all runs so far.

    Args:
        wanted: the runs to do.
        minutes: no run starts that would end later than this.
    """

    def __init__(self, wanted: Sequence[Choice], minutes: float) -> None:
        self.wanted, self.minutes, self.start = wanted, minutes, time.monotonic()
        self.took: dict[str, list[float]] = {}

    def __iter__(self) -> Iterator[tuple[int, Choice]]:
        """Yield the number of each run, from 1, and the run."""
        for number, choice in enumerate(self.wanted):
            if time.monotonic() - self.start + self._expected(choice[0]) > 60 * self.minutes:
                left = len(self.wanted) - number
                print(f"stopped after {self.minutes:g} minutes: {left} runs are left", file=sys.stderr)
                return
            yield number + 1, choice

    def record(self, number: int, result: str, seconds: float) -> None:
        """Note how long a run took, and print what it gave and an estimate of the time that is left."""
        method, dial, seed = self.wanted[number - 1]
        self.took.setdefault(method, []).append(seconds)
        left = sum(self._expected(method) for method, _, _ in self.wanted[number:]) / 60
        done = f"[{number}/{len(self.wanted)}] {method} {dial:g}, seed {seed}"
        print(f"{done}: {result}, {seconds:.1f} s; {left:.1f} min left", file=sys.stderr, flush=True)

    def _expected(self, method: str) -> float:
        """Return the seconds that a run is expected to take; 0 before the first."""
        known = self.took.get(method) or [seconds for values in self.took.values() for seconds in values]
        return statistics.fmean(known) if known else 0.0


def run_choices(
    wanted: Sequence[Choice],
    minutes: float,
    out: Path,
    settings: Row,
    load: Callable[[], Any],
    measure: Callable[[Any, Choice], Row],
    result_of: Callable[[Row], str],
) -> None:
    """Run choices as long as there is time, and append a row for each run.

    Args:
        wanted: the runs to do.
        minutes: no run starts that would end later than this.
        out: the file of rows.
        settings: a part of each row.
        load: returns the problem, before the first run.
        measure: runs a choice on the problem, and returns its row.
        result_of: returns what a row says, in a few words.
    """
    schedule, problem = Schedule(wanted, minutes), None
    for number, choice in schedule:
        begun = time.monotonic()
        if problem is None:
            problem = load()
            print(f"loaded in {time.monotonic() - begun:.0f} s; {len(wanted)} runs to do", file=sys.stderr, flush=True)
            begun = time.monotonic()
        row = measure(problem, choice)
        append_row(out, {**row, "settings": settings})
        schedule.record(number, result_of(row), time.monotonic() - begun)
