"""Draws the picture of each pull's card: its rule, and the way two parameters take between an old task and a new one.

python docs/pictures/pulls.py
"""

import argparse
from pathlib import Path

import torch
from drawn import FOLDER, Given, figure, logarithmic
from matplotlib.axes import Axes
from torch import nn

import mooring
from mooring.rules import Blend, Pull
from mooring_lab.report.style import FAINT, INK, LINES, RULE

OLD, NEW = torch.tensor([4.0, 0.2]), torch.tensor([1.0, 1.0])
"""Curvature of the old loss, whose minimum is the anchor at 0, and of the new one, whose minimum is at (1, 1)."""


def way(pull: Pull, steps: int = 60, lr: float = 0.1) -> torch.Tensor:
    """The two parameters after each step of gradient descent on the new task, moored to the old."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    moor = mooring.attach(model, optimizer, importance=Given(OLD, NEW), pull=pull, merge="sum", check_finite=False)
    (model.weight * 0).sum().backward()
    optimizer.step()  # a step that goes nowhere: the old task is learned
    moor.consolidate()
    seen = [model.weight.detach().flatten().clone()]
    for step in range(steps):
        optimizer.zero_grad()
        (NEW * (model.weight - 1).square()).sum().div(2).backward()
        optimizer.step()
        if step == steps - 1:
            moor.consolidate()  # for pulls that act once
        seen.append(model.weight.detach().flatten().clone())
    return torch.stack(seen)


def draw_ways(panel: Axes, pulls: dict[str, Pull]) -> None:
    """Contours of both losses, and a way for each pull."""
    axis = torch.linspace(-0.6, 1.5, 80)
    a, b = torch.meshgrid(axis, axis, indexing="xy")
    panel.contour(a, b, OLD[0] * a**2 + OLD[1] * b**2, levels=[0.05, 0.3, 1, 3], colors=RULE, linewidths=1)
    panel.contour(a, b, (a - 1) ** 2 + (b - 1) ** 2, levels=[0.05, 0.3, 1], colors=RULE, linewidths=1, linestyles=":")
    for number, (name, pull) in enumerate(pulls.items()):
        told = way(pull)
        panel.plot(told[:, 0], told[:, 1], color=LINES[number], marker="o", ms=1.8, lw=0.8, label=name, clip_on=True)
    panel.plot(0, 0, marker="s", color=INK, ms=4, ls="none")
    panel.plot(1, 1, marker="*", color=INK, ms=7, ls="none")
    panel.set(xlim=(-0.6, 1.5), ylim=(-0.3, 1.3), title="from the anchor (square) to the new minimum (star)")
    panel.set(xlabel="an important parameter", ylabel="one that matters little")
    panel.legend(fontsize=6.5, loc="lower right")


def finish_left(rule: Axes, lowest: float) -> None:
    """Axes and legend of what is left of a displacement."""
    rule.set(
        ylim=(lowest, 1.1),
        xscale="log",
        xlabel="p = lr * strength * importance",
        title="what is left of d after a step",
    )
    rule.legend(fontsize=6.5, loc="lower left")
    logarithmic(rule, "x")


def draw_all(folder: Path) -> None:
    """A figure for each pull."""
    p, one = torch.logspace(-2, 2, 200), torch.ones(200)
    with figure("pull-penalty", 2, folder=folder) as (rule, ways):
        force = mooring.Penalty(1.0).force(p, one, 1.0)
        rule.plot(p, 1 - force, color=LINES[0], label="Penalty")
        rule.plot(
            p, 1 - mooring.Penalty(1.0, clamp=True).force(p, one, 1.0), color=LINES[1], ls="--", label="clamp=True"
        )
        rule.axhline(-1, color=FAINT, lw=0.7, ls=":")
        finish_left(rule, -3)
        strengths = {f"strength {s:g}": mooring.Penalty(s) for s in (0.5, 2.0, 4.8)}
        draw_ways(ways, {**strengths, "20, clamped": mooring.Penalty(20.0, clamp=True)})
    with figure("pull-proximal", 2, folder=folder) as (rule, ways):
        rule.plot(p, 1 - mooring.Proximal(1.0).rate(p, one, 1.0), color=LINES[0], label="Proximal")
        rule.plot(p, 1 - mooring.Penalty(1.0).force(p, one, 1.0), color=FAINT, ls=":", label="Penalty")
        finish_left(rule, -1)
        draw_ways(ways, {f"strength {s:g}": mooring.Proximal(s) for s in (0.5, 2.0, 20.0, 1000.0)})
    with figure("pull-interpolation", 2, folder=folder) as (rule, ways):
        for number, root in enumerate((1, 2, 3)):
            told = mooring.Interpolation(root=root).rate(p, one, 1.0)
            rule.plot(p, told, color=LINES[number], label=f"root={root}" + (", the paper's" if root == 2 else ""))
        rule.set(xlabel="previous / current", title="R: the part of the way back in each step")
        rule.legend(fontsize=6.5, loc="upper left")
        logarithmic(rule, "x")
        draw_ways(ways, {f"stiffness {s:g}": mooring.Interpolation(stiffness=s) for s in (1.0, 0.1, 0.03)})
    with figure("pull-budget", 2, folder=folder) as (rule, ways):
        for number, nats in enumerate((0.03, 0.1, 0.5)):
            told = way(mooring.Budget(nats))
            rule.plot((OLD * told.square()).sum(1) / 2, color=LINES[number], label=f"Budget({nats:g})")
        rule.set(xlabel="step of the new task", title="rise of the old loss, nats")
        rule.legend(fontsize=6.5, loc="center right")
        draw_ways(ways, {f"Budget({nats:g})": mooring.Budget(nats) for nats in (0.03, 0.1, 0.5)})
    with figure("pull-blend", 2, folder=folder) as (rule, ways):
        rule.plot(way(Blend(0.3, every=10))[:, 0], color=LINES[0], label="share 0.3, every=10")
        rule.plot(way(Blend(0.5))[:, 0], color=LINES[1], label='share 0.5, every="task"')
        rule.set(xlabel="step of the new task", title="the important parameter")
        rule.legend(fontsize=6.5, loc="lower right")
        draw_ways(ways, {"share 0.3, every=10": Blend(0.3, every=10), 'share 0.5, every="task"': Blend(0.5)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    draw_all(parser.parse_args().folder)
