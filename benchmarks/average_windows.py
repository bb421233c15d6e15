"""Averages of the last steps under a measured budget, over several windows, beside the last parameters.

All averages are of the same run, before `finish()`. Options that are not listed are those of `real.py`.

    python benchmarks/average_windows.py --nats 0.1 --first-seed 3 --task cifar100 --data DIR --device cuda \
        --precision tf32 --channels-last --out average-windows.jsonl
    python benchmarks/average_windows.py --table --out average-windows.jsonl
"""

import argparse
import statistics
import sys

import torch
from real import make_parser, make_problem, settings_of
from real_networks.methods import attach
from real_networks.problem import Problem
from real_networks.run import Run
from run_log import Row, append_row, read_rows, rows_to_continue
from torch import Tensor

import mooring
from mooring.hold.finish import decay_of
from mooring.reference.pass_cost import MEASURING_INTERVAL

STEPS = [50, 100, 200]
"""The number of steps that an average is over, about."""


def measure(problem: Problem, seed: int, nats: float) -> list[Row]:
    """Train once, and return the results at the last parameters and at each average."""
    run = Run(problem, seed)
    attach(run, {"pull": mooring.Budget(nats, average=False)})
    averages: dict[int, list[Tensor]] = {}
    steps = 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        updates, remainder = divmod(steps, MEASURING_INTERVAL)
        if remainder:
            return
        for window in STEPS:
            known = averages.setdefault(window, [p.detach().clone() for p in run.trained])
            decay = decay_of(updates - 1, (1 - 1 / window) ** MEASURING_INTERVAL)
            torch._foreach_lerp_(known, [p.detach() for p in run.trained], 1 - decay)

    run.after_step = after_step
    run.train()
    rows = []
    for window, values in {0: [p.detach().clone() for p in run.trained], **averages}.items():
        torch._foreach_copy_([p.data for p in run.trained], values)
        measured = run.moor.measured().nats
        rows.append({"window": window, "nats": nats, "seed": seed, "measured": measured, "results": run.results()})
    run.moor.detach()
    return rows


def print_table(rows: list[Row]) -> None:
    """Print means over seeds."""
    print("average over    seeds  measured   kept %  learned %   nats")
    for window in dict.fromkeys(row["window"] for row in rows):
        own = [row for row in rows if row["window"] == window]
        means = [statistics.fmean(row["results"][name] for row in own) for name in ("kept", "new", "nats")]
        name = f"{window} steps" if window else "(the last)"
        measured = statistics.fmean(row["measured"] for row in own)
        print(f"{name:14}  {len(own):5}  {measured:8.3f}  {means[0]:7.1f}  {means[1]:9.1f}  {means[2]:5.3f}")


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", type=float, default=0.1, help="the budget (default: 0.1)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of --seeds seeds (default: 0)")
    own, others = parser.parse_known_args(arguments)
    options = make_parser().parse_args(others)
    if not options.table:
        settings, problem = settings_of(options), None
        known = {(row["nats"], row["seed"]) for row in rows_to_continue(options.out, settings, parser)}
        for seed in range(own.first_seed, own.first_seed + options.seeds):
            if (own.nats, seed) not in known:
                problem = problem or make_problem(options)
                for row in measure(problem, seed, own.nats):
                    append_row(options.out, {**row, "settings": settings})
    print_table(read_rows(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
