"""What a nat is worth: how much is promised to be forgotten, and how much is, with and without calibration.

Trains a small network on streams of digits under budgets, and measures after every task by how many nats the loss on
held-out data of past tasks has risen since the last consolidation, which is what a budget promises. A fifth of each
task's training data is kept aside for `consolidate(data=...)`; what is reported was measured on test data.

    python benchmarks/promised.py                                  # everything, some minutes on one core
    python benchmarks/promised.py --stream digits --seeds 1        # a part of it
    python benchmarks/promised.py --along                          # where on its way the loss leaves the estimate
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
from mooring.importance import Importance, Kronecker
from mooring.lab.networks.initialization import initial_network
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.streams.options import StreamOptions, open_stream
from mooring.lab.streams.stream import Stream
from mooring.report.style import FAINT, INK, LINES, RULE, drawing

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
PARTS = (0.1, 0.3, 1.0)
LR, MOMENTUM, BATCH, ASIDE = 0.03, 0.9, 20, 0.2


def run(
    stream: Stream, estimate: str, nats: float, calibrated: bool, seed: int, epochs: int, tasks: int | None = None
) -> dict[str, Any]:
    """One model through one stream; the loss on test data of every task after every task."""
    torch.manual_seed(seed)
    model = initial_network("mlp", stream, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    heads = () if stream.heads == "one" else ("heads.*",)
    pull = mooring.Budget(nats, over="sum")
    moor = mooring.attach(model, optimizer, importance=ESTIMATES[estimate](), pull=pull, exclude=heads)
    train, test = ((normalize_pixels(part.images, torch.float32), part.labels) for part in (stream.train, stream.test))

    @torch.no_grad()
    def tested(task: int) -> tuple[float, float]:
        index = stream.tasks[task].test
        outputs, labels = model(test[0][index], stream.head(task)), test[1][index]
        return float(cross_entropy(outputs, labels)), 100 * float((outputs.argmax(-1) == labels).float().mean())

    losses, accuracies, ways = [], [], {}
    for number, task in enumerate(stream.tasks[:tasks]):
        if number and heads:
            model.heads[number].load_state_dict(model.heads[number - 1].state_dict())
        optimizer.state.clear()
        shuffled = task.train[torch.randperm(len(task.train))]
        aside, rest = shuffled.split([round(ASIDE * len(shuffled)), len(shuffled) - round(ASIDE * len(shuffled))])

        def loss(model: Any, index: Tensor, number: int = number) -> Tensor:
            return cross_entropy(model(train[0][index], stream.head(number)), train[1][index])

        for _ in range(epochs):
            for index in rest[torch.randperm(len(rest))].split(BATCH):
                optimizer.zero_grad()
                loss(model, index).backward()
                optimizer.step()
        found = [tested(past) for past in range(number + 1)]
        if number == 1 and tasks == 2:
            first = stream.tasks[0].train
            ways["training"] = along(model, moor.anchor, nats, lambda index=first: loss(model, index, 0))
            ways["held out"] = along(model, moor.anchor, nats, lambda: torch.tensor(tested(0)[0]))
        losses.append([each[0] for each in found])
        accuracies.append([each[1] for each in found])
        if calibrated:
            moor.consolidate(data=aside.split(BATCH), loss=loss)
        else:
            moor.consolidate()
    return {"losses": losses, "accuracies": accuracies, "factors": moor.calibration} | ways


@torch.no_grad()
def along(model: Any, anchor: dict[str, Tensor], nats: float, loss: Callable[[], Tensor]) -> list[float]:
    """The rise of a loss at parts of the way from the anchor, over that of a quadratic with nats at its end."""
    moved = {name: p for name, p in model.named_parameters() if name in anchor}
    ends = {name: p.detach().clone() for name, p in moved.items()}
    found = []
    for part in (0.0, *PARTS):
        for name, p in moved.items():
            p.copy_(anchor[name] + part * (ends[name] - anchor[name]))
        found.append(float(loss()))
    for name, p in moved.items():
        p.copy_(ends[name])
    return [(rise - found[0]) / (part**2 * nats) for part, rise in zip(PARTS, found[1:], strict=True)]


def rises(losses: list[list[float]]) -> list[float]:
    """By how much the losses of all past tasks rose in each task, together: what the budget of that task promises."""
    return [sum(now) - now[-1] - sum(before) for before, now in pairwise(losses)]


def summary(runs: list[dict[str, Any]], nats: float) -> dict[str, Any]:
    """What a row of the table says, over seeds and tasks."""
    each = [rise for run in runs for rise in rises(run["losses"])]
    return {
        "nats": nats,
        "actual": statistics.mean(each),
        "median": statistics.median(each),
        "lowest": min(each),
        "highest": max(each),
        "first": statistics.mean(rises(run["losses"])[0] for run in runs),
        "within_2": statistics.mean(nats / 2 <= rise <= 2 * nats for rise in each),
        "at_most_2": statistics.mean(rise <= 2 * nats for rise in each),
        "ratio": statistics.mean(each) / nats,
        "factor": statistics.median(factor for run in runs for factor in run["factors"][:-1]),
        "learned": statistics.mean(row[-1] for run in runs for row in run["accuracies"]),
        "accuracy": statistics.mean(statistics.mean(run["accuracies"][-1]) for run in runs),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Promised against actual, both logarithmic, a panel for each stream; as .svg and .png."""
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    nats = sorted({row["nats"] for row in rows})
    edges = min(nats) / 2, max(nats) * 2
    with drawing():
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
        how = {"color": FAINT, "ms": 5}
        marks += [
            Line2D([], [], marker="o", ls=(0, (4, 2)), mfc="white", label="as estimated", **how),
            Line2D([], [], marker="o", label="calibrated", **how),
            Line2D([], [], marker="v", ls="", label="less than the axis shows", **how),
            Patch(color=RULE, label="within a factor of 2"),
        ]
        figure.legend(handles=marks, loc="lower center", ncol=4)
        figure.subplots_adjust(left=0.55 / figure.get_figwidth() + 0.02, right=0.99, top=0.93, bottom=0.25, wspace=0.16)
        for kind in ("svg", "png"):
            nothing = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(path.with_suffix(f".{kind}"), format=kind, dpi=150, metadata=nothing)


def _panel(axes: Axes, rows: list[dict[str, Any]], edges: tuple[float, float]) -> None:
    floor = edges[0] / 10
    axes.fill_between(edges, [e / 2 for e in edges], [2 * e for e in edges], color=RULE, lw=0)
    axes.plot(edges, edges, color=INK, lw=0.8)
    for colour, estimate in zip(LINES, ESTIMATES, strict=False):
        for calibrated in (False, True):
            own = [row for row in rows if row["estimate"] == estimate and row["calibrated"] == calibrated]
            if not own:
                continue
            x, y = [row["nats"] for row in own], [max(row["actual"], floor) for row in own]
            low = [each for each, row in zip(x, own, strict=True) if row["actual"] < floor]
            how = {"color": colour, "mfc": colour if calibrated else "white", "ms": 5}
            seen = [index for index, each in enumerate(x) if each not in low]
            axes.plot(x, y, marker="o", markevery=seen, ls="-" if calibrated else (0, (4, 2)), **how)
            axes.plot(low, [floor] * len(low), "v", **how)
    axes.set_xlim(edges)
    axes.set_ylim(floor * 0.8, 20)
    for axis, ticks in ((axes.xaxis, sorted({row["nats"] for row in rows})), (axes.yaxis, [0.001, 0.01, 0.1, 1, 10])):
        axis.set_minor_locator(NullLocator())
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(which="major")


def tell_along(streams: list[str], estimates: list[str], nats: list[float], seeds: int, epochs: int) -> None:
    """Print the rise over the estimate at parts of the way of the second task, medians over seeds."""
    heads = [f"{kind} {part:g}" for kind in ("training", "held out") for part in PARTS]
    print(f"{'stream':16s}{'estimate':18s}{'nats':>8s}" + "".join(head.rjust(14) for head in heads))
    for name in streams:
        stream = open_stream(STREAMS[name])
        for estimate in estimates:
            for each in nats:
                ways = [run(stream, estimate, each, False, seed, epochs, tasks=2) for seed in range(seeds)]
                found = [
                    statistics.median(values)
                    for kind in ("training", "held out")
                    for values in zip(*(way[kind] for way in ways), strict=True)
                ]
                print(f"{name:16s}{estimate:18s}{each:8g}" + "".join(f"{value:14.3g}" for value in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", choices=STREAMS, action="append", help="default: all")
    parser.add_argument("--estimate", choices=ESTIMATES, action="append", help="default: all")
    parser.add_argument("--nats", type=float, action="append", help=f"default: {', '.join(map(str, NATS))}")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--epochs", type=int, default=5, help="of each task (default: 5)")
    parser.add_argument("--along", action="store_true", help="the rise at parts of the way, instead")
    parser.add_argument("--json", type=Path, help="write what was found there")
    parser.add_argument("--figure", type=Path, help="draw it there, as .svg and .png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    streams, estimates, budgets = options.stream or [*STREAMS], options.estimate or [*ESTIMATES], options.nats or NATS
    if options.along:
        tell_along(streams, estimates, budgets, options.seeds, options.epochs)
        return
    rows = []
    heads = ("promised", "actual", "lowest", "highest", "<= 2x", "within 2x", "ratio", "factor", "learned", "accuracy")
    print(f"{'stream':16s}{'estimate':18s}{'':12s}" + "".join(head.rjust(10) for head in heads))
    for name in streams:
        stream = open_stream(STREAMS[name])
        for estimate in estimates:
            for calibrated in (False, True):
                for nats in budgets:
                    runs = [
                        run(stream, estimate, nats, calibrated, seed, options.epochs) for seed in range(options.seeds)
                    ]
                    row = {"stream": name, "estimate": estimate, "calibrated": calibrated, **summary(runs, nats)}
                    rows.append({**row, "runs": runs})
                    said = "".join(f"{row[key]:10.3g}" for key in ("nats", "actual", "lowest", "highest"))
                    said += "".join(f"{100 * row[key]:8.0f} %" for key in ("at_most_2", "within_2"))
                    said += f"{row['ratio']:9.3g}x{row['factor']:10.3g}"
                    said += "".join(f"{row[key]:8.1f} %" for key in ("learned", "accuracy"))
                    print(
                        f"{name:16s}{estimate:18s}{'calibrated' if calibrated else 'estimated':12s}{said}", flush=True
                    )
    if options.json:
        short = json.loads(json.dumps(rows), parse_float=lambda number: float(f"{float(number):.5g}"))
        options.json.write_text(json.dumps(short) + "\n")
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
