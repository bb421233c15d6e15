"""What fine-tuning learns against what it keeps: Mooring beside other methods, on networks that were trained before.

Each method runs over its dial, and each run is a line of a JSON file, so that an interrupted benchmark continues.
"Kept" is the accuracy on held-out old data, "nats" the divergence from the original model there, "gauge" the one that
Mooring measures, and "new" the accuracy on the new task. For the GPT both are of the next character.

    python benchmarks/real.py --task digits --out digits.jsonl
    python benchmarks/real.py --task cifar100 --data DIR --weights weights.pt --device cuda --out cifar100.jsonl
    python benchmarks/real.py --task cifar100 --out cifar100.jsonl --table --figure cifar100 --methods plain,budget
    python benchmarks/real.py --task cifar100 --data DIR --pack cifar100.pt      # then: --data cifar100.pt
    python benchmarks/real.py --task folder --folder PHOTOS --data DIR --out photos.jsonl
    python benchmarks/real.py --task gpt-lora --size large --device cuda --out gpt-lora.jsonl

`--data` has Parquet files in the layout of the Hub: imagenet-sample/data, cifar100/data and flowers102/data; or it is a
file that `--pack` wrote, for a machine without the data sets. `--folder` has a folder of images for each class. Several
processes can share the work: `--part 0/3`, `--part 1/3` and `--part 2/3`, with the same --out.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from precision import PRECISIONS, set_precision
from real_networks.methods import METHODS, NOT_FOR_ADAPTERS
from real_networks.problem import Problem
from real_networks.results import draw, print_table
from run_log import Choice, Row, choice_of, part_of, read_rows, rows_to_continue, run_choices

from mooring.errors import NonFiniteError

TASKS = ["digits", "cifar100", "flowers102", "folder", "gpt", "gpt-lora"]
IMAGES = ("cifar100", "flowers102", "folder")


def make_problem(options: argparse.Namespace) -> Problem:
    """Load the network and the data of a task, once for all runs."""
    device = torch.device(options.device)
    set_precision(options.precision)
    torch.backends.cudnn.benchmark = options.search_kernels  # anew for each batch size, of which there are several
    if options.task == "digits":
        from real_networks.digits import digits_problem

        problem = digits_problem(options.epochs, device)
    elif options.task in IMAGES:
        from real_networks.images import image_problem

        start = time.monotonic()
        images = read_images(options)
        print(f"read images in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        problem = image_problem(images, options.weights, options.epochs, device, channels_last=options.channels_last)
    else:
        from real_networks.text import text_problem

        problem = text_problem(options.size, options.cache, adapters=options.task == "gpt-lora", device=device)
    problem.precision, problem.steps = options.precision, options.steps
    problem.batch = options.batch or problem.batch
    return problem


def read_images(options: argparse.Namespace) -> dict[str, Any]:
    """Return the encoded images of a task."""
    from real_networks.stored_images import read_folder, read_pack, read_parquet

    if options.data.is_file():
        images = read_pack(options.data)
    else:
        images = {"known": read_parquet(options.data / "imagenet-sample", "test", options.old_images)}
        if options.task != "folder":
            for split, count in (("train", options.images), ("test", options.test_images)):
                images[split] = read_parquet(options.data / options.task, split, count)
    if options.task == "folder":
        images["train"], images["test"] = read_folder(options.folder, options.images, options.test_images)
    return images


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that results depend on; a file has results of one setting."""
    names = ["task", "precision", "epochs", "batch", "steps"]
    names += ["old_images", "images", "test_images"] if options.task in IMAGES else []
    names += ["channels_last"] if options.channels_last else []
    names += ["size"] if options.task.startswith("gpt") else []
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def choices(options: argparse.Namespace, methods: list[str], dials: list[float] | None) -> Iterator[Choice]:
    """Yield the runs of this part, the same seed of all methods first."""
    every = [
        (method, dial, seed)
        for seed in range(options.seeds)
        for method in methods
        for dial in dials or METHODS[method][1]
    ]
    index, count = options.part
    yield from every[index::count]


def measure(problem: Problem, choice: Choice, device: str) -> Row:
    """Train one run, and return its row, which says so if the run diverged."""
    method, dial, seed = choice
    row: Row = {"method": method, "dial": dial, "seed": seed}
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    try:
        run = METHODS[method][0](problem, seed, dial)
    except NonFiniteError:
        return {**row, "diverged": True}
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start + run.shared_seconds
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan
    row |= {**run.results(), "seconds": seconds, "gib": memory}
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in row.items()}


def run_all(options: argparse.Namespace, wanted: list[Choice]) -> None:
    """Run what is missing within the time, and write a row for each run."""
    run_choices(
        wanted,
        options.minutes,
        options.out,
        settings_of(options),
        load=lambda: make_problem(options),
        measure=lambda problem, choice: measure(problem, choice, options.device),
        result_of=result_of,
    )


def result_of(row: Row) -> str:
    """Return what a run gave."""
    if row.get("diverged"):
        return "diverged"
    gauge = f", gauge {row['gauge']:.3g}" if row.get("gauge") is not None else ""
    return f"kept {row['kept']:.1f}, new {row['new']:.1f}{gauge}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--data", type=Path, help="the folder of the data sets, or a file that --pack wrote")
    parser.add_argument("--folder", type=Path, help="images of a new task, for --task folder")
    parser.add_argument("--pack", type=Path, help="write the images of the task to this file, and do nothing else")
    parser.add_argument("--weights", type=Path, help="a state_dict of EfficientNet-Lite0; default: that of its package")
    parser.add_argument("--old-images", type=int, default=1000, help="images of what is known (default: 1000)")
    parser.add_argument("--images", type=int, default=4000, help="images of the new task (default: 4000)")
    parser.add_argument("--test-images", type=int, default=10_000, help="test images of the new task (default: 10000)")
    parser.add_argument("--size", choices=["tiny", "small", "large"], default="small", help="of the GPT")
    parser.add_argument("--cache", type=Path, default=Path("gpt-cache"), help="folder of the GPT that knows code")
    parser.add_argument("--methods", help="names with commas between them (default: all)")
    parser.add_argument("--dials", help="values with commas between them, for all methods (default: each its own)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: 5 for digits, 14 for images; 1 for the GPT")
    parser.add_argument("--batch", type=int, help="batch size of training (default: 20 for digits, 64 for images)")
    parser.add_argument("--steps", type=int, help="train for at most so many steps, to try everything out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="of training (default: float32)")
    parser.add_argument("--channels-last", action="store_true", help="keep images and convolutions in that format")
    parser.add_argument("--search-kernels", action="store_true", help="let cuDNN try all its kernels first")
    parser.add_argument("--out", type=Path, default=Path("real.jsonl"), help="the file of results")
    parser.add_argument("--part", type=part_of, default=(0, 1), help="this process's part of the runs, such as 0/3")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would end later than this")
    parser.add_argument("--profile", action="store_true", help="only print where the time of plain steps goes")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    parser.add_argument("--figure", type=Path, help="draw the figure to this path, as .svg and .png")
    parser.add_argument("--zoom", action="store_true", help="enlarge the part of the figure around Mooring's points")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    unfit = NOT_FOR_ADAPTERS if options.task == "gpt-lora" else set[str]()
    allowed = [name for name in METHODS if name not in unfit]
    methods = options.methods.split(",") if options.methods else allowed
    if unknown := [name for name in methods if name not in allowed]:
        parser.error(f"unknown method {unknown[0]!r} for {options.task}; allowed: {', '.join(allowed)}")
    if options.task in IMAGES and not options.table and (options.data is None or not options.data.exists()):
        parser.error("give --data, the folder of the data sets or a file that --pack wrote")
    if options.task == "folder" and not options.table and not (options.folder and options.folder.is_dir()):
        parser.error("give --folder, which has a folder of images for each class")
    if options.pack:
        if options.task not in IMAGES:
            parser.error(f"{options.task} has no images to pack")
        from real_networks.stored_images import write_pack

        write_pack(options.pack, read_images(options))
        return 0
    if options.profile:
        from real_networks.step_profile import profile_steps

        print(profile_steps(make_problem(options)))
        return 0
    dials = [float(value) for value in options.dials.split(",")] if options.dials else None
    if not options.table:
        known = {choice_of(row) for row in rows_to_continue(options.out, settings_of(options), parser)}
        run_all(options, [choice for choice in choices(options, methods, dials) if choice not in known])
    rows = read_rows(options.out)
    if options.table and options.methods:
        rows = [row for row in rows if row["method"] in methods]
    print_table(rows)
    if options.figure:
        draw(rows, options.figure, zoom=options.zoom)
    return 0


if __name__ == "__main__":
    sys.exit(main())
