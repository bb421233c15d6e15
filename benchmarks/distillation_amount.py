"""How much distillation a measured budget needs, and what mixtures of the reference add, on digits.

A network knows upright digits and learns digits on their side: all of its weights, or LoRA adapters. The first table
is over schedules, the second over mixtures. Each run is a line of a JSON file, so that an interrupted benchmark
continues.

    python benchmarks/distillation_amount.py --out docs/figures/distillation-amount.jsonl
    python benchmarks/distillation_amount.py --out docs/figures/distillation-amount.jsonl --table
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from real_networks.digits import digits_problem
from real_networks.methods import moored
from real_networks.problem import Problem
from run_log import Choice, Row, Schedule, append_row, read_rows, rows_to_continue
from torch import nn

from mooring import Budget
from mooring.hold import distil
from mooring.reference.batches import rows_of, samples_of

SCHEDULES: dict[str, tuple[float, int] | None] = {
    "a batch in every step": (1, 1),
    "half a batch in every second step": (1 / 2, 2),
    "a quarter of a batch in every step": (1 / 4, 1),
    "a fifth of a batch in every step": (1 / 5, 1),
    "a fifth of a batch in every second step": (1 / 5, 2),
    "a tenth of a batch in every step": (1 / 10, 1),
    "a batch in every tenth step": (1, 10),
    "none": None,
}
"""The part of a batch that a step distils, and the number of steps from one that distils to the next."""

MIXTURES = ("unmixed", "mixed")
"""Distillation on the reference alone, or also on mixtures of it; both with the default schedule."""

AMOUNT: dict[str, Sequence[float]] = {"digits": (0.03, 0.1), "LoRA": (0.01, 0.03, 0.1)}
MIXED: dict[str, Sequence[float]] = {"60 digits": (0.03, 0.1, 0.3), "LoRA": (0.03,)}
"""The budgets of each problem in the two tables."""


@functools.cache
def whole_problem(epochs: int | None) -> Problem:
    """Return the problem of `real.py --task digits`, which trains the network of each seed once."""
    return digits_problem(epochs, torch.device("cpu"))


class Digits:
    """All weights of the network of `real.py --task digits`, with a reference of about 300 digits or fewer."""

    def __init__(self, epochs: int | None, steps: int | None, references: int | None = None) -> None:
        problem = whole_problem(epochs)
        x, y = problem.reference
        self.problem = replace(problem, reference=(x[:references], y[:references]), steps=steps)

    def run(self, budget: Budget, seed: int) -> Row:
        """Train once; return accuracies in percent and the divergence on old test digits."""
        results = moored(self.problem, seed, {"pull": budget}).results()
        names = {"before": "before", "kept": "old", "new": "new", "nats": "held_out"}
        return {names[name]: value for name, value in results.items() if name in names}


class Adapters:
    """LoRA adapters of the network of `adapters.py`, with a reference of 640 digits."""

    def __init__(self, epochs: int | None) -> None:
        self.epochs = epochs or 18

    def run(self, budget: Budget, seed: int) -> Row:
        """Train once; return accuracies in percent."""
        from adapters import base_of, finetune
        from rotated_digits import accuracy, digits

        upright, _, labels = digits()
        old, new = finetune({"pull": budget}, seed, self.epochs)
        return {"before": accuracy(base_of(seed), upright, labels), "old": old, "new": new}


@contextmanager
def distilling(method: str) -> Iterator[None]:
    """Distil on the schedule of this name, or mix a reference however many inputs it has, inside the block."""
    with ExitStack() as stack:
        if schedule := SCHEDULES.get(method):
            part, every = schedule

            def split(model: nn.Module, batches: Sequence[Any], **options: Any) -> tuple[list[Any], int]:
                return parts_of(batches, part), every

            stack.enter_context(patch.object(distil, "distillation_schedule", split))
        yield


def parts_of(batches: Sequence[Any], part: float) -> list[Any]:
    """Return the batches, split into parts of this size.

    Example:
        >>> [len(batch) for batch in parts_of([torch.zeros(20, 3)], 1 / 4)]
        [5, 5, 5, 5]
    """
    parts = []
    for batch in batches:
        count = samples_of(batch)
        size = math.ceil(part * count)
        parts += [rows_of(batch, slice(start, start + size)) for start in range(0, count, size)]
    return parts


def budget_of(method: str, nats: float) -> Budget:
    """Return the budget of a row of a table; the task ends at its last parameters."""
    distil: Any = {"none": False, "unmixed": "unmixed"}.get(method)
    return Budget(nats, distil=distil, average=False)


def choices(options: argparse.Namespace) -> list[Choice]:
    """Return all runs: a problem with a schedule or a kind of mixtures, its budget, and a seed."""
    return [
        (f"{problem}: {method}", nats, seed)
        for methods, budgets in ((SCHEDULES, AMOUNT), (MIXTURES, MIXED))
        for problem in budgets
        if problem in options.problems.split(",")
        for seed in range(options.seeds)
        for method in methods
        for nats in budgets[problem]
    ]


def make_problem(name: str, options: argparse.Namespace) -> Digits | Adapters:
    """Return a problem by its name."""
    if name == "LoRA":
        return Adapters(options.epochs)
    return Digits(options.epochs, options.steps, 60 if name == "60 digits" else None)


def settings_of(options: argparse.Namespace) -> Row:
    """Return the settings that results depend on, where they are not the default."""
    return {name: value for name in ("epochs", "steps") if (value := getattr(options, name)) is not None}


def run_all(options: argparse.Namespace, wanted: list[Choice]) -> None:
    """Run what is missing within the time, and write a row for each run."""
    schedule, problems = Schedule(wanted, options.minutes), dict[str, Digits | Adapters]()
    for number, (name, nats, seed) in schedule:
        start = time.monotonic()
        problem, _, method = name.partition(": ")
        if problem not in problems:
            problems[problem] = make_problem(problem, options)
        with distilling(method):
            row = problems[problem].run(budget_of(method, nats), seed)
        row |= {"problem": problem, "method": method, "nats": nats, "seed": seed}
        append_row(options.out, row | ({"settings": settings} if (settings := settings_of(options)) else {}))
        schedule.record(number, f"old {row['old']:.1f}, new {row['new']:.1f}", time.monotonic() - start)


def values_of(rows: list[Row], problem: str, method: str, nats: float, name: str) -> list[float]:
    """Return one number of all runs of a cell, in the order of their seeds; empty if there are none."""
    cell = [row for row in rows if (row["problem"], row["method"], row["nats"]) == (problem, method, nats)]
    return [row[name] for row in sorted(cell, key=lambda row: row["seed"])]


def means(rows: list[Row], problem: str, method: str, nats: float) -> dict[str, str]:
    """Return the means over seeds of a cell as the tables have them; empty texts if there are no runs."""
    digits = {"held_out": 3, "old": 1, "new": 1} if problem != "LoRA" else {"old": 1, "new": 1}
    values = {name: values_of(rows, problem, method, nats, name) for name in digits}
    return {name: f"{statistics.fmean(own):.{digits[name]}f}" if own else "" for name, own in values.items()}


def amount_table(rows: list[Row]) -> str:
    """Return the table over schedules in Markdown: accuracy on old / on new digits."""
    columns = [(problem, nats) for problem, budgets in AMOUNT.items() for nats in budgets]
    lines = [["", "cost", *(f"{problem}, {nats:g} nats" for problem, nats in columns)], ["---"] * (2 + len(columns))]
    for method, schedule in SCHEDULES.items():
        cost = f"{100 * schedule[0] / schedule[1]:.0f} %" if schedule else "0"
        cells = [means(rows, problem, method, nats) for problem, nats in columns]
        lines.append([method, cost, *(f"{cell['old']} / {cell['new']}".strip(" /") for cell in cells)])
    return markdown(lines)


def mixture_table(rows: list[Row]) -> str:
    """Return the table over mixtures in Markdown, for the reference of 60 digits."""
    names = [name for mixture in MIXTURES for name in (f"{mixture}: held out", "old %", "new %")]
    lines = [["budget", *names], ["---"] * (1 + len(names))]
    for nats in MIXED["60 digits"]:
        lines.append(
            [f"{nats:g}", *(cell for mixture in MIXTURES for cell in means(rows, "60 digits", mixture, nats).values())]
        )
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """Return the lines of a table.

    Example:
        >>> print(markdown([["", "a", ""], ["---", "---", "---"]]))
        | | a | |
        | --- | --- | --- |
    """
    return "\n".join(" ".join(["|", *(f"{cell} |" if cell else "|" for cell in cells)]) for cells in lines)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="digits,60 digits,LoRA", help="names with commas (default: all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="default: 5, and 18 for LoRA")
    parser.add_argument("--steps", type=int, help="the most steps in which all weights train, to try everything out")
    parser.add_argument("--out", type=Path, default=Path("distillation-amount.jsonl"), help="the file of results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would end later than this")
    parser.add_argument("--table", action="store_true", help="only print the tables of what is there")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, and print the tables."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not options.table:
        rows = rows_to_continue(options.out, settings_of(options), parser)
        known = {(f"{row['problem']}: {row['method']}", row["nats"], row["seed"]) for row in rows}
        run_all(options, [choice for choice in choices(options) if choice not in known])
    rows = read_rows(options.out)
    print(f"{amount_table(rows)}\n\n{mixture_table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
