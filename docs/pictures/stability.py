"""Draws the theory of stability: what one p does over time, where limits are, and why no strength fits.

python docs/pictures/stability.py
"""

import warnings
from pathlib import Path

import torch
from drawn import Given, asked, figure
from importances import trained
from torch import nn

import mooring
from mooring.diagnose.stability import divergence_limit, effective_learning_rate, interpolation_weight
from mooring.errors import UnheldWarning
from mooring_lab.report.style import FAINT, LINES


def displaced(ps: torch.Tensor, momentum: float = 0.0, steps: int = 30) -> torch.Tensor:
    """Parameters at distance 1 from their anchors, one for each p: distances after each step of the penalty alone."""
    model = nn.Linear(len(ps), 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    pull, given = mooring.Penalty(1.0), Given(ps)
    moor = mooring.attach(model, optimizer, importance=given, pull=pull, merge="max", check_finite=False)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    moor.consolidate()
    nn.init.ones_(model.weight)
    seen = [torch.ones_like(ps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnheldWarning)  # the weights are away from their anchors on purpose
        for _ in range(steps):
            model.weight.grad = torch.zeros_like(model.weight)  # no task: the penalty alone
            optimizer.step()
            seen.append(model.weight.detach()[0].clone())
    return torch.stack(seen)


def draw_time(folder: Path) -> None:
    """Interpolating, overshooting, diverging; and how long a gradient is remembered."""
    with figure("stability-time", 2, folder=folder) as (distance, memory):
        for number, p in enumerate((0.2, 1.0, 1.6, 2.1)):
            distance.plot(
                displaced(torch.tensor([p]), steps=12), color=LINES[number], marker="o", ms=2, label=f"p = {p:g}"
            )
        distance.set(ylim=(-3, 3), xlabel="step", title="distance from the anchor, penalty alone")
        distance.legend(fontsize=6.5, loc="lower left", ncols=2)
        ages = range(25)
        for number, p in enumerate((0.0, 0.05, 0.2, 1.6)):
            rates = [float(effective_learning_rate(0.1, p / 0.1, torch.ones(()), age)) for age in ages]
            memory.plot(ages, rates, color=LINES[number], marker="o", ms=2, label=f"p = {p:g}")
        memory.set(xlabel="iterations ago", title="effective learning rate of a gradient, lr 0.1")
        memory.legend(fontsize=6.5, loc="lower right", ncols=2)


def draw_limits(folder: Path) -> None:
    """Which (momentum, p) diverge when simulated, and the limit that `divergence_limit` gives."""
    momenta, ps = torch.linspace(0, 0.95, 20), torch.linspace(0.1, 5, 50)
    with figure("stability-limits", 1, folder=folder, height=2.8) as plane:
        for momentum in momenta.tolist():
            ends = displaced(ps, momentum, steps=400)[-1].abs()
            kinds = torch.where(~(ends <= 1), 1, torch.where(ps >= 1, 2, 0))
            colours = [LINES[kind] for kind in kinds.tolist()]
            plane.scatter([momentum] * len(ps), ps, c=colours, s=9)
        weight = nn.Parameter(torch.zeros(1))
        fine = torch.linspace(0, 0.95, 100).tolist()
        for nesterov, style in ((False, "-"), (True, "--")):
            limits = []
            for momentum in fine:
                sgd = torch.optim.SGD([weight], lr=0.1, momentum=momentum, nesterov=nesterov and momentum > 0)
                limits.append(divergence_limit(sgd, sgd.param_groups[0]))
            plane.plot(
                fine,
                limits,
                color=FAINT,
                ls=style,
                label="limit with Nesterov" if nesterov else "limit: 2 (1 + momentum)",
            )
        for colour, name in zip(
            (LINES[0], LINES[2], LINES[1]), ("interpolates", "overshoots, returns", "diverges"), strict=True
        ):
            plane.scatter([], [], c=colour, s=9, label=name)
        plane.set(
            xlabel="momentum of SGD",
            ylabel="p = lr * strength * importance",
            title="simulated: 400 steps of the penalty alone",
        )
        plane.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_spread(epochs: int, folder: Path) -> None:
    """The p of every weight of a network at the largest safe strength, and at one that holds the typical weight."""
    moor = trained(mooring.EWC(), epochs)
    scores = torch.cat([value.flatten() for value in moor.previous.values()])
    found = moor.diagnose(strength=1.0)
    strong = 0.01 / (0.03 * float(scores.median()))
    bins = torch.linspace(-8, 2, 70)
    with figure("stability-spread", 1, folder=folder, height=2.2) as panel:
        for number, (strength, name) in enumerate(
            ((found.safe_strength, "largest safe strength"), (strong, "median held by 1 % a step"))
        ):
            p = interpolation_weight(0.03, strength, scores).log10()
            share = float((p >= 0).float().mean())
            told = f"{name}, {strength:.1e}: median p {10 ** float(p.median()):.0e}, {100 * share:.1f} % beyond 1"
            panel.stairs(torch.histogram(p[p > -8], bins).hist, bins, color=LINES[number], label=told)
        panel.axvline(0, color=FAINT, lw=0.8, ls=":")
        panel.set(
            xlabel="power of ten of p; from 0 on a weight extrapolates",
            yticks=[],
            title="p of every weight after one task",
        )
        panel.legend(fontsize=6.5, loc="upper left", bbox_to_anchor=(0, -0.25), ncols=1)


if __name__ == "__main__":
    options = asked(__doc__)
    draw_time(options.folder)
    draw_limits(options.folder)
    draw_spread(options.epochs, options.folder)
