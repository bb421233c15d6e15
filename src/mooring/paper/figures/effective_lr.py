"""The effective learning rate: the unrolled form beside the iterates, and what is left of the rate in each layer."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mooring.attach import attach
from mooring.importance import State
from mooring.lab.model.order import task_order
from mooring.lab.networks.initialization import BackboneWeights, initial_network
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.networks.multi_head import MultiHeadNetwork
from mooring.lab.streams.stream import Stream
from mooring.moor import Mooring
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import Case, Scale
from mooring.paper.context.seed_rows import first_cases
from mooring.paper.figures.importance_by_layer import setting
from mooring.pulls import Interpolation, Penalty, Pull
from mooring.pulls.interpolation import relative_importance
from mooring.state.selection import layer_of

if TYPE_CHECKING:
    from mooring.report.picture import Drawing

__all__ = ["Measured", "Unrolled", "count", "measure", "run", "unroll"]

STEPS = 16
"""Iterations of each of two tasks: enough for the form to differ from the iterates, if it did."""

QUANTILES = (0.25, 0.5, 0.75)

After = tuple[dict[str, Any], State]
"""The states of a network and of its mooring."""


@dataclass(frozen=True)
class Unrolled:
    """One task under a pull, trained and unrolled.

    Attributes:
        difference: |theta - unrolled| / |theta - anchor|, the largest over parameters of each layer over the largest
            movement there.
        left: what is left of the learning rate for a gradient, by its age in iterations: quantiles over the
            parameters of each layer, of shape (steps, quantiles).
        mean: the same for the mean over all gradients of the task, of shape (quantiles,).
    """

    difference: dict[str, float]
    left: dict[str, Tensor]
    mean: dict[str, Tensor]


@dataclass(frozen=True)
class Measured:
    """Both pulls on the first data set.

    Attributes:
        case: network, regime and data set.
        lr: the learning rate.
        asked: the paper's strength.
        safe: the first at which a parameter would extrapolate.
        strength: the penalty's.
        pulls: by name, the penalty first.
        at_safe: what a penalty at the safe strength leaves of the rate in the mean, as in `Unrolled`.
    """

    case: Case
    lr: float
    asked: float
    safe: float
    strength: float
    pulls: dict[str, Unrolled]
    at_safe: dict[str, Tensor]


def count(scale: Scale) -> int:
    """None is kept: two tasks of a few iterations are trained on the spot."""
    return 0


def run(lab: Laboratory) -> Finding:
    """The paper's equation 4 for the penalty, and the same with R for the explicit step; EWC, in float64."""
    found = measure(lab)
    rows = [_row(name, layer, each) for name, each in found.pulls.items() for layer in each.difference]
    table = Table(f"{found.case}: what is left of the learning rate after {STEPS} iterations", list(rows[0]), rows)
    text = _said(found.pulls, found.lr)
    if found.strength != found.asked:
        text.append(
            f"Strength {found.asked:g} would extrapolate after so short a first task: half of the safe one was taken."
        )
    return Finding("effective-lr", text, [table], draw=partial(_draw, str(found.case), found.pulls))


@lru_cache(maxsize=1)
def measure(lab: Laboratory) -> Measured:
    """Unroll a task under the penalty, at the paper's strength or half of the safe one, and under the explicit step.

    Kept for the claims, which ask once more.
    """
    scale = lab.scale
    case = first_cases(scale)[0]
    stream = lab.trained(case.data)
    told = setting(scale, case, "ewc", "ewc")
    asked = told.strength or 0.0
    how: dict[str, Any] = {
        "weights": lab.weights.get(lab.starts.get(case.network, [""])[0]),
        "device": lab.study.device,
    }
    network, _, moor = _moored(case, stream, Interpolation(), told.lr, **how)
    safe = moor.diagnose(asked).safe_strength
    how["after"] = (network.state_dict(), moor.state_dict())  # without a past no pull acts: the first task is the same
    strength = asked if asked < safe else safe / 2
    pulls: dict[str, Pull] = {f"penalty {strength:.4g}": Penalty(strength), "explicit": Interpolation()}
    found = {name: unroll(case, stream, pull, told.lr, **how) for name, pull in pulls.items()}
    _, _, moor = _moored(case, stream, Penalty(safe), told.lr, **how)
    rates = list(_rates_of_penalty(moor))
    total = {name: torch.stack([rate[name] for rate in rates]).sum(0) for name in rates[0]}
    return Measured(case, told.lr, asked, safe, strength, found, _spread(total, told.lr * STEPS))


def unroll(
    case: Case,
    stream: Stream,
    pull: Pull,
    lr: float,
    *,
    weights: BackboneWeights | None = None,
    device: str = "cpu",
    after: After | None = None,
) -> Unrolled:
    """Train the first batches of two tasks by gradient descent, and write the second as a sum of its gradients.

    theta = anchor - sum_j rate_j g_j over the n iterations of the second task. Under a penalty
    rate_j = lr (1 - lr strength previous)^(n - 1 - j); under the explicit step, which pulls after it steps,
    rate_j = lr prod_{m >= j} (1 - R_m).

    Args:
        case: network and batch.
        stream: whose first two tasks are trained.
        pull: a `Penalty` or an `Interpolation`.
        lr: of gradient descent; with momentum the form would be another.
        weights: what the backbone starts from instead of random numbers.
        device: where to compute.
        after: the network and its mooring after the first task, where that was trained already.
    """
    network, optimizer, moor = _moored(case, stream, pull, lr, weights, device, after)
    anchor = {name: value.clone() for name, value in moor.anchor.items()}
    gradients, kept = [], []
    for g in _steps(network, optimizer, stream, 1, case.regime.batch):
        gradients.append({name: g[name] for name in anchor})
        if isinstance(pull, Interpolation):
            previous, current = moor.previous, moor.current
            kept.append({name: 1 - relative_importance(previous[name], current[name], pull.root) for name in anchor})
    rates = _rates_of_explicit(kept, lr) if isinstance(pull, Interpolation) else _rates_of_penalty(moor)
    unrolled = {name: value.clone() for name, value in anchor.items()}
    total = {name: torch.zeros_like(value) for name, value in anchor.items()}
    left: dict[str, list[Tensor]] = {}
    for g, rate in zip(reversed(gradients), rates, strict=True):  # the newest first
        for name in anchor:
            unrolled[name] -= rate[name] * g[name]
            total[name] += rate[name]
        for layer, spread in _spread(rate, lr).items():
            left.setdefault(layer, []).append(spread)
    moor.detach()
    theta = {name: value.detach() for name, value in network.named_parameters() if name in anchor}
    return Unrolled(
        _difference(theta, unrolled, anchor),
        {layer: torch.stack(spreads) for layer, spreads in left.items()},
        _spread(total, lr * STEPS),
    )


def _moored(
    case: Case,
    stream: Stream,
    pull: Pull,
    lr: float,
    weights: BackboneWeights | None,
    device: str,
    after: After | None = None,
) -> tuple[MultiHeadNetwork, torch.optim.Optimizer, Mooring]:
    """A network after its first task."""
    network = initial_network(case.network, stream, 0, dtype=torch.float64, weights=weights).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    moor = attach(network, optimizer, importance="ewc", pull=pull, exclude=("heads.*",))
    if after is not None:
        network.load_state_dict(after[0])
        with warnings.catch_warnings():  # nothing is pulled in a first task, so any pull may have seen it
            warnings.filterwarnings("ignore", "the state was made with")
            moor.load_state_dict({name: value.clone() for name, value in after[1].items()})
        return network, optimizer, moor
    for _ in _steps(network, optimizer, stream, 0, case.regime.batch):
        pass
    moor.consolidate()
    return network, optimizer, moor


def _steps(
    network: MultiHeadNetwork, optimizer: torch.optim.Optimizer, stream: Stream, task: int, batch: int
) -> Iterator[dict[str, Tensor]]:
    """Gradient descent on the first images of a task; the gradients after each step."""
    order = task_order(0, task, 0, stream.tasks[task].train)
    device = next(network.parameters()).device
    for step in range(STEPS):
        chosen = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        images, labels = (part[chosen].to(device) for part in (stream.train.images, stream.train.labels))
        with torch.backends.cudnn.flags(benchmark=False, deterministic=True):
            logits = network(normalize_pixels(images, torch.float64), stream.head(task))
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(logits, labels))
        found = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        optimizer.step()
        yield found


def _rates_of_penalty(moor: Mooring) -> Iterator[State]:
    """By age: what the library says of itself."""
    return (moor.effective_learning_rate(age) for age in range(STEPS))


def _rates_of_explicit(kept: Sequence[State], lr: float) -> Iterator[State]:
    """By age: lr times what each later interpolation, and its own, left of it."""
    product = {name: torch.full_like(value, lr) for name, value in kept[-1].items()}
    for each in reversed(kept):
        product = {name: value * each[name] for name, value in product.items()}
        yield product


def _spread(values: Mapping[str, Tensor], unit: float) -> dict[str, Tensor]:
    """Quantiles over the parameters of each layer; one by one, since `quantile` refuses large samples."""
    layers: dict[str, list[Tensor]] = {}
    for name, value in values.items():
        layers.setdefault(layer_of(name), []).append(value.flatten() / unit)
    found = {}
    for layer, parts in layers.items():
        every = torch.cat(parts)
        found[layer] = torch.stack([every.kthvalue(1 + round(q * (len(every) - 1))).values for q in QUANTILES]).cpu()
    return found


def _difference(theta: State, unrolled: State, anchor: State) -> dict[str, float]:
    off: dict[str, float] = {}
    moved: dict[str, float] = {}
    for name, value in theta.items():
        layer = layer_of(name)
        off[layer] = max(off.get(layer, 0.0), float((value - unrolled[name]).abs().max()))
        moved[layer] = max(moved.get(layer, 0.0), float((value - anchor[name]).abs().max()))
    return {layer: off[layer] / moved[layer] if moved[layer] else off[layer] for layer in off}


def _row(pull: str, layer: str, found: Unrolled) -> dict[str, Any]:
    low, median, high = found.mean[layer].tolist()
    return {
        "pull": pull,
        "layer": layer,
        "largest relative difference": f"{found.difference[layer]:.1e}",
        "left of the newest gradient's, median": float(found.left[layer][0, 1]),
        "left of the oldest's, median": float(found.left[layer][-1, 1]),
        "left in the mean, 25 %": low,
        "left in the mean, median": median,
        "left in the mean, 75 %": high,
    }


def _said(found: Mapping[str, Unrolled], lr: float) -> list[str]:
    worst = {name: max(each.difference.values()) for name, each in found.items()}
    told = ", ".join(f"{value:.1e} ({name})" for name, value in worst.items())
    text = [
        f"The unrolled form and {STEPS} iterates in float64 differ by no more than this share of how far a layer's "
        f"parameters moved: {told}."
    ]
    for name, each in found.items():
        layers = list(each.mean)
        first, last = (float(each.mean[layer][1]) for layer in (layers[0], layers[-1]))
        text.append(
            f"Under {name} a gradient counts in the mean at {first:.3g} of the learning rate {lr:g} for the median "
            f"parameter of the first layer, at {last:.3g} in the last."
        )
    return text


def _draw(case: str, found: Mapping[str, Unrolled]) -> list["Drawing"]:
    from matplotlib.figure import Figure  # slow to import

    from mooring.report.picture import Drawing
    from mooring.report.style import LINES, WIDTH

    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for panel, (name, each) in zip(panels, found.items(), strict=True):
        for number, (layer, spread) in enumerate(each.left.items()):
            low, median, high = spread.T.tolist()
            colour = LINES[number % len(LINES)]
            panel.fill_between(range(STEPS), low, high, color=colour, alpha=0.15, lw=0)
            panel.plot(range(STEPS), median, color=colour, label=layer)
        panel.set_title(name, loc="left")
        panel.set_xlabel("age of a gradient, iterations")
        panel.grid(axis="y")
    panels[0].set_ylabel("effective / learning rate")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", title="layer", alignment="left")
    return [
        Drawing(
            "age",
            f"The effective learning rate by the age of a gradient: {case}",
            "What is left of the learning rate for a gradient so many iterations later, under EWC's penalty and under "
            "the explicit step: the median over a layer's parameters, and the half of them around it.",
            f"Line charts: effective learning rate by age of the gradient and by layer, for {' and '.join(found)}.",
            figure,
        )
    ]
