"""Draws the picture of each importance's card: what it marks in a small network that has learned the digits.

python docs/pictures/importances.py
"""

from pathlib import Path

import torch
from drawn import asked, figure, logarithmic
from sklearn.datasets import load_digits
from torch import nn

import mooring
from mooring.rules import Importance, Kronecker, Random
from mooring_lab.report.style import FAINT, LINES

IMPORTANCES: dict[str, Importance] = {
    "ewc": mooring.EWC(),
    "mas": mooring.MAS(),
    "si": mooring.SI(),
    "rwalk": mooring.RWalk(),
    "uniform": mooring.Uniform(),
    "random": Random(),
    "balanced": mooring.Balanced("ewc"),
}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The embedded digits, pixels from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def trained(importance: Importance, epochs: int) -> mooring.Mooring:
    """A network of three layers that has learned the digits, moored."""
    torch.manual_seed(0)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    pull = mooring.Budget(1.0) if importance.by_layer else mooring.Interpolation()
    moor = mooring.attach(model, optimizer, importance=importance, pull=pull)
    for batch in torch.cat([torch.randperm(len(x)) for _ in range(epochs)]).split(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    moor.consolidate()
    return moor


def draw(name: str, moor: mooring.Mooring, folder: Path) -> None:
    """Which pixels it holds, how its scores are spread, and how they are shared among layers."""
    weights = {key: value for key, value in moor.previous.items() if key.endswith("weight")}
    scores = [value.expand(moor.anchor[key].shape) for key, value in weights.items()]
    with figure(f"importance-{name}", 3, folder=folder, height=1.9, width_ratios=(1, 1.7, 1)) as (
        pixels,
        spread,
        layers,
    ):
        pixels.imshow(scores[0].mean(0).reshape(8, 8).numpy(), cmap="viridis", vmin=0)
        pixels.set(title="mean score by pixel", xticks=[], yticks=[])
        bins = torch.linspace(-6, 3, 55)
        overall = torch.cat([each.flatten() for each in scores]).mean()
        for number, each in enumerate(scores):
            relative = (each.flatten() / overall).log10()
            kept, name = relative[relative > -6], f"layer {number + 1}"
            near_zero = f", {100 * (1 - len(kept) / each.numel()):.0f} % near 0" if len(kept) < each.numel() else ""
            shares = torch.histogram(kept, bins).hist / each.numel()
            spread.stairs(shares, bins, color=LINES[number], label=name + near_zero)
        spread.set(title="scores over their mean", xlabel="power of ten", yticks=[])
        spread.axvline(0, color=FAINT, lw=0.7, ls=":")
        spread.legend(fontsize=6.5, loc="upper left")
        layers.bar(range(1, 4), [float(each.mean() / overall) for each in scores], color=LINES[:3], width=0.6)
        layers.set(title="mean score by layer", xticks=[1, 2, 3], xlabel="layer")


def draw_kronecker(epochs: int, folder: Path) -> None:
    """The rise of the loss as the first layer's weights move together, and what two estimates say."""
    x, y = digits()
    moors = {
        "diagonal": trained(mooring.EWC(decay=None, per_sample=True), epochs),
        "Kronecker": trained(Kronecker(), epochs),
    }
    steps = torch.linspace(0.05, 1, 20)
    with figure("importance-kronecker", 2, folder=folder) as panels, torch.no_grad():
        for panel, together in zip(panels, (True, False), strict=True):
            for number, (name, moor) in enumerate(moors.items()):
                layer, loss = moor.model[0], lambda model: float(nn.functional.cross_entropy(model(x), y))
                anchor, start = layer.weight.clone(), loss(moor.model)
                noise = torch.randn(anchor.shape, generator=torch.Generator().manual_seed(0))
                way = x.mean(0).expand_as(anchor) if together else noise
                way, told, real = way / way.norm(), [], []
                for step in steps:
                    layer.weight.copy_(anchor + 2 * step * way)
                    told.append(moor.pull_energy())
                    real.append(loss(moor.model) - start)
                layer.weight.copy_(anchor)
                panel.plot(2 * steps, told, color=LINES[number], label=f"{name} estimate")
            panel.plot(2 * steps, real, color=FAINT, ls="--", label="measured")
            panel.set(ylim=(1e-5, 10), xlabel="distance", ylabel="rise of the loss, nats")
            logarithmic(panel, "y")
            panel.set_title("weights move together, with the mean input" if together else "weights move at random")
            panel.legend(fontsize=6.5)


if __name__ == "__main__":
    options = asked(__doc__)
    for name, importance in IMPORTANCES.items():
        draw(name, trained(importance, options.epochs), options.folder)
    draw_kronecker(options.epochs, options.folder)
