"""Measure what a user pays for a mooring when fine-tuning: time of a step, set-up and peak memory.

The models have random weights and real shapes. Each row reports the time of a moored step over a plain one of the same
run, in which blocks of both alternate; the time of `attach(reference=...)` in plain steps; and the peak memory of
attach and of moored training over that of plain training. The reference is in pinned memory, as a loader has it. The
first attach of a row compiles kernels; a second one, which is in the table, finds them compiled. The budget is set so
low that it is spent in each step, and the row says in what share of steps it was: an unspent budget pulls nothing and
is cheaper. Two models of seven billion parameters do not fit: there plain and moored steps come one after the other.

    python benchmarks/finetuning_cost.py --device cuda                              # all models but the largest
    python benchmarks/finetuning_cost.py --device cuda --only gpt2 --rows diagonal,kronecker --precision tf32
    python benchmarks/finetuning_cost.py --device cuda --only llama-7b --rows lean --only llama-7b-lora
    python benchmarks/finetuning_cost.py --tiny --json results.json                 # in miniature, on a CPU
    python benchmarks/finetuning_cost.py --table results.json                       # as tables of the documentation
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from finetuning.models import ADAPTED, NAMES, Workload, workload
from torch.utils._python_dispatch import TorchDispatchMode

import mooring
from mooring import Budget, Interpolation, Memory, Penalty
from mooring.errors import MooringError
from mooring.rules import Kronecker

FISHER = {"importance": mooring.EWC(decay=None, per_sample=True)}
LEAN = Memory(previous="8bit", current="none")
MEASURED = Budget(1e-6, distil=False)
ROWS: dict[str, dict[str, Any]] = {
    "diagonal": FISHER,
    "lean": {**FISHER, "memory": LEAN},
    "kronecker": {"importance": Kronecker()},
    "kronecker 256 places": {"importance": Kronecker(places=256)},
    "kronecker blocks": {"importance": Kronecker(blocks=512)},
    "kronecker observed": {"importance": Kronecker(), "memory": Memory()},
    "kronecker blocks every 4": {"importance": Kronecker(blocks=512), "every": 4},
    "explicit unchecked": {"importance": mooring.EWC(), "pull": Interpolation(), "check_finite": False},
    "explicit": {"importance": mooring.EWC(), "pull": Interpolation()},
    "penalty": {"importance": mooring.EWC(), "pull": Penalty(1e-4)},
    "measured": {"pull": MEASURED},
    "lean measured": {**FISHER, "memory": LEAN, "pull": MEASURED},
    "kronecker measured": {"importance": Kronecker(), "pull": MEASURED},
    "default": {"pull": Budget(0.1)},
    "default beyond its reserve": {"pull": Budget(1e-6)},
    "kronecker default": {"importance": Kronecker(), "pull": Budget(0.1)},
    "kronecker blocks default": {"importance": Kronecker(blocks=512), "pull": Budget(0.1)},
    "product": {},
}
"""Options of `attach` by row; the pull is a budget that is not measured unless it is named.

The default holds its budget by distillation, and its pull is in reserve: it acts where three times the budget are
measured, as they are with a millionth of a nat.
"""

DEFAULT_ROWS = (
    "default",
    "measured",
    "diagonal",
    "lean",
    "lean measured",
    "kronecker",
    "kronecker measured",
    "kronecker blocks",
    "kronecker observed",
    "explicit",
)
ADAPTED_ROWS = ("product", "measured", "default")
"""The rows of a model, and of one with LoRA, which is moored through its product."""

SPENT_SHARE = 0.1
"""The budget of a timed step, as a part of what a step without a pull would spend."""


class Trainer:
    """A model in training.

    Args:
        work: the model and its batches.
        device: where it trains.
    """

    def __init__(self, work: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.work, self.device = work, device
        self.model = work.make(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
        generator = torch.Generator().manual_seed(1)
        self.batches = [self.to_device(work.batch(generator)) for _ in range(2)]
        self.steps = 0

    def to_device(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch on the device."""
        inputs, labels = (part.to(self.device) for part in batch)
        return inputs, labels

    def reference(self, batches: int, *, labels: bool) -> list[Any]:
        """Return batches of the host, pinned for a GPU, with labels or without."""
        generator = torch.Generator().manual_seed(2)
        drawn = [self.work.batch(generator) for _ in range(batches)]
        if self.device.type == "cuda":
            drawn = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in drawn]
        return drawn if labels else [inputs for inputs, _ in drawn]

    def step(self) -> None:
        """Take one training step."""
        self.optimizer.zero_grad()
        self.work.loss(self.model, self.batches[self.steps % len(self.batches)]).backward()
        self.optimizer.step()
        self.steps += 1

    def attach(self, options: dict[str, Any], reference: list[Any], *, labels: bool) -> "mooring.Mooring":
        """Moor the model to a reference; with labels, by the loss of training."""
        loss = {"loss": lambda model, batch: self.work.loss(model, self.to_device(batch))} if labels else {}
        return mooring.attach(
            self.model, self.optimizer, reference=reference, batches=len(reference), progress=False, **loss, **options
        )


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], times: int, device: torch.device) -> float:
    """Return the mean time of a call; the host may run ahead of the device, as in training."""
    wait(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    wait(device)
    return (time.perf_counter() - start) / times


def peak(work: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak of allocated memory during a call, with what was allocated before; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device)


class OperationCount(TorchDispatchMode):
    """Counts the operations that reach a device, without views and checks of shapes; each is about one kernel."""

    VIEWS = ("view", "reshape", "expand", "transpose", "permute", "slice", "select", "detach", "alias", "unsqueeze")
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.removeprefix("aten::").lstrip("_").startswith(self.VIEWS):
            self.count += 1
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], Any]) -> int:
    """Return the number of torch's operations in a call; generated kernels are not among them."""
    with OperationCount() as counter:
        work()
    return counter.count


def measure_plain(work: Workload, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of a plain step and the peak memory of plain training, with nothing else on the device."""
    trainer = Trainer(work, device)
    highest = peak(lambda: seconds(trainer.step, 3, device), device)
    times = [seconds(trainer.step, options.block, device) for _ in range(options.turns)]
    parameters = list(trainer.model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "plain_ms": 1e3 * statistics.median(times),
        "plain_peak": highest,
        "plain_operations": operations(trainer.step),
    }


def measure_row(
    name: str, work: Workload, device: torch.device, plain: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the costs of one row."""
    nats = torch.tensor(options.nats, dtype=torch.float64, device=device)
    rules = dict(ROWS[name])
    spends = "pull" not in rules
    rules.setdefault("pull", Budget(nats, every=rules.pop("every", 1), measured=False))
    trainer = Trainer(work, device)
    reference = trainer.reference(options.reference, labels=options.labels)
    moors: list[mooring.Mooring] = []

    def attach() -> None:
        moors.append(trainer.attach(rules, reference, labels=options.labels))

    first_seconds = seconds(attach, 1, device)
    moors.pop().detach()
    attach_seconds = 0.0

    def attach_again() -> None:
        nonlocal attach_seconds
        attach_seconds = seconds(attach, 1, device)

    attach_peak = peak(attach_again, device)
    (moor,) = moors
    nats.fill_(torch.inf)
    trainer.step()
    if spends:
        nats.fill_(SPENT_SHARE * moor.pull_energy())
    moored_peak = peak(lambda: seconds(trainer.step, 3, device), device)
    shares = [spent_share(trainer, moor, float(nats)) for _ in range(3)] if spends else []
    ratios, times = alternate(work, trainer, device, plain, options)
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "row": name,
        "step_ratio": middle,
        "quartiles": [low, high],
        "step_ms": 1e3 * statistics.median(times),
        "operations": operations(trainer.step) - plain["plain_operations"],
        "first_attach_seconds": first_seconds,
        "attach_seconds": attach_seconds,
        "attach_steps": 1e3 * attach_seconds / plain["plain_ms"],
        "attach_peak_ratio": attach_peak and attach_peak / plain["plain_peak"],
        "moored_peak_ratio": moored_peak and moored_peak / plain["plain_peak"],
        "state_bytes": state_bytes(moor, gauge=False),
        "reference_bytes": state_bytes(moor, gauge=True) - state_bytes(moor, gauge=False),
        "state_bytes_per_parameter": state_bytes(moor, gauge=False) / plain["parameters"],
        "spent_of_budget": shares,
    }


def spent_share(trainer: Trainer, moor: "mooring.Mooring", nats: float) -> float:
    """Return what is spent of the budget after a step: 1 but for a hundredth where the pull acts."""
    trainer.step()
    return moor.pull_energy() / nats if nats else 0.0


def alternate(
    work: Workload, moored: Trainer, device: torch.device, known: dict[str, Any], options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Return ratios of moored to plain steps, and the times of moored steps, over turns in which both are measured.

    If only one model fits, the plain steps are those that are known.
    """
    if work.alone:
        times = [seconds(moored.step, options.block, device) for _ in range(options.turns)]
        return [1e3 * spent / known["plain_ms"] for spent in times], times
    plain = Trainer(work, device)
    seconds(plain.step, 2, device)
    ratios, times = [], []
    for turn in range(options.turns):
        order = (plain, moored) if turn % 2 else (moored, plain)
        spent = {trainer: seconds(trainer.step, options.block, device) for trainer in order}
        ratios.append(spent[moored] / spent[plain])
        times.append(spent[moored])
    return ratios, times


def state_bytes(moor: "mooring.Mooring", *, gauge: bool) -> int:
    """Return the bytes of what a mooring saves, which has no eigenbases, with the data of a measured budget or not."""
    return sum(t.numel() * t.element_size() for t in moor.state_dict(gauge=gauge).values())


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "refused" in row:
        return f"{row['row']:26}{row['refused']}"
    peaks = [
        "-".rjust(14) if row[key] is None else f"{row[key]:14.2f}" for key in ("attach_peak_ratio", "moored_peak_ratio")
    ]
    spent = f"{min(row['spent_of_budget']):8.3f}" if row["spent_of_budget"] else "-".rjust(8)
    low, high = row["quartiles"]
    return (
        f"{row['row']:26}{row['step_ratio']:8.3f}{f'{low:.3f}-{high:.3f}':>14}{row['attach_steps']:14.1f}"
        f"{''.join(peaks)}{row['state_bytes_per_parameter']:12.2f}{spent}{row['operations']:12}"
    )


HEADS = {"step": 8, "quartiles": 14, "attach steps": 14, "attach peak": 14, "step peak": 14, "bytes": 12, "spent": 8}
HEADS |= {"operations": 12}
HEAD = f"{'row':26}" + "".join(head.rjust(width) for head, width in HEADS.items())


def run_model(
    name: str, device: torch.device, options: argparse.Namespace, save: Callable[[dict[str, Any]], None]
) -> None:
    """Measure all rows of a model, and print and save them as they come, while there is time."""
    work = workload(name, tiny=options.tiny)
    plain = measure_plain(work, device, options)
    print(f"\n{name}: {plain['parameters'] / 1e6:.1f} M parameters, plain step {plain['plain_ms']:.1f} ms\n{HEAD}")
    rows: list[dict[str, Any]] = []
    for row in options.rows or (ADAPTED_ROWS if name.endswith(ADAPTED) else DEFAULT_ROWS):
        if time.monotonic() > options.deadline:
            print(f"no time for {row!r}: give more --minutes")
            continue
        gc.collect()
        try:
            rows.append(measure_row(row, work, device, plain, options))
        except (MooringError, torch.OutOfMemoryError) as error:
            rows.append({"row": row, "refused": str(error).splitlines()[0]})
        print(line(rows[-1]), flush=True)
        save({"model": name, **plain, "rows": rows})


def cell(value: float | None, form: str) -> str:
    """Return a number in a form, and a dash for none."""
    return "-" if value is None else format(value, form)


def tables(results: dict[str, Any]) -> str:
    """Return the tables of the documentation, of time and of memory, from saved results."""
    times = ["| model | row | step | quartiles | attach, plain steps | with compilation | operations |"]
    memory = ["| model | row | peak of attach | peak of training | bytes per weight | bytes of the reference |"]
    parts = [times, memory]
    for part in parts:
        part.append("| --- | --- |" + " ---: |" * (part[0].count("|") - 3))
    for model in results["models"]:
        for row in model["rows"]:
            start = f"| {model['model']} | {row['row']} |"
            if "refused" in row:
                for part in parts:
                    part.append(f"{start} {row['refused']} |")
                continue
            low, high = row["quartiles"]
            first = 1e3 * row["first_attach_seconds"] / model["plain_ms"]
            times.append(
                f"{start} {row['step_ratio']:.3f} | {low:.3f} to {high:.3f} | {row['attach_steps']:.0f} | "
                f"{first:.0f} | {row['operations']} |"
            )
            memory.append(
                f"{start} {cell(row['attach_peak_ratio'], '.2f')} | {cell(row['moored_peak_ratio'], '.2f')} | "
                f"{row['state_bytes_per_parameter']:.2f} | {row['reference_bytes']} |"
            )
    plain = [
        f"- {model['model']}: {model['parameters'] / 1e6:.1f} M weights, {model['trained_parameters'] / 1e6:.1f} M "
        f"trained; plain step {model['plain_ms']:.1f} ms, peak {cell(model['plain_peak'], '.3g')} bytes"
        for model in results["models"]
    ]
    head = f"{results['device']}, torch {results['torch']}, float32 products in {results['precision']}."
    return "\n".join([head, "", *plain, "", *times, "", *memory])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NAMES, action="append", help="a model (default: all but those of 7 B)")
    parser.add_argument("--rows", help=f"comma-separated: {', '.join(ROWS)} (default: {','.join(DEFAULT_ROWS)})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="miniatures that run in seconds on a CPU")
    parser.add_argument("--reference", type=int, default=0, help="batches of the reference (default: 32, or 2 if tiny)")
    parser.add_argument("--labels", action="store_true", help="a reference with labels; without, they are drawn")
    parser.add_argument("--nats", type=float, default=0.1, help="the budget of a reference")
    parser.add_argument("--turns", type=int, default=0, help="turns of plain and moored blocks (default: 7, or 2)")
    parser.add_argument("--block", type=int, default=0, help="steps in a block (default: 10, or 2 if tiny)")
    parser.add_argument("--precision", choices=["float32", "tf32"], default="float32", help="of float32 products")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after so many")
    parser.add_argument("--json", type=Path, help="write the results to this file, after each row")
    parser.add_argument("--table", type=Path, help="print saved results as tables of the documentation, and stop")
    options = parser.parse_args(arguments)
    options.deadline = time.monotonic() + 60 * options.minutes
    options.rows = options.rows.split(",") if options.rows else None
    if unknown := [row for row in options.rows or () if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}: choose from {', '.join(ROWS)}")
    options.turns = options.turns or (2 if options.tiny else 7)
    options.block = options.block or (2 if options.tiny else 10)
    options.reference = options.reference or (2 if options.tiny else 32)
    options.only = options.only or [name for name in NAMES if not name.startswith("llama-7b")]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.table:
        print(tables(json.loads(options.table.read_text())))
        return
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, products in {options.precision}")
    head, models = {"device": name, "torch": torch.__version__, "precision": options.precision}, dict[str, Any]()

    def save(model: dict[str, Any]) -> None:
        models[model["model"]] = model
        if options.json:
            options.json.write_text(json.dumps({**head, "models": list(models.values())}, indent=1) + "\n")

    for model in options.only:
        if time.monotonic() <= options.deadline:
            run_model(model, device, options, save)


if __name__ == "__main__":
    main()
