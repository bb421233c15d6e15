"""A table of the stability of each layer under a penalty, with advice."""

import math
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mooring.curvature.product_factors import ProductFactors
from mooring.diagnose import stability
from mooring.diagnose.coverage import Coverage
from mooring.diagnose.stability import Verdicts
from mooring.distributed.dtensor import reduce_over_shards
from mooring.rules import GradientPull, Pull
from mooring.rules.pull import Number
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import ParameterState
from mooring.state.selection import layer_of

MAX_CLAMPED_P = 1 + 1e-6
"""The largest p of a clamped importance: 1, and room for rounding."""

HEAD = ("layer", "params", "mean", "max", "share", "max p", "interp.", "extrap.", "diverge", "safe strength")
ROW = (
    "{0.name}\t{0.parameters:,}\t{0.mean:.2e}\t{0.largest:.2e}\t{0.share:.1%}\t{0.largest_p:.3g}\t"
    "{0.verdicts.interpolate:,}\t{0.verdicts.extrapolate:,}\t{0.verdicts.diverge:,}\t{0.safe_strength:.3g}"
)
"""The cells of a `LayerDiagnosis` under `HEAD`."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """The importance of one layer, and the effect of a penalty of the given strength on it.

    Attributes:
        name: the module that owns the parameters.
        parameters: the number of scalar parameters.
        mean: mean importance.
        largest: largest importance.
        share: its share of the model's importance, 0 to 1.
        largest_p: largest p = lr * strength * importance.
        verdicts: the numbers of parameters that interpolate, extrapolate or diverge.
        safe_strength: the smallest strength at which one of its parameters stops interpolating.
    """

    name: str
    parameters: int
    mean: float
    largest: float
    share: float
    largest_p: float
    verdicts: Verdicts
    safe_strength: float


@dataclass(frozen=True)
class Diagnosis:
    """The result of `Mooring.diagnose`: print it, or use `to_dict()`.

    Attributes:
        strength: the strength of the penalty.
        optimizer: the optimizer's class name.
        limit: the p from which this optimizer diverges; the smallest over parameter groups.
        clamp: whether the penalty caps importance at 1 / (lr * strength).
        layers: one row per layer, in the model's order.
        safe_strength: 1 / max(lr * importance) over the model.
        used_p: the largest p after clamping.
        disparity: mean importance of the last layer over that of the first.
        notes: remarks on how to read the numbers.
        advice: what to do, the most urgent first.
        coverage: which parameters are held.
    """

    strength: float
    optimizer: str
    limit: float
    clamp: bool
    layers: tuple[LayerDiagnosis, ...]
    safe_strength: float
    used_p: float
    disparity: float
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    coverage: Coverage | None = None

    @property
    def stable(self) -> bool:
        """Whether every parameter interpolates or is free, if need be through clamping."""
        return not self.total.negative and (self.used_p < 1 or self.held)

    @property
    def held(self) -> bool:
        """Whether clamping keeps every p at 1 or below: parameters stay at their anchors and do not extrapolate."""
        return self.clamp and self.used_p <= MAX_CLAMPED_P

    @property
    def total(self) -> Verdicts:
        """The sum of the layers' verdicts."""
        counts = zip(*(astuple(layer.verdicts) for layer in self.layers), strict=True)
        return Verdicts(*map(sum, counts))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings and lists that JSON knows; infinite and undefined numbers are None."""
        coverage = None if self.coverage is None else self.coverage.to_dict()
        return dict(_plain({**asdict(self), "stable": self.stable, "total": asdict(self.total), "coverage": coverage}))

    def __str__(self) -> str:
        rows = [HEAD, *(ROW.format(layer).split("\t") for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        limits = f"p = lr * strength * importance interpolates in (0, 1), diverges from {self.limit:.3g}"
        disparity = f"last layer's mean importance over the first's {self.disparity:.2g}"
        lines = [
            f"strength {self.strength:g} with {self.optimizer}: {limits}",
            *("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows),
            f"largest safe strength {self.safe_strength:.3g}; {disparity}",
            *([f"coverage: {self.coverage.summary}"] if self.coverage else []),
            *(f"note: {note}" for note in self.notes),
            *(f"advice: {advice}" for advice in self.advice),
        ]
        return "\n".join(lines)


def diagnose_states(states: MooringState, pull: Pull, strength: float) -> Diagnosis:
    """Compare each parameter's p = lr * strength * importance with the optimizer's limits.

    Of a layer with Kronecker factors the importance is their diagonal. Of a sharded parameter each rank reads its part,
    and the result covers all parts.

    Args:
        states: the states of the moored parameters; the learning rates and momentum of the optimizer set the limits.
        pull: the pull in use. One that acts after the step cannot extrapolate, and a note says so.
        strength: the penalty's strength.
    """
    optimizer, clamp = states.optimizer, bool(getattr(pull, "clamp", False))
    rates = stability.learning_rates(optimizer)
    moored = {
        p: (layer_of(name), _scores(states.records[p])) for p, name in states.names.items() if p in states.records
    }
    groups = {p: group for group in optimizer.param_groups for p in group["params"] if p in moored and p.numel()}
    limits = {p: stability.divergence_limit(optimizer, group) for p, group in groups.items()}
    numbers = [_numbers(moored[p][1].reshape(-1), rates[p], limits[p], groups[p], strength, clamp) for p in groups]
    sums = reduce_over_shards([sums for sums, _ in numbers], list(groups))
    maxima = reduce_over_shards([maxima for _, maxima in numbers], list(groups), "max")
    layers: dict[str, list[tuple[int, list[float], list[float]]]] = {layer: [] for layer, _ in moored.values()}
    for p, summed, largest in zip(groups, sums, maxima, strict=True):
        layers[moored[p][0]].append((p.numel(), summed.tolist(), largest.tolist()))
    total_importance = sum(summed[1] for parts in layers.values() for _, summed, _ in parts)
    rows = tuple(_layer(name, parts, total_importance) for name, parts in layers.items() if parts)
    diagnosis = Diagnosis(
        strength=strength,
        optimizer=type(optimizer).__name__,
        limit=min(limits.values(), default=2.0),
        clamp=clamp,
        layers=rows,
        safe_strength=min((row.safe_strength for row in rows), default=float("inf")),
        used_p=max((float(largest[2]) for largest in maxima), default=0.0),
        disparity=rows[-1].mean / rows[0].mean if rows and rows[0].mean else float("nan"),
    )
    notes = _notes(diagnosis, optimizer, "" if isinstance(pull, GradientPull) else type(pull).__name__)
    return replace(diagnosis, notes=tuple(notes), advice=tuple(_advice(diagnosis, states.importance.name)))


def _scores(state: ParameterState) -> Tensor:
    """Return the importance of each weight over past tasks."""
    if state.is_product_input:
        assert state.held_with is not None
        assert isinstance(state.held_with.factors, ProductFactors)
        return state.held_with.factors.past_diagonal_of_a()
    return state.full(state.previous) if state.factors is None else state.factors.past_diagonal(state.theta)


def _numbers(
    scores: Tensor, rate: Number, limit: float, group: dict[str, Any], strength: float, clamp: bool
) -> tuple[Tensor, Tensor]:
    """Return the numbers to sum over the shards of a parameter, and those to take the maximum of."""
    rates = torch.as_tensor(rate, dtype=scores.dtype, device=scores.device).reshape(-1).expand_as(scores)
    cap = float(group.get("lr", 1.0)) * strength
    capped = scores.clamp(max=1 / cap) if clamp and cap else scores
    p, used = (stability.interpolation_weight(rates, strength, t) for t in (scores, capped))
    totals = [float(t.sum(dtype=torch.float64)) for t in (scores, scores.abs())]
    sums = [*totals, *astuple(stability.verdicts(p, limit))]
    maxima = [float(t.max()) if t.numel() else -math.inf for t in (scores, p, used)]
    maxima.append(-stability.largest_safe_strength(rates, scores))
    return scores.new_tensor(sums, dtype=torch.float64), scores.new_tensor(maxima, dtype=torch.float64)


def _layer(name: str, parts: list[tuple[int, list[float], list[float]]], total_importance: float) -> LayerDiagnosis:
    """Combine the sizes, sums and maxima of the parameters of a layer."""
    sizes, sums, maxima = zip(*parts, strict=True)
    total, absolute, *counts = map(sum, zip(*sums, strict=True))
    largest, largest_p, _, negated_safe_strength = map(max, zip(*maxima, strict=True))
    mean, share = total / sum(sizes), absolute / total_importance if total_importance else 0.0
    verdicts, safe_strength = Verdicts(*map(int, counts)), -negated_safe_strength
    return LayerDiagnosis(name, sum(sizes), mean, largest, share, largest_p, verdicts, safe_strength)


def _plain(value: Any) -> Any:
    """Replace tuples by lists, and numbers that are not finite by None."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _notes(diagnosis: Diagnosis, optimizer: torch.optim.Optimizer, harmless: str) -> list[str]:
    """Return the notes; `harmless` is the name of the pull in use if it cannot extrapolate."""
    notes, kind = [], diagnosis.optimizer
    rescales = f"{kind} rescales the learning rate per parameter"
    if stability.rescales(optimizer):
        notes.append(f"{rescales}; p uses the momentary lr / (sqrt(v) + eps), which moves as training goes on")
    elif isinstance(optimizer, (*stability.ADAMS, torch.optim.RMSprop)):
        notes.append(f"{rescales} once it has stepped; p uses the plain one so far")
    elif not isinstance(optimizer, torch.optim.SGD):
        notes.append(f"the limits are those of gradient descent; {kind} may rescale its steps")
    if diagnosis.held:
        notes.append("clamp=True caps importance at 1 / (lr * strength): what reads beyond p = 1 is held at its anchor")
    elif diagnosis.clamp:
        p = f"{diagnosis.used_p:.3g}"
        notes.append(f"clamp=True caps importance by the plain learning rate, so {kind} still reaches p = {p}")
    if harmless:
        notes.append(f"{harmless} does not extrapolate; this is what a Penalty of that strength would do")
    return notes


def _advice(diagnosis: Diagnosis, importance: str) -> list[str]:
    """Return what to do, the most urgent first."""
    total, strength, safe = diagnosis.total, diagnosis.strength, diagnosis.safe_strength
    of = f"of {sum(layer.parameters for layer in diagnosis.layers):,} parameters"
    beyond, advice = total.diverge - total.negative + total.extrapolate, []
    if total.negative:
        advice.append(
            f"{total.negative:,} {of} have negative importance and are pushed away from their anchors: use "
            "SI(sign='rectified'), or Interpolation(), which ignores negative scores"
        )
    if beyond and not diagnosis.held:
        clamped = "" if diagnosis.clamp else f"Penalty({strength:g}, clamp=True), "
        worst = max(diagnosis.layers, key=lambda layer: layer.largest_p)
        advice.append(
            f"{beyond:,} {of} extrapolate ({total.diverge - total.negative:,} diverge), worst in "
            f"{worst.name!r}: lower the strength below {safe:.3g}, or use {clamped}"
            f"Proximal({strength:g}), or Interpolation(), which has no strength"
        )
    elif beyond:
        advice.append(f"{beyond:,} {of} are clamped, that is frozen at their anchors: a lower strength frees them")
    elif not total.negative and safe < float("inf"):
        room = safe / strength if strength else float("inf")
        grow = f"the strength could grow {room:.3g}-fold, to {safe:.3g}"
        advice.append(f"every parameter interpolates; {grow}, before the first one extrapolates")
    if diagnosis.disparity < 0.1 and not importance.startswith("Balanced"):
        advice.append(
            f"the last layer's mean importance is {diagnosis.disparity:.2g} of the first's, so deep layers are hardly "
            f"held: use Balanced({importance}(...)) or Interpolation()"
        )
    if safe == float("inf") and not total.negative:
        advice.append("no parameter has any importance, so nothing is held: was a task trained before consolidate()?")
    return advice
