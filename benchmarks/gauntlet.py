"""The default of `attach(reference=...)` against a line of KL by hand, in 240 small cells.

A cell is a problem and a way to train on it: an optimizer, a schedule, a number of steps, clipped gradients or not, a
summed loss or a mean one, adapters or all weights, one new task or five, and a reference of 64 or 1,024 inputs that
were trained on or not. Every pair of levels of two of these factors occurs where they can be combined, in each of two
halves that share no problem. Constants are chosen on the half "choice"; the half "reported" is run once, at the end.

    python benchmarks/gauntlet.py run --half choice --label first            # what is missing, about 20 minutes
    python benchmarks/gauntlet.py run --half choice --label second --methods mooring   # another version of the code
    python benchmarks/gauntlet.py summary --half choice --label second
    python benchmarks/gauntlet.py table                                      # that of docs/budget.md

Rows of peers do not depend on the code of Mooring, so they are stored once, beside those of each label. The learning
rate is the best of three by the training loss after 200 steps of plain training (`gauntlet_runs/cell_methods.py`).
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from gauntlet_problems.problem_set import HALVES
from gauntlet_runs.cell_methods import METHODS, CellRun, best_rate, rate_key
from gauntlet_runs.covering_design import GauntletCell, design
from gauntlet_runs.criteria import page_table, results_of, summary
from run_log import Row, append_row, read_rows

FOLDER = Path(__file__).parent / "gauntlet_rows"
"""Where rows are stored by default."""

ON_THE_PAGE = {
    "choice half, before": ("choice", "before"),
    "choice half": ("choice", "ceiling"),
    "reported half": ("reported", "ceiling"),
}
"""The columns of the table on the page: a half and a label of stored rows."""

PEERS = "peers"
"""The label of the rows of all methods but Mooring."""


@dataclass(frozen=True)
class CellWork:
    """What a process does at a time: methods on one cell with one seed.

    Attributes:
        cell: the cell.
        seed: the seed.
        methods: the methods whose rows are missing.
        rate: the learning rate, if it was chosen before.
        steps: the most steps of a task.
    """

    cell: GauntletCell
    seed: int
    methods: tuple[str, ...]
    rate: float | None
    steps: int | None

    @property
    def weight(self) -> int:
        """The number of steps."""
        return min(self.cell.length, self.steps or self.cell.length) * self.cell.tasks * len(self.methods)


def work_on(work: CellWork) -> tuple[Row | None, list[Row]]:
    """Return the choice of a learning rate, if it was not known, and a row for each method."""
    torch.set_num_threads(1)
    cell = work.cell
    if work.steps:
        cell = GauntletCell(**{**vars(cell), "length": min(cell.length, work.steps)})
    choice = best_rate(cell) if work.rate is None else None
    lr = choice["lr"] if choice else work.rate
    rows = [CellRun(cell, method, work.seed, lr).row() for method in work.methods]
    return choice, [{**row, "cell": work.cell.text} for row in rows]


class StoredRows:
    """The stored rows of a half, a label and of the peers.

    Args:
        folder: of the files.
        half: the half of the problems.
        label: of a version of Mooring.
    """

    def __init__(self, folder: Path, half: str, label: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = {name: folder / f"{half}-{name}.jsonl" for name in (PEERS, label)}
        self.label, self.rate_path = label, folder / "rates.jsonl"
        self.rates = {row["key"]: row["lr"] for row in read_rows(self.rate_path)}

    def read(self) -> list[Row]:
        """Return all rows."""
        return [row for path in self.paths.values() for row in read_rows(path)]

    def add(self, choice: Row | None, rows: Sequence[Row]) -> None:
        """Store a choice of a learning rate, and rows."""
        if choice and choice["key"] not in self.rates:
            self.rates[choice["key"]] = choice["lr"]
            append_row(self.rate_path, choice)
        for row in rows:
            append_row(self.paths[self.label if row["method"] == "mooring" else PEERS], row)


def missing_work(
    cells: Sequence[GauntletCell], stored: StoredRows, methods: Sequence[str], seeds: int, steps: int | None
) -> list[CellWork]:
    """Return what has no rows yet, seed by seed, in the order of the design."""
    known = {(row["cell"], row["method"], row["seed"]) for row in stored.read()}
    wanted = []
    for seed in range(seeds):
        for cell in cells:
            left = tuple(method for method in methods if (cell.text, method, seed) not in known)
            if left:
                wanted.append(CellWork(cell, seed, left, stored.rates.get(rate_key(cell)), steps))
    return wanted


def finished_work(wanted: Sequence[CellWork], jobs: int) -> Iterator[tuple[CellWork, tuple[Row | None, list[Row]]]]:
    """Yield work as it is done, in this process or in several."""
    if jobs == 1:
        for work in wanted:
            yield work, work_on(work)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures: dict[Future[tuple[Row | None, list[Row]]], CellWork] = {
            pool.submit(work_on, work): work for work in wanted
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run(options: argparse.Namespace) -> None:
    """Run what is missing; print each cell, and how long the others will take, also to a log file."""
    stored = StoredRows(options.folder, options.half, options.label)
    wanted = missing_work(cells_of(options), stored, options.methods, options.seeds, options.steps)
    log, start, done = stored.paths[options.label].with_suffix(".log"), time.monotonic(), 0
    total = sum(work.weight for work in wanted)
    for number, (work, (choice, rows)) in enumerate(finished_work(wanted, options.jobs), 1):
        stored.add(choice, rows)
        done += work.weight
        spent = time.monotonic() - start
        shown = "; ".join(f"{row['method']} {100 * row['learned']:.0f} @ {row['held_out']:.3f}" for row in rows)
        left = spent * (total - done) / done / 60
        line = f"[{number}/{len(wanted)}] {work.cell.text} seed {work.seed}: {shown}; {left:.1f} min left"
        print(line, flush=True)
        with log.open("a") as file:
            file.write(line + "\n")


def cells_of(options: argparse.Namespace) -> list[GauntletCell]:
    """Return the cells that are asked for; the first ones cover the most pairs."""
    return design(options.half)[: options.cells]


def table_of_the_page(folder: Path = FOLDER) -> str:
    """Return the table of the page, from stored rows of the first seed."""
    parts = {}
    for column, (half, label) in ON_THE_PAGE.items():
        rows = [row for row in StoredRows(folder, half, label).read() if row["seed"] == 0]
        parts[column] = results_of(design(half), rows)
    return page_table(parts)


def method_list(text: str) -> list[str]:
    """Return the methods of a list with commas.

    Example:
        >>> method_list("plain,kl 1")
        ['plain', 'kl 1']
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a method: {', '.join(METHODS)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, or print a summary or the cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "summary", "cells", "table"))
    parser.add_argument("--half", choices=HALVES, default="choice")
    parser.add_argument("--label", default="default", help="names the rows of a version of Mooring")
    parser.add_argument("--cells", type=int, help="only so many cells of the half")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", type=method_list, default=list(METHODS), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--jobs", type=int, default=1, help="the number of processes")
    parser.add_argument("--steps", type=int, help="the most steps of a task, to try something out")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the rows")
    options = parser.parse_args(arguments)
    if options.label == PEERS:
        parser.error(f"--label {PEERS} is for the rows of peers: give another one")
    if options.command == "cells":
        print("\n".join(cell.text for cell in cells_of(options)))
    elif options.command == "run":
        run(options)
    elif options.command == "table":
        print(table_of_the_page(options.folder))
    if options.command in ("run", "summary"):
        print(summary(results_of(cells_of(options), StoredRows(options.folder, options.half, options.label).read())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
