"""Three tasks in a row: what is kept of the first two, and what is learned of the third, mean over seeds.

A network knows upright digits, learns them on their side, and then upside down. The options are the default ones.

    python benchmarks/several_tasks.py --out several-tasks.jsonl
    python benchmarks/several_tasks.py --table --out several-tasks.jsonl
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rotated_digits import accuracy, digits, pretrained, train
from run_log import Row, append_row, rows_to_continue

import mooring

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
}

ENDS = ("plain", "consolidate()", "consolidate(data=...)")
"""How the second task ends; plain training has no Mooring."""


def run(optimizer_name: str, end: str, seed: int, epochs: int) -> Row:
    """Train the second and the third task, and return the accuracy on all three in percent."""
    upright, sideways, y = digits()
    tasks = [upright, sideways, upright.flip(1)]  # flattened images, so the last one is turned by half a turn
    model = pretrained(seed, epochs)
    kind, options = OPTIMIZERS[optimizer_name]
    optimizer = kind(model.parameters(), **options)
    moor = None
    if end != "plain":
        memory = None if "data" in end else mooring.Memory()  # which estimates the second task while it is trained
        moor = mooring.attach(model, optimizer, reference=upright[:640].split(20), memory=memory, progress=False)
    train(model, optimizer, sideways, y, epochs)
    if moor is not None:
        moor.consolidate(data=sideways[:640].split(20) if "data" in end else None)
    second = accuracy(model, sideways, y)
    train(model, optimizer, tasks[2], y, epochs)
    if moor is not None:
        moor.finish()
    kept = [accuracy(model, x, y) for x in tasks]
    return {"optimizer": optimizer_name, "end": end, "seed": seed, "second": second, "accuracies": kept}


def table(rows: list[Row]) -> str:
    """Return the means over seeds, as a table in Markdown."""
    lines = ["| optimizer | end of the second task | first task | second task | third task |", f"|{' --- |' * 5}"]
    for name, end in dict.fromkeys((row["optimizer"], row["end"]) for row in rows):
        own = [row for row in rows if (row["optimizer"], row["end"]) == (name, end)]
        means = [statistics.fmean(values) for values in zip(*(row["accuracies"] for row in own), strict=True)]
        before = statistics.fmean(row["second"] for row in own)
        text = f"`{end}`" if "(" in end else end
        lines.append(f"| {name} | {text} | {means[0]:.1f} | {means[1]:.1f} of {before:.1f} | {means[2]:.1f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10, help="of each task (default: 10)")
    parser.add_argument("--out", type=Path, default=Path("several-tasks.jsonl"), help="the file of results")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    options = parser.parse_args(arguments)
    settings = {"epochs": options.epochs}
    rows = rows_to_continue(options.out, settings, parser)
    known = {(row["optimizer"], row["end"], row["seed"]) for row in rows}
    wanted = [(name, end, seed) for name in OPTIMIZERS for end in ENDS for seed in range(options.seeds)]
    for name, end, seed in () if options.table else (choice for choice in wanted if choice not in known):
        row = {**run(name, end, seed, options.epochs), "settings": settings}
        append_row(options.out, row)
        rows.append(row)
        print(f"{name}, {end}, seed {seed}: {', '.join(f'{a:.1f}' for a in row['accuracies'])}", file=sys.stderr)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
