"""Methods that project: gradients away from past inputs (GPM, NSCL, OWM), weights into balls (TPGM, FTP)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mooring_lab.methods.strengths import DIGITS_STRENGTHS, SAMPLES
from mooring_lab.model.method import Method, ReplayOptions, decades

if TYPE_CHECKING:
    from mooring.rules.pull import Number
    from mooring_lab.methods.projections.projection import InputProjection, RadiusProjection

ENERGIES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
VALIDATED = "mooring_lab.methods.projections.weight_projection:ValidatedProjection"


@dataclass(frozen=True)
class ProjectionOptions(ReplayOptions):
    """A projection, as a function that makes it from a strength, one number or one per run."""

    projection: Callable[[Number], InputProjection | RadiusProjection] | None = None
    uses_strength = True

    def make(self, strength: Number) -> Any:
        """Return the projection with this strength."""
        assert self.projection is not None
        return self.projection(strength)

    def check_strength(self, strength: float) -> None:
        """Raise an error if the projection refuses a strength."""
        self.make(strength)


@dataclass(frozen=True)
class GradientProjectionOptions(ProjectionOptions):
    """An `InputProjection` of gradients before the optimizer's step."""

    plugin: str = "mooring_lab.methods.projections.gradient_projection:GradientProjection"


@dataclass(frozen=True)
class WeightProjectionOptions(ProjectionOptions):
    """A `RadiusProjection` of weights after the optimizer's step."""

    plugin: str = "mooring_lab.methods.projections.weight_projection:WeightProjection"


def _make(rule: str, strength: Number) -> InputProjection | RadiusProjection:
    module, _, name = rule.partition(":")
    projection = getattr(import_module(f"mooring_lab.methods.projections.{module}"), name)
    return projection(strength)  # type: ignore[no-any-return]


METHODS = [
    Method(
        "gpm",
        "project gradients off the inputs of past tasks, but for a share (its strength) of their energy",
        strength=DIGITS_STRENGTHS["gpm"],
        plugin=GradientProjectionOptions(projection=partial(_make, "gpm:GPM")),
        dial=ENERGIES,
        group="published",
    ),
    Method(
        "nscl",
        "project gradients into the null space of past inputs, up to a ratio of eigenvalues (its strength)",
        strength=DIGITS_STRENGTHS["nscl"],
        plugin=GradientProjectionOptions(projection=partial(_make, "nscl:NSCL")),
        dial=decades(0, 6),
        group="published",
    ),
    Method(
        "owm",
        "project gradients off past inputs that are large beside a constant (its strength) (OWM)",
        strength=DIGITS_STRENGTHS["owm"],
        plugin=GradientProjectionOptions(projection=partial(_make, "owm:OWM")),
        dial=decades(-5, 1),
        group="published",
    ),
    Method(
        "ftp",
        "project weights into balls whose radii are learned from gradients, at a rate (its strength)",
        strength=DIGITS_STRENGTHS["ftp"],
        plugin=WeightProjectionOptions(projection=partial(_make, "ftp:FTP")),
        dial=decades(-5, 0),
        group="published",
    ),
    Method(
        "tpgm",
        "project weights into balls whose radii are learned on old samples, at a rate (its strength)",
        strength=DIGITS_STRENGTHS["tpgm"],
        plugin=WeightProjectionOptions(VALIDATED, past_only=True, projection=partial(_make, "tpgm:TPGM")),
        memory=SAMPLES,
        dial=decades(-5, 0),
        group="published",
    ),
]
