"""Why a penalty explodes, or why it does nothing: the stability of every layer as a table, with advice."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mooring import stability
from mooring.selection import layer_of
from mooring.stability import Verdicts

__all__ = ["Diagnosis", "LayerDiagnosis", "diagnose"]


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer's importance and what a penalty of the given strength does with it.

    Attributes:
        name: the module that owns the parameters.
        parameters: how many scalar parameters it has.
        mean: mean importance.
        largest: largest importance.
        share: its share of all importance, 0 to 1.
        largest_p: largest p = lr * strength * importance.
        verdicts: how many parameters interpolate, extrapolate or diverge.
        safe_strength: the first strength at which one of its parameters would stop interpolating.
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
    """What `Mooring.diagnose` found: print it, or take `to_dict()`.

    Attributes:
        strength: the penalty's strength that was asked about.
        optimizer: the optimizer's class name.
        limit: the p from which this optimizer diverges (the smallest over parameter groups).
        clamp: whether the penalty caps importance, so that nothing beyond 1 is used.
        layers: one row per layer, in the model's order.
        safe_strength: 1 / max(lr * importance) over the model.
        disparity: mean importance of the last layer over that of the first.
        notes: what to know when reading the numbers.
        advice: what to do, in words.
    """

    strength: float
    optimizer: str
    limit: float
    clamp: bool
    layers: tuple[LayerDiagnosis, ...]
    safe_strength: float
    disparity: float
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def stable(self) -> bool:
        """Whether every parameter interpolates or is free, as it is or through clamping."""
        total = self.total
        return not total.negative and (self.clamp or not (total.extrapolate or total.diverge))

    @property
    def total(self) -> Verdicts:
        """The verdicts added up over the layers."""
        rows = [asdict(layer.verdicts) for layer in self.layers]
        return Verdicts(**{key: sum(row[key] for row in rows) for key in Verdicts.__dataclass_fields__})

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings and lists."""
        return {**asdict(self), "stable": self.stable, "total": asdict(self.total)}

    def __str__(self) -> str:
        head = (
            "layer",
            "params",
            "mean",
            "max",
            "share",
            "max p",
            "interp.",
            "extrap.",
            "diverge",
            "safe strength",
        )
        rows = [
            (
                layer.name,
                f"{layer.parameters:,}",
                f"{layer.mean:.2e}",
                f"{layer.largest:.2e}",
                f"{layer.share:.1%}",
                f"{layer.largest_p:.3g}",
                f"{layer.verdicts.interpolate:,}",
                f"{layer.verdicts.extrapolate:,}",
                f"{layer.verdicts.diverge:,}",
                f"{layer.safe_strength:.3g}",
            )
            for layer in self.layers
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = [
            f"strength {self.strength:g} with {self.optimizer}: p = lr * strength * importance interpolates in (0, 1), "
            f"diverges from {self.limit:.3g}"
        ]
        for row in [head, *rows]:
            cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        lines.append(
            f"largest safe strength {self.safe_strength:.3g}; last layer's mean importance over the first's "
            f"{self.disparity:.2g}"
        )
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"advice: {advice}" for advice in self.advice]
        return "\n".join(lines)


def diagnose(
    optimizer: torch.optim.Optimizer,
    moored: Mapping[Tensor, tuple[str, Tensor]],
    strength: float,
    *,
    clamp: bool = False,
    importance: str = "",
) -> Diagnosis:
    """Set every parameter's p = lr * strength * importance against the optimizer's limits.

    Args:
        optimizer: whose learning rates and momentum decide.
        moored: name and importance of each parameter.
        strength: the penalty's strength.
        clamp: whether the penalty caps importance.
        importance: the definition's name, for the advice.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> sgd = torch.optim.SGD([weight], lr=0.5)
        >>> found = diagnose(sgd, {weight: ("layer.weight", torch.tensor([1.0, 2.0, 4.0]))}, strength=5.0)
        >>> found.safe_strength, found.stable, found.total.diverge
        (0.5, False, 3)
    """
    rates = stability.learning_rates(optimizer)
    limits = {p: stability.divergence_limit(optimizer, g) for g in optimizer.param_groups for p in g["params"]}
    layers: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    for parameter, (name, scores) in moored.items():
        if parameter in rates:
            rate = torch.as_tensor(rates[parameter], dtype=scores.dtype, device=scores.device)
            p = stability.interpolation_weight(rate.expand_as(scores).reshape(-1), strength, scores.reshape(-1))
            layers.setdefault(layer_of(name), []).append((scores.reshape(-1), p, limits[parameter]))
    everything = sum(float(s.abs().sum(dtype=torch.float64)) for parts in layers.values() for s, _, _ in parts)
    rows = tuple(_layer(name, parts, strength, everything) for name, parts in layers.items())
    means = [row.mean for row in rows]
    disparity = means[-1] / means[0] if means and means[0] else float("nan")
    notes = []
    kind = type(optimizer).__name__
    if stability.rescales(optimizer):
        notes.append(
            f"{kind} rescales the learning rate per parameter; p uses the momentary lr / (sqrt(v) + eps), "
            "which moves as training goes on"
        )
    elif not isinstance(optimizer, torch.optim.SGD):
        notes.append(f"the limits are those of gradient descent; {kind} may rescale its steps")
    if clamp:
        notes.append("clamp=True caps every p at 1: what reads beyond it is held at its anchor, not extrapolated")
    safe = min((row.safe_strength for row in rows), default=float("inf"))
    found = Diagnosis(
        strength=strength,
        optimizer=type(optimizer).__name__,
        limit=min((limit for parts in layers.values() for _, _, limit in parts), default=2.0),
        clamp=clamp,
        layers=rows,
        safe_strength=safe,
        disparity=disparity,
        notes=tuple(notes),
        advice=(),
    )
    return Diagnosis(**{**found.__dict__, "advice": tuple(_advice(found, importance))})


def _layer(name: str, parts: list[tuple[Tensor, Tensor, float]], strength: float, everything: float) -> LayerDiagnosis:
    size = sum(s.numel() for s, _, _ in parts)
    total = sum(float(s.sum(dtype=torch.float64)) for s, _, _ in parts)
    absolute = sum(float(s.abs().sum(dtype=torch.float64)) for s, _, _ in parts)
    counted = [asdict(stability.verdicts(p, limit)) for _, p, limit in parts]
    largest_p = max(float(p.max()) for _, p, _ in parts)
    return LayerDiagnosis(
        name=name,
        parameters=size,
        mean=total / size,
        largest=max(float(s.max()) for s, _, _ in parts),
        share=absolute / everything if everything else 0.0,
        largest_p=largest_p,
        verdicts=Verdicts(**{key: sum(c[key] for c in counted) for key in Verdicts.__dataclass_fields__}),
        safe_strength=strength / largest_p if largest_p > 0 else float("inf"),
    )


def _advice(found: Diagnosis, importance: str) -> list[str]:
    """What to do, most urgent first."""
    total = found.total
    size = sum(layer.parameters for layer in found.layers)
    beyond = total.diverge - total.negative + total.extrapolate
    strength, safe = found.strength, found.safe_strength
    advice = []
    if total.negative:
        advice.append(
            f"{total.negative:,} of {size:,} parameters have negative importance and are pushed away from their "
            "anchors: use SI(sign='rectified'), or Interpolation(), which ignores negative scores"
        )
    if beyond and not found.clamp:
        worst = max(found.layers, key=lambda layer: layer.largest_p)
        advice.append(
            f"{beyond:,} of {size:,} parameters extrapolate ({total.diverge - total.negative:,} diverge), worst in "
            f"{worst.name!r}: lower the strength below {safe:.3g}, or use Penalty({strength:g}, clamp=True), "
            f"Proximal({strength:g}), or Interpolation(), which has no strength"
        )
    elif beyond:
        advice.append(
            f"{beyond:,} of {size:,} parameters are clamped, that is frozen at their anchors: "
            "a lower strength frees them"
        )
    elif not total.negative and safe < float("inf"):
        room = safe / strength if strength else float("inf")
        advice.append(
            f"every parameter interpolates; the strength could grow {room:.3g}-fold, to {safe:.3g}, "
            "before the first one extrapolates"
        )
    if found.disparity < 0.1 and not importance.startswith("Balanced"):
        advice.append(
            f"the last layer's mean importance is {found.disparity:.2g} of the first's, so deep layers are hardly "
            f"held: use Balanced({importance}(...)) or Interpolation()"
        )
    if safe == float("inf") and not total.negative:
        advice.append("no parameter has any importance, so nothing is held: was a task trained before consolidate()?")
    return advice
