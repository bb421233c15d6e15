"""Compare the forgetting that an estimated budget promises with the measured forgetting.

A small network is trained on streams of digits with budgets. After every task, the mean rise of the loss on test data
of the previous tasks since the last consolidation is measured in nats. A budget promises a limit of this rise.

    python benchmarks/promised.py                                  # everything, takes some minutes on one core
    python benchmarks/promised.py --stream digits --seeds 1        # a part
    python benchmarks/promised.py --along                          # where the loss leaves its estimate
    python benchmarks/promised.py --json docs/figures/promised.json --figure docs/figures/promised
"""

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor
from torch.nn.functional import cross_entropy

import mooring
from mooring.rules import Importance, Kronecker
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.report.style import INK, LINES, RULE, figure_style
from mooring_lab.streams.options import StreamOptions, open_stream
from mooring_lab.streams.stream import Stream

STREAMS = {
    "digits": StreamOptions("digits"),
    "digits-permuted": StreamOptions("digits-permuted", tasks=3),
    "digits-rotated": StreamOptions("digits-rotated", tasks=3),
}
ESTIMATES: dict[str, Callable[[], Importance]] = {
    "diagonal observed": lambda: mooring.EWC(decay=None, per_sample=True),
    "diagonal sampled": lambda: mooring.EWC(decay=None, labels="sampled"),
    "Kronecker": Kronecker,
}
NATS = [0.003, 0.03, 0.3]
FRACTIONS = (0.1, 0.3, 1.0)
LR, MOMENTUM, BATCH = 0.03, 0.9, 20


def run(stream: Stream, estimate: str, nats: float, seed: int, epochs: int, tasks: int | None = None) -> dict[str, Any]:
    """Train one model on one stream; return losses and accuracies on the tasks so far after every task."""
    torch.manual_seed(seed)
    model = initial_network("mlp", stream, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    heads = () if stream.heads == "one" else ("heads.*",)
    pull = mooring.Budget(nats, measured=False)
    moor = mooring.attach(model, optimizer, importance=ESTIMATES[estimate](), pull=pull, exclude=heads)
    train, test = ((normalize_pixels(split.images), split.labels) for split in (stream.train, stream.test))

    @torch.no_grad()
    def evaluate(task: int) -> tuple[float, float]:
        index = stream.tasks[task].test
        outputs, labels = model(test[0][index], stream.head(task)), test[1][index]
        return float(cross_entropy(outputs, labels)), 100 * float((outputs.argmax(-1) == labels).float().mean())

    losses, accuracies, path_rises = [], [], {}
    for number, task in enumerate(stream.tasks[:tasks]):
        if number and heads:
            model.heads[number].load_state_dict(model.heads[number - 1].state_dict())
        optimizer.state.clear()

        def loss(model: Any, index: Tensor, number: int = number) -> Tensor:
            return cross_entropy(model(train[0][index], stream.head(number)), train[1][index])

        for _ in range(epochs):
            for index in task.train[torch.randperm(len(task.train))].split(BATCH):
                optimizer.zero_grad()
                loss(model, index).backward()
                optimizer.step()
        scores = [evaluate(earlier) for earlier in range(number + 1)]
        if number == 1 and tasks == 2:
            first = stream.tasks[0].train
            measured_losses = {"training": lambda index=first: loss(model, index, 0)}
            measured_losses["held out"] = lambda: torch.tensor(evaluate(0)[0])
            path_rises = {
                kind: rise_along_path(model, moor.anchor, nats, measured) for kind, measured in measured_losses.items()
            }
        losses.append([loss_value for loss_value, _ in scores])
        accuracies.append([accuracy for _, accuracy in scores])
        moor.consolidate()
    return {"losses": losses, "accuracies": accuracies} | path_rises


@torch.no_grad()
def rise_along_path(model: Any, anchor: dict[str, Tensor], nats: float, loss: Callable[[], Tensor]) -> list[float]:
    """Return the rise of a loss at fractions of the path from the anchor, relative to a quadratic that ends at nats."""
    parameters = {name: p for name, p in model.named_parameters() if name in anchor}
    ends = {name: p.detach().clone() for name, p in parameters.items()}
    losses = []
    for fraction in (0.0, *FRACTIONS):
        for name, p in parameters.items():
            p.copy_(anchor[name] + fraction * (ends[name] - anchor[name]))
        losses.append(float(loss()))
    for name, p in parameters.items():
        p.copy_(ends[name])
    return [(value - losses[0]) / (fraction**2 * nats) for fraction, value in zip(FRACTIONS, losses[1:], strict=True)]


def rises(losses: list[list[float]]) -> list[float]:
    """Return the mean rise of the losses of all previous tasks during each task, which its budget limits."""
    return [(sum(now) - now[-1] - sum(previous)) / len(previous) for previous, now in pairwise(losses)]


def summary(runs: list[dict[str, Any]], nats: float) -> dict[str, Any]:
    """Return a row of the table, over seeds and tasks."""
    all_rises = [rise for run in runs for rise in rises(run["losses"])]
    return {
        "nats": nats,
        "actual": statistics.mean(all_rises),
        "median": statistics.median(all_rises),
        "lowest": min(all_rises),
        "highest": max(all_rises),
        "first": statistics.mean(rises(run["losses"])[0] for run in runs),
        "within_2": statistics.mean(nats / 2 <= rise <= 2 * nats for rise in all_rises),
        "at_most_2": statistics.mean(rise <= 2 * nats for rise in all_rises),
        "ratio": statistics.mean(all_rises) / nats,
        "learned": statistics.mean(row[-1] for run in runs for row in run["accuracies"]),
        "accuracy": statistics.mean(statistics.mean(run["accuracies"][-1]) for run in runs),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the measured over the promised rise, both logarithmic, one panel per stream, as .svg and .png."""
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    nats = sorted({row["nats"] for row in rows})
    edges = min(nats) / 2, max(nats) * 2
    with figure_style():
        figure = Figure(figsize=(3.1 * len(streams) + 0.4, 4.1))
        for place, stream in enumerate(streams):
            axes = figure.add_subplot(1, len(streams), place + 1, xscale="log", yscale="log")
            _panel(axes, [row for row in rows if row["stream"] == stream], edges)
            axes.set_title(stream, loc="left")
            axes.set_xlabel("promised, nats")
            if not place:
                axes.set_ylabel("actual rise on held-out data, nats")
            else:
                axes.tick_params(labelleft=False)
        colours = dict(zip(ESTIMATES, LINES, strict=False))
        marks = [Line2D([], [], color=colours[name], label=name) for name in colours]
        marks.append(Patch(color=RULE, label="within a factor of 2"))
        figure.legend(handles=marks, loc="lower center", ncol=4)
        figure.subplots_adjust(left=0.55 / figure.get_figwidth() + 0.02, right=0.99, top=0.93, bottom=0.25, wspace=0.16)
        for kind in ("svg", "png"):
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(path.with_suffix(f".{kind}"), format=kind, dpi=150, metadata=metadata)


def _panel(axes: Axes, rows: list[dict[str, Any]], edges: tuple[float, float]) -> None:
    axes.fill_between(edges, [e / 2 for e in edges], [2 * e for e in edges], color=RULE, lw=0)
    axes.plot(edges, edges, color=INK, lw=0.8)
    for colour, estimate in zip(LINES, ESTIMATES, strict=False):
        selected = [row for row in rows if row["estimate"] == estimate]
        if selected:
            axes.plot([row["nats"] for row in selected], [row["actual"] for row in selected], "o-", color=colour, ms=5)
    axes.set_xlim(edges)
    axes.set_ylim(edges[0], 20)
    for axis, ticks in ((axes.xaxis, sorted({row["nats"] for row in rows})), (axes.yaxis, [0.001, 0.01, 0.1, 1, 10])):
        axis.set_minor_locator(NullLocator())
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(which="major")


def print_along(streams: list[str], estimates: list[str], nats: list[float], seeds: int, epochs: int) -> None:
    """Print the rise relative to the estimate at fractions of the second task's path, medians over seeds."""
    heads = [f"{kind} {fraction:g}" for kind in ("training", "held out") for fraction in FRACTIONS]
    print(f"{'stream':16s}{'estimate':18s}{'nats':>8s}" + "".join(head.rjust(14) for head in heads))
    for name in streams:
        stream = open_stream(STREAMS[name])
        for estimate in estimates:
            for budget in nats:
                runs = [run(stream, estimate, budget, seed, epochs, tasks=2) for seed in range(seeds)]
                medians = [
                    statistics.median(values)
                    for kind in ("training", "held out")
                    for values in zip(*(rises_of[kind] for rises_of in runs), strict=True)
                ]
                print(f"{name:16s}{estimate:18s}{budget:8g}" + "".join(f"{m:14.3g}" for m in medians), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", choices=STREAMS, action="append", help="default: all")
    parser.add_argument("--estimate", choices=ESTIMATES, action="append", help="default: all")
    parser.add_argument("--nats", type=float, action="append", help=f"default: {', '.join(map(str, NATS))}")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each task (default: 5)")
    parser.add_argument("--along", action="store_true", help="print the rise at fractions of the path instead")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--figure", type=Path, help="draw the figure to this path, as .svg and .png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    streams, estimates, budgets = options.stream or [*STREAMS], options.estimate or [*ESTIMATES], options.nats or NATS
    if options.along:
        print_along(streams, estimates, budgets, options.seeds, options.epochs)
        return
    rows = []
    heads = ("promised", "actual", "lowest", "highest", "<= 2x", "within 2x", "ratio", "learned", "accuracy")
    print(f"{'stream':16s}{'estimate':18s}" + "".join(head.rjust(10) for head in heads))
    for name in streams:
        stream = open_stream(STREAMS[name])
        for estimate in estimates:
            for nats in budgets:
                runs = [run(stream, estimate, nats, seed, options.epochs) for seed in range(options.seeds)]
                row = {"stream": name, "estimate": estimate, **summary(runs, nats)}
                rows.append({**row, "runs": runs})
                text = "".join(f"{row[key]:10.3g}" for key in ("nats", "actual", "lowest", "highest"))
                text += "".join(f"{100 * row[key]:8.0f} %" for key in ("at_most_2", "within_2"))
                text += f"{row['ratio']:9.3g}x" + "".join(f"{row[key]:8.1f} %" for key in ("learned", "accuracy"))
                print(f"{name:16s}{estimate:18s}{text}", flush=True)
    if options.json:
        short = json.loads(json.dumps(rows), parse_float=lambda number: float(f"{float(number):.5g}"))
        options.json.write_text(json.dumps(short) + "\n")
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
