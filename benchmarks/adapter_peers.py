"""Compare moored LoRA with what else keeps old knowledge: what is learned against what is kept, each over its dial.

Digits: a network learns upright ones, then adapters learn those on their side; both are accuracies in percent. GPT: the
model of examples/finetune_language_model.py, from code to prose; both are negative losses in nats per character.

    python benchmarks/adapter_peers.py --json docs/figures/adapter-peers.json --figure docs/figures/adapter-peers.png
    python benchmarks/adapter_peers.py --task gpt --size large --device cuda --seeds 1 --json gpt.json --figure gpt.png
    python benchmarks/adapter_peers.py --draw docs/figures/adapter-peers.json --figure docs/figures/adapter-peers.png
"""

import argparse
import copy
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from peft import LoraConfig, OSFConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from torch import Tensor, nn
from torch.nn import functional

import mooring

Batch = tuple[Tensor, Tensor]
RANK = 8
PARTS = 4
"""A training is evaluated after each of so many parts, for early stopping."""


@dataclass(frozen=True)
class Task:
    """A base model, and how its adapters are trained and evaluated.

    Attributes:
        base: the model that knows the old task.
        targets: the names of the layers that get adapters.
        reference: batches of what it knows.
        batches: yields the batches of the new task, in the order of a seed.
        steps: the number of these.
        optimizer: makes the optimizer, with a factor of the usual learning rate.
        evaluate: returns what is kept and what is learned; more is better.
    """

    base: nn.Module
    targets: list[str]
    reference: list[Batch]
    batches: Callable[[int], Iterator[Batch]]
    steps: int
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    evaluate: Callable[[nn.Module], tuple[float, float]]


@dataclass
class Point:
    """What a setting of a method kept and learned, for each seed."""

    method: str
    dial: str
    kept: list[float] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)


Extra = Callable[[nn.Module, Batch], Tensor]
"""A term that is added to the loss of a batch."""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def train(
    task: Task, model: nn.Module, seed: int, *, rate: float = 1.0, moor: dict[str, Any] | None = None, extra: Any = None
) -> list[tuple[float, float]]:
    """Train the adapters of a model; return what is kept and learned after each part of the training."""
    optimizer = task.optimizer([p for p in model.parameters() if p.requires_grad], rate)
    if moor is not None:
        mooring.attach(model, optimizer, reference=task.reference, progress=False, **moor)
    ends = {math.ceil(task.steps * part / PARTS) for part in range(1, PARTS + 1)}
    results = []
    for number, batch in enumerate(task.batches(seed), 1):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        (loss + extra(model, batch) if extra else loss).backward()
        optimizer.step()
        if number in ends:
            results.append(task.evaluate(model))
    return results


def lora(task: Task, rank: int = RANK) -> nn.Module:
    """Return the base model with new LoRA adapters whose scale is 1."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=task.targets)
    return get_peft_model(copy.deepcopy(task.base), config)


# Methods. Each takes a task, a seed and the value of its dial, and returns the results of `train`.


def smaller_rank(task: Task, seed: int, rank: float) -> list[tuple[float, float]]:
    """Use a smaller rank."""
    return train(task, lora(task, int(rank)), seed)


def smaller_rate(task: Task, seed: int, rate: float) -> list[tuple[float, float]]:
    """Use a smaller learning rate."""
    return train(task, lora(task), seed, rate=rate)


def moored(task: Task, seed: int, nats: float) -> list[tuple[float, float]]:
    """Hold the products with a budget that is measured on the reference, and distil from the rest of it."""
    return train(task, lora(task), seed, moor={"pull": mooring.Budget(nats)})


def moored_by_estimate(task: Task, seed: int, nats: float) -> list[tuple[float, float]]:
    """Hold the products with a budget that is estimated, and calibrated on the reference."""
    return train(task, lora(task), seed, moor={"pull": mooring.Budget(nats, measured=False)})


def divergence(task: Task, model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean KL divergence of a model from the base model."""
    with torch.no_grad():
        before = task.base(x).flatten(0, -2).log_softmax(-1)
    now = model(x).flatten(0, -2).log_softmax(-1)
    return functional.kl_div(now, before, reduction="batchmean", log_target=True)


def kl_new(task: Task, seed: int, weight: float) -> list[tuple[float, float]]:
    """Add the divergence from the base model on the new inputs."""
    return train(task, lora(task), seed, extra=lambda model, batch: weight * divergence(task, model, batch[0]))


def kl_reference(task: Task, seed: int, weight: float) -> list[tuple[float, float]]:
    """Add the divergence from the base model on the reference, which needs it in every step."""
    turn = _endless(task.reference)
    return train(task, lora(task), seed, extra=lambda model, batch: weight * divergence(task, model, next(turn)[0]))


def replay(task: Task, seed: int, weight: float) -> list[tuple[float, float]]:
    """Add the loss on the reference, which needs it in every step."""
    turn = _endless(task.reference)
    return train(task, lora(task), seed, extra=lambda model, batch: weight * loss_of(model, next(turn)))


def o_lora(task: Task, seed: int, weight: float) -> list[tuple[float, float]]:
    """Add |A_old A'| summed, as O-LoRA does.

    There is no older adapter, so A_old are the first right singular vectors of the base weights.
    """
    model = lora(task)
    pairs = []
    for layer in _adapted(model):
        old = torch.linalg.svd(layer.base_layer.weight.detach(), full_matrices=False)[2][:RANK]
        pairs.append((old, layer.lora_A["default"].weight))
    return train(task, model, seed, extra=lambda *_: weight * sum((old @ a.mT).abs().sum() for old, a in pairs))


def lora_null(task: Task, seed: int, rate: float) -> list[tuple[float, float]]:
    """Start from the part of the base weights that acts on the null space of the reference's inputs; A is frozen.

    LoRA-Null: the null space is spanned by the eigenvectors of C with the smallest eigenvalues, as many as the rank.
    """
    model = lora(task)
    moments = _input_moments(task)
    with torch.no_grad():
        for name, layer in zip(_target_names(task), _adapted(model), strict=True):
            vectors = torch.linalg.eigh(moments[name])[1][:, :RANK]
            weight = layer.base_layer.weight
            u, s, v = torch.linalg.svd(weight @ vectors @ vectors.mT, full_matrices=False)
            rank = min(RANK, len(s))
            root, a, b = s[:rank].sqrt(), layer.lora_A["default"].weight, layer.lora_B["default"].weight
            a[:rank], b[:, :rank] = root[:, None] * v[:rank], u[:, :rank] * root
            weight -= b @ a
            a.requires_grad_(False)
    return train(task, model, seed, rate=rate)


def corda(task: Task, seed: int, rate: float) -> list[tuple[float, float]]:
    """Start from CorDA's directions in its knowledge-preserved mode, as PEFT has it."""
    base = copy.deepcopy(task.base)
    options = {"init_lora_weights": "corda", "corda_config": CordaConfig(corda_method="kpm")}
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=task.targets, **options)

    def run() -> None:
        for x, _ in task.reference:
            for part in x.split(1) if x.dtype == torch.long else [x]:  # PEFT takes one sequence at a time
                base(part)

    preprocess_corda(base, config, run_model=run)
    return train(task, get_peft_model(base, config), seed, rate=rate)


def osf(task: Task, seed: int, part: float) -> list[tuple[float, float]]:
    """Train the smallest singular directions only, orthogonally to the others, as PEFT's OSF does."""
    config = OSFConfig(effective_rank=part, target_modules=task.targets)
    return train(task, get_peft_model(copy.deepcopy(task.base), config), seed)


Method = Callable[[Task, int, float], list[tuple[float, float]]]
METHODS: dict[str, tuple[Method, list[float]]] = {
    "Mooring": (moored, [0.001, 0.003, 0.01, 0.03, 0.1, 0.3]),
    "Mooring, estimated": (moored_by_estimate, [0.001, 0.003, 0.01, 0.03, 0.1, 0.3]),
    "smaller rank": (smaller_rank, [1, 2, 4, 8]),
    "smaller learning rate": (smaller_rate, [0.03, 0.1, 0.15, 0.2, 0.3, 0.5]),
    "KL on new inputs": (kl_new, [0.01, 0.03, 0.1, 0.3, 1]),
    "KL on the reference": (kl_reference, [0.1, 0.3, 1, 3, 10]),
    "replay of the reference": (replay, [0.1, 0.3, 1, 3]),
    "O-LoRA": (o_lora, [0.01, 0.1, 1, 10]),
    "LoRA-Null": (lora_null, [1, 3, 10, 30, 100]),
    "CorDA (KPM)": (corda, [0.001, 0.003, 0.01, 0.03, 0.1, 1]),
    "OSF": (osf, [0.25, 0.5, 0.6, 0.75, 0.9]),
}
"""Each method, and the values of its dial."""

EVERY_STEP = ("Mooring", "KL on the reference", "replay of the reference")
"""Methods that compute on the reference in every step; the others read it once or not at all."""


def _endless(batches: Sequence[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _target_names(task: Task) -> list[str]:
    return [name for name, _ in task.base.named_modules() if name.rpartition(".")[2] in task.targets]


def _input_moments(task: Task) -> dict[str, Tensor]:
    """Return the sum of x x' over the reference's inputs x of each layer, by its name."""
    moments: dict[str, Tensor] = {}
    handles = []
    for name in _target_names(task):

        def observe(module: nn.Module, args: tuple[Tensor], returned: Tensor, name: str = name) -> None:
            rows = args[0].flatten(0, -2)
            moments[name] = moments.get(name, 0) + rows.mT @ rows

        handles.append(task.base.get_submodule(name).register_forward_hook(observe))
    with torch.no_grad():
        for x, _ in task.reference:
            task.base(x)
    for handle in handles:
        handle.remove()
    return moments


# Tasks


def load_script(path: Path) -> ModuleType:
    """Import a script that is not part of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digits_task(seed: int, epochs: int) -> Task:
    """Return the task of `benchmarks/adapters.py`: digits on their side after upright ones."""
    bench = load_script(Path(__file__).with_name("adapters.py"))
    upright, rotated, y = bench.digits()

    def batches(seed: int) -> Iterator[Batch]:
        torch.manual_seed(100 + seed)
        for chosen in torch.cat([torch.randperm(bench.TRAINED) for _ in range(epochs)]).split(20):
            yield rotated[chosen], y[chosen]

    def evaluate(model: nn.Module) -> tuple[float, float]:
        return bench.accuracy(model, upright, y), bench.accuracy(model, rotated, y)

    return Task(
        base=bench.pretrained(seed, 12),
        targets=["0", "2"],
        reference=list(zip(upright[:640].split(20), y[:640].split(20), strict=True)),
        batches=batches,
        steps=math.ceil(bench.TRAINED * epochs / 20),
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=0.01 * rate, momentum=0.9),
        evaluate=evaluate,
    )


def gpt_task(size_name: str, device: str, folder: Path) -> Task:
    """Return the task of `examples/finetune_language_model.py`: prose after code."""
    example = load_script(Path(__file__).parents[1] / "examples" / "finetune_language_model.py")
    size = example.SIZES[size_name]
    domains = example.read_domains(200_000 if size_name == "tiny" else 10_000_000)
    base = example.pretrained(size, domains["code"][0], folder / f"{size_name}.pt", device)

    def draw(domain: str, part: int, seed: int, count: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            yield example.batch_of(domains[domain][part], size, generator, device)

    held_out = {domain: list(draw(domain, 1, 0, 16)) for domain in domains}

    def evaluate(model: nn.Module) -> tuple[float, float]:
        return -example.mean_loss(model, held_out["code"]), -example.mean_loss(model, held_out["prose"])

    return Task(
        base=base.requires_grad_(False),
        targets=["mix", "out", "up", "down"],
        reference=list(draw("code", 0, 2, 32)),
        batches=lambda seed: draw("prose", 0, 3 + seed, size.tuning),
        steps=size.tuning,
        optimizer=lambda parameters, rate: torch.optim.AdamW(parameters, lr=size.tuning_lr * rate, weight_decay=0.0),
        evaluate=evaluate,
    )


# Results


def measure(tasks: list[Task], methods: Sequence[str], dials: int | None) -> tuple[dict[str, float], list[Point]]:
    """Return what the base knows of both tasks, and the points of all methods."""
    before = [task.evaluate(task.base) for task in tasks]
    results = {
        name: statistics.mean(values)
        for name, values in zip(("kept", "learned"), zip(*before, strict=True), strict=True)
    }
    points: list[Point] = []
    for name in methods:
        run, values = METHODS[name]
        start = time.perf_counter()
        for value in values[:dials]:
            point = Point(name, f"{value:g}")
            parts = [Point("early stopping", f"{part}/{PARTS}") for part in range(1, PARTS + 1)]
            for seed, task in enumerate(tasks):
                torch.manual_seed(100 + seed)
                history = run(task, seed, value)
                for target, (kept, learned) in zip([*parts, point], [*history, history[-1]], strict=True):
                    target.kept.append(kept)
                    target.learned.append(learned)
            points += [*(parts if name == "smaller rank" and value == RANK else []), point]
            print(f"{name:26s}{point.dial:>8s}{_line(point)}", flush=True)
        print(f"{name:26s}{time.perf_counter() - start:8.0f} s", flush=True)
    return results, points


def _line(point: Point) -> str:
    cells = ((statistics.mean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for v in (point.kept, point.learned))
    return "".join(
        f"   {name} {mean:7.3f} +- {spread:5.3f}"
        for name, (mean, spread) in zip(("kept", "learned"), cells, strict=True)
    )


def table(results: dict[str, Any]) -> str:
    """Return a table with the setting of each method that has the highest sum of what is kept and learned."""
    best: dict[str, dict[str, Any]] = {}
    for point in results["points"]:
        known = best.get(point["method"])
        if known is None or _total(point) > _total(known):
            best[point["method"]] = point
    rows = ["| | dial | kept | learned |", "| --- | --- | --- | --- |"]
    digits = 1 if results["task"] == "digits" else 3
    for point in sorted(best.values(), key=_total, reverse=True):
        both = [point["kept"], point["learned"]]
        cells = [f"{statistics.mean(v):.{digits}f}" for v in both]
        if results["seeds"] > 1:
            cells = [f"{c} ± {statistics.stdev(v):.{digits}f}" for c, v in zip(cells, both, strict=True)]
        rows.append(f"| {point['method']} | {point['dial']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _total(point: dict[str, Any]) -> float:
    return statistics.mean(point["kept"]) + statistics.mean(point["learned"])


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the upper hull of (learned, kept), from the most kept to the most learned.

    Example:
        >>> frontier([(0, 4), (1, 3), (2, 1), (1, 1)])
        [(0, 4), (1, 3), (2, 1)]
    """
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        while hull and y >= hull[-1][1]:
            hull.pop()
        while len(hull) > 1 and _turns_left(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


def _turns_left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]) >= 0


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw the points of every method with their standard deviations, and the hull of each."""
    from matplotlib.figure import Figure

    from mooring.report.style import FAINT, LINES, RULE, figure_style

    names = list(dict.fromkeys(point["method"] for point in results["points"]))
    with figure_style():
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.subplots()
        axes.axhline(results["before"]["kept"], color=RULE)
        for number, name in enumerate(names):
            colour, mark = LINES[number % len(LINES)], "osD^v"[number // len(LINES)]
            label = f"{name}, in every step" if name in EVERY_STEP else name
            own = [point for point in results["points"] if point["method"] == name]
            centres = [(statistics.mean(p["learned"]), statistics.mean(p["kept"])) for p in own]
            spread = [
                [statistics.stdev(p[key]) if len(p[key]) > 1 else 0.0 for p in own] for key in ("learned", "kept")
            ]
            style = {"color": colour, "marker": mark, "markersize": 4, "linestyle": "none", "elinewidth": 0.6}
            axes.errorbar(*zip(*centres, strict=True), xerr=spread[0], yerr=spread[1], label=label, **style)
            axes.plot(*zip(*frontier(centres), strict=True), color=colour, linewidth=2 if name == "Mooring" else 0.9)
        unit = "accuracy, %" if results["task"] == "digits" else "negative loss, nats per character"
        axes.set(xlabel=f"learned: {unit}", ylabel=f"kept: {unit}")
        axes.annotate("before", (axes.get_xlim()[0], results["before"]["kept"]), color=FAINT, va="bottom")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(file, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    """Measure the methods that are asked for, print them, and write and draw the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("digits", "gpt"), default="digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dials", type=int, help="only the first values of each dial")
    parser.add_argument("--epochs", type=int, default=18, help="of digits")
    parser.add_argument("--size", default="small", help="of the GPT: tiny, small or large")
    parser.add_argument("--device", default="cpu", help="of the GPT")
    parser.add_argument("--folder", type=Path, default=Path("cache"), help="where the pre-trained GPT is kept")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--draw", type=Path, help="draw the results in this file instead of measuring")
    parser.add_argument("--figure", type=Path, help="draw to this file")
    given = parser.parse_args(arguments)
    if given.draw:
        results = json.loads(given.draw.read_text())
    else:
        if given.task == "digits":
            tasks = [digits_task(seed, given.epochs) for seed in range(given.seeds)]
        else:
            tasks = [gpt_task(given.size, given.device, given.folder)] * given.seeds
        before, points = measure(tasks, given.methods, given.dials)
        rows = [vars(point) for point in points]
        results = {"task": given.task, "seeds": given.seeds, "before": before, "points": rows}
    print(table(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.figure:
        draw(results, given.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
