"""The effective learning rate: the unrolled form against the iterates, and the fraction of the rate in each layer."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from mooring.attachment import attach
from mooring.mooring import Mooring
from mooring.rules import Interpolation, Penalty, Pull, State
from mooring.rules.interpolation import relative_importance
from mooring.state.selection import layer_of
from mooring_lab.model.order import task_order
from mooring_lab.networks.initialization import BackboneWeights, initial_network
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.networks.multi_head import MultiHeadNetwork
from mooring_lab.report.picture import Drawing
from mooring_lab.report.style import LINES, WIDTH
from mooring_lab.streams.stream import Stream
from mooring_paper.context.paper_context import PaperContext, paper_setting
from mooring_paper.context.scale import Condition
from mooring_paper.context.target_result import ResultTable, TargetResult

STEPS = 16
"""Iterations of each of two tasks: enough to see a difference between the unrolled form and the iterates."""

QUANTILES = (0.25, 0.5, 0.75)
AT_SAFE_STRENGTH = ": at the safe strength, "
"""What the title of the second table has between the condition and the strength."""


@dataclass(frozen=True)
class UnrolledTask:
    """A task under a pull, trained and unrolled.

    Attributes:
        difference: for each layer, max |theta - unrolled| / max |theta - anchor| over its parameters.
        fraction_by_age: the fraction of the learning rate that remains for a gradient, by its age in iterations:
            quantiles over the parameters of each layer, of shape (steps, quantiles).
        mean_fraction: the same, averaged over all gradients of the task, of shape (quantiles,).
    """

    difference: dict[str, float]
    fraction_by_age: dict[str, Tensor]
    mean_fraction: dict[str, Tensor]


@dataclass(frozen=True)
class EffectiveRates:
    """Effective learning rates under a penalty and under the explicit step, on the first data set.

    Attributes:
        condition: network, regime and data set.
        lr: the learning rate.
        paper_strength: the paper's strength.
        safe_strength: the first strength at which a parameter would extrapolate.
        strength: the strength of the penalty.
        tasks: the unrolled task of each pull, the penalty first.
        fraction_at_safe_strength: as `UnrolledTask.mean_fraction`, for a penalty at the safe strength.
    """

    condition: Condition
    lr: float
    paper_strength: float
    safe_strength: float
    strength: float
    tasks: dict[str, UnrolledTask]
    fraction_at_safe_strength: dict[str, Tensor]


def run(context: PaperContext) -> TargetResult:
    """Test the paper's equation 4 for the penalty, and the same with R for the explicit step; EWC, in float64."""
    rates = measure(context)
    rows = [_row(name, layer, task) for name, task in rates.tasks.items() for layer in task.difference]
    title = f"{rates.condition}: fraction of the learning rate that remains after {STEPS} iterations"
    tables = [ResultTable(title, list(rows[0]), rows), _safe_strength_table(rates)]
    return TargetResult("effective-lr", _text(rates), tables, draw=partial(_draw, str(rates.condition), rates.tasks))


@lru_cache(maxsize=1)
def measure(context: PaperContext) -> EffectiveRates:
    """Unroll a task under the penalty, at the paper's strength or half of the safe one, and under the explicit step.

    Cached, because the claims read it too.
    """
    scale = context.scale
    condition = scale.first_conditions()[0]
    stream = context.main_stream(condition.data)
    setting = paper_setting(scale, condition, "ewc")
    paper_strength = setting.strength or 0.0
    weights = context.weights.get(context.backbones.get(condition.network, [""])[0])
    start = (condition, stream, setting.lr, weights, context.study.device)
    _, _, moor = _after_first_task(Interpolation(), *start)
    safe_strength = moor.diagnose(paper_strength).safe_strength
    strength = paper_strength if paper_strength < safe_strength else safe_strength / 2
    pulls: dict[str, Pull] = {f"penalty {strength:.4g}": Penalty(strength), "explicit": Interpolation()}
    tasks = {name: unroll(pull, *start) for name, pull in pulls.items()}
    _, _, moor = _after_first_task(Penalty(safe_strength), *start)
    rates = list(_penalty_rates(moor))
    total = {name: torch.stack([rate[name] for rate in rates]).sum(0) for name in rates[0]}
    at_safe_strength = _quantiles_by_layer(total, setting.lr * STEPS)
    return EffectiveRates(condition, setting.lr, paper_strength, safe_strength, strength, tasks, at_safe_strength)


def unroll(
    pull: Pull,
    condition: Condition,
    stream: Stream,
    lr: float,
    weights: BackboneWeights | None = None,
    device: str = "cpu",
) -> UnrolledTask:
    """Train the first batches of two tasks by gradient descent, and write the second as a sum of its gradients.

    theta = anchor - sum_j rate_j g_j over the n iterations of the second task. Under a penalty
    rate_j = lr (1 - lr strength previous)^(n - 1 - j); under the explicit step, which pulls after the optimizer's step,
    rate_j = lr prod_{m >= j} (1 - R_m).

    Args:
        pull: a `Penalty` or an `Interpolation`.
        condition: network and batch.
        stream: the stream whose first two tasks are trained.
        lr: the learning rate of gradient descent without momentum; momentum would change the form.
        weights: what the backbone starts from; random weights if None.
        device: where it is trained.
    """
    network, optimizer, moor = _after_first_task(pull, condition, stream, lr, weights, device)
    anchor = {name: value.clone() for name, value in moor.anchor.items()}
    gradients, retained = [], []
    for gradient in _train_steps(network, optimizer, stream, 1, condition.regime.batch):
        gradients.append({name: gradient[name] for name in anchor})
        if isinstance(pull, Interpolation):
            previous, current = moor.previous, moor.current
            retained.append({n: 1 - relative_importance(previous[n], current[n], pull.root) for n in anchor})
    rates = _explicit_rates(retained, lr) if isinstance(pull, Interpolation) else _penalty_rates(moor)
    unrolled = {name: value.clone() for name, value in anchor.items()}
    total = {name: torch.zeros_like(value) for name, value in anchor.items()}
    by_age = defaultdict[str, list[Tensor]](list)
    for gradient, rate in zip(reversed(gradients), rates, strict=True):  # the newest first
        for name in anchor:
            unrolled[name] -= rate[name] * gradient[name]
            total[name] += rate[name]
        for layer, quantiles in _quantiles_by_layer(rate, lr).items():
            by_age[layer].append(quantiles)
    moor.detach()
    theta = {name: value.detach() for name, value in network.named_parameters() if name in anchor}
    return UnrolledTask(
        _relative_difference(theta, unrolled, anchor),
        {layer: torch.stack(quantiles) for layer, quantiles in by_age.items()},
        _quantiles_by_layer(total, lr * STEPS),
    )


def _after_first_task(
    pull: Pull, condition: Condition, stream: Stream, lr: float, weights: BackboneWeights | None, device: str
) -> tuple[MultiHeadNetwork, torch.optim.Optimizer, Mooring]:
    """Return a moored network after its first task, in which no pull acts: it is the same for all pulls."""
    network = initial_network(condition.network, stream, 0, dtype=torch.float64, weights=weights).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    moor = attach(network, optimizer, importance="ewc", pull=pull, exclude=("heads.*",))
    for _ in _train_steps(network, optimizer, stream, 0, condition.regime.batch):
        pass
    moor.consolidate()
    return network, optimizer, moor


def _train_steps(
    network: MultiHeadNetwork, optimizer: torch.optim.Optimizer, stream: Stream, task: int, batch: int
) -> Iterator[dict[str, Tensor]]:
    """Train on the first images of a task by gradient descent, and yield the gradients after each step."""
    order = task_order(0, task, 0, stream.tasks[task].train)
    device = next(network.parameters()).device
    for step in range(STEPS):
        indices = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        images, labels = (part[indices].to(device) for part in (stream.train.images, stream.train.labels))
        with torch.backends.cudnn.flags(benchmark=False, deterministic=True):
            logits = network(normalize_pixels(images, torch.float64), stream.head(task))
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(logits, labels))
        gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        optimizer.step()
        yield gradients


def _penalty_rates(moor: Mooring) -> Iterator[State]:
    """Yield the effective learning rates by age, as the library reports them."""
    return (moor.effective_learning_rate(age) for age in range(STEPS))


def _explicit_rates(retained: Sequence[State], lr: float) -> Iterator[State]:
    """Yield by age: lr times the product of 1 - R over this interpolation and all later ones."""
    product = {name: torch.full_like(value, lr) for name, value in retained[-1].items()}
    for fractions in reversed(retained):
        product = {name: value * fractions[name] for name, value in product.items()}
        yield product


def _quantiles_by_layer(values: Mapping[str, Tensor], unit: float) -> dict[str, Tensor]:
    """Return quantiles over the parameters of each layer; `kthvalue`, because `quantile` refuses large tensors."""
    layers, quantiles = defaultdict[str, list[Tensor]](list), {}
    for name, value in values.items():
        layers[layer_of(name)].append(value.flatten() / unit)
    for layer, parts in layers.items():
        merged = torch.cat(parts)
        ranks = [1 + round(q * (len(merged) - 1)) for q in QUANTILES]
        quantiles[layer] = torch.stack([merged.kthvalue(rank).values for rank in ranks]).cpu()
    return quantiles


def _relative_difference(theta: State, unrolled: State, anchor: State) -> dict[str, float]:
    error, movement = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, value in theta.items():
        for largest, other in ((error, unrolled), (movement, anchor)):
            largest[layer_of(name)] = max(largest[layer_of(name)], float((value - other[name]).abs().max()))
    return {layer: value / (movement[layer] or 1.0) for layer, value in error.items()}


def _row(pull: str, layer: str, task: UnrolledTask) -> dict[str, Any]:
    return {
        "pull": pull,
        "layer": layer,
        "largest relative difference": f"{task.difference[layer]:.1e}",
        "left of the newest gradient's, median": float(task.fraction_by_age[layer][0, 1]),
        "left of the oldest's, median": float(task.fraction_by_age[layer][-1, 1]),
        **_mean_columns(task.mean_fraction[layer]),
    }


def _mean_columns(mean_fraction: Tensor) -> dict[str, float]:
    low, median, high = mean_fraction.tolist()
    return {"left in the mean, 25 %": low, "left in the mean, median": median, "left in the mean, 75 %": high}


def _safe_strength_table(rates: EffectiveRates) -> ResultTable:
    rows = [{"layer": layer, **_mean_columns(mean)} for layer, mean in rates.fraction_at_safe_strength.items()]
    return ResultTable(f"{rates.condition}{AT_SAFE_STRENGTH}{rates.safe_strength:.4g}", list(rows[0]), rows)


def _text(rates: EffectiveRates) -> list[str]:
    largest = {name: max(task.difference.values()) for name, task in rates.tasks.items()}
    differences = ", ".join(f"{value:.1e} ({name})" for name, value in largest.items())
    text = [
        f"The largest difference between the unrolled form and {STEPS} iterates in float64, relative to the largest "
        f"movement of the layer: {differences}."
    ]
    for name, task in rates.tasks.items():
        layers = list(task.mean_fraction)
        first, last = (float(task.mean_fraction[layer][1]) for layer in (layers[0], layers[-1]))
        text.append(
            f"Under {name}, the effective learning rate of the median parameter is on average {first:.3g} times the "
            f"learning rate {rates.lr:g} in the first layer, and {last:.3g} times in the last."
        )
    if rates.strength != rates.paper_strength:
        text.append(
            f"Strength {rates.paper_strength:g} would extrapolate after so short a first task; half of the safe "
            "strength was used."
        )
    return text


def _draw(condition: str, tasks: Mapping[str, UnrolledTask]) -> list[Drawing]:
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for panel, (name, task) in zip(panels, tasks.items(), strict=True):
        for index, (layer, quantiles) in enumerate(task.fraction_by_age.items()):
            low, median, high = quantiles.T.tolist()
            colour = LINES[index % len(LINES)]
            panel.fill_between(range(STEPS), low, high, color=colour, alpha=0.15, lw=0)
            panel.plot(range(STEPS), median, color=colour, label=layer)
        panel.set_title(name, loc="left")
        panel.set_xlabel("age of a gradient, iterations")
        panel.grid(axis="y")
    panels[0].set_ylabel("effective / learning rate")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", title="layer", alignment="left")
    return [
        Drawing(
            "age",
            f"The effective learning rate by the age of a gradient: {condition}",
            "The fraction of the learning rate that remains for a gradient after some iterations, under EWC's penalty "
            "and under the explicit step: the median over the parameters of a layer, and the quartiles.",
            f"Line charts: effective learning rate by age of the gradient and by layer, for {' and '.join(tasks)}.",
            figure,
        )
    ]
