"""Compare moored LoRA with what else keeps old knowledge: what is learned against what is kept, each over its dial.

Digits: a network learns upright ones, then adapters learn those on their side; both are accuracies in percent. GPT: the
model of examples/finetune_language_model.py, from code to prose; both are negative losses in nats per character. Each
run is a line of a JSON file as soon as it has ended, so that an interrupted benchmark continues.

    python benchmarks/adapter_peers.py --out digits.jsonl --markdown
    python benchmarks/adapter_peers.py --task gpt --size large --device cuda --precision bf16 --out large.jsonl
    python benchmarks/adapter_peers.py --show digits.jsonl large.jsonl largest.jsonl --markdown --figure peers.png

Several processes can share the methods: `--part 0/3`, `--part 1/3` and `--part 2/3` with the same --out, after
`--prepare`, which pre-trains the GPT and does nothing else.
"""

import argparse
import functools
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers.adapter_methods import DIALS, METHODS
from peers.adapter_task import Task, digits_task, gpt_task
from precision import PRECISIONS, set_precision
from run_log import Choice, Row, Schedule, append_row, choice_of, part_of, read_rows, rows_to_continue

from mooring.errors import NonFiniteError


def task_maker(given: argparse.Namespace) -> Callable[[int], Task]:
    """Return a function that returns the task of a seed; what seeds share is made once."""
    set_precision(given.precision)
    if given.task == "digits":
        return functools.cache(lambda seed: digits_task(seed, given.epochs))
    options = {"batch": given.batch, "steps": given.steps, "lr": given.lr}
    make = functools.cache(lambda: gpt_task(given.size, given.folder, given.device, given.precision, **options))
    return lambda seed: make()


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options that results depend on; a file has results of one setting."""
    names = ["task", "epochs"] if given.task == "digits" else ["task", "size", "precision", "batch", "steps", "lr"]
    return {name: value for name in names if (value := getattr(given, name)) is not None}


def choices(given: argparse.Namespace) -> list[Choice]:
    """Return the runs of this part's methods, a seed of all of them before the next seed, and the first dials first."""
    index, count = given.part
    methods = [name for name in given.methods or METHODS if name in DIALS[given.task]][index::count]
    dials = {name: given.dial or DIALS[given.task][name][: given.dials] for name in methods}
    places = [(place, name) for place in range(max(map(len, dials.values()), default=0)) for name in methods]
    chosen = [(name, dials[name][place]) for place, name in places if place < len(dials[name])]
    return [(name, dial, seed) for seed in range(given.seeds) for name, dial in chosen]


def measure(task: Task, choice: Choice) -> Row:
    """Train one run, and return its row, which says so if the run diverged."""
    method, dial, seed = choice
    row: Row = {"method": method, "dial": dial, "seed": seed, "before": task.before()}
    row["parameters"] = sum(p.numel() for p in task.base.parameters())
    torch.manual_seed(100 + seed)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained = METHODS[method](task, seed, dial)
    except NonFiniteError:
        return {**row, "diverged": True}
    row["seconds"] = time.perf_counter() - start
    if not all(math.isfinite(value) for result in trained.results for value in result):
        return {**row, "diverged": True}
    return {**row, "results": trained.results, "nats": trained.nats}


def run_all(given: argparse.Namespace, wanted: list[Choice]) -> None:
    """Run what is missing within the time, and write a row for each run."""
    settings, schedule = settings_of(given), Schedule(wanted, given.minutes)
    task_of = task_maker(given)
    for number, choice in schedule:
        task = task_of(choice[2])
        start = time.monotonic()
        row = measure(task, choice)
        append_row(given.out, {**row, "settings": settings})
        schedule.record(number, _result_line(row), time.monotonic() - start)


def _result_line(row: Row) -> str:
    if row.get("diverged"):
        return "diverged"
    (kept, learned), before = row["results"][-1], row["before"]
    nats = f", measured {row['nats']:.3f} nats" if row["nats"] is not None else ""
    return f"kept {kept:.3f} ({kept - before[0]:+.3f}), learned {learned:.3f} ({learned - before[1]:+.3f}){nats}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("digits", "gpt"), default="digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help="default: all of the task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dials", type=int, help="only so many values of each dial, those that tell most")
    parser.add_argument("--dial", type=float, nargs="+", help="these values, for all methods")
    parser.add_argument("--epochs", type=int, default=18, help="of digits")
    parser.add_argument("--size", default="small", help="of the GPT: tiny, small, large or largest")
    parser.add_argument("--batch", type=int, help="sequences in a batch of the GPT (default: that of the size)")
    parser.add_argument("--steps", type=int, help="of the GPT's fine-tuning (default: those of the size)")
    parser.add_argument("--lr", type=float, help="learning rate of the GPT's adapters (default: that of the size)")
    parser.add_argument("--device", default="cpu", help="of the GPT")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="of training the GPT")
    parser.add_argument("--folder", type=Path, default=Path("cache"), help="where the pre-trained GPT is kept")
    parser.add_argument("--prepare", action="store_true", help="only pre-train the GPT")
    parser.add_argument("--out", type=Path, default=Path("adapter-peers.jsonl"), help="the file of results")
    parser.add_argument("--part", type=part_of, default=(0, 1), help="this process's part of the methods, such as 0/3")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would end later than this")
    parser.add_argument("--show", type=Path, nargs="+", help="measure nothing; show the results in these files")
    parser.add_argument("--markdown", action="store_true", help="print a table of each file")
    parser.add_argument("--figure", type=Path, help="draw a panel for each file")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, and print and draw the results."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.show is None:
        rows = rows_to_continue(given.out, settings_of(given), parser)
        if given.prepare:
            task_maker(given)(0)
            return 0
        known = {choice_of(row) for row in rows}
        run_all(given, [choice for choice in choices(given) if choice not in known])
    if given.markdown or given.figure:
        from peers.side_by_side import compare, markdown

        comparisons = [compare(read_rows(path)) for path in given.show or [given.out]]
        if given.markdown:
            print("\n\n".join(f"{comparison.title}:\n\n{markdown(comparison)}" for comparison in comparisons))
        if given.figure:
            from peers.side_by_side_figure import draw

            draw(comparisons, given.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
