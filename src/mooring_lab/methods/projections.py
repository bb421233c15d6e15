"""Methods that project: gradients away from past inputs (GPM, NSCL, OWM), weights into balls (TPGM, FTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooring_lab.methods.baselines import SAMPLES
from mooring_lab.methods.method import Method, decades
from mooring_lab.methods.strengths import DIGITS_STRENGTHS

if TYPE_CHECKING:
    from mooring.rules.pull import Number
    from mooring_lab.methods.projection import InputProjection, RadiusProjection

ENERGIES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


def _gpm(share: Number) -> InputProjection:
    from mooring_lab.methods.gpm import GPM

    return GPM(share)


def _nscl(ratio: Number) -> InputProjection:
    from mooring_lab.methods.nscl import NSCL

    return NSCL(ratio)


def _owm(alpha: Number) -> InputProjection:
    from mooring_lab.methods.owm import OWM

    return OWM(alpha)


def _tpgm(radius_lr: Number) -> RadiusProjection:
    from mooring_lab.methods.tpgm import TPGM

    return TPGM(radius_lr)


def _ftp(radius_lr: Number) -> RadiusProjection:
    from mooring_lab.methods.ftp import FTP

    return FTP(radius_lr)


METHODS = [
    Method(
        "gpm",
        "project gradients off the inputs of past tasks, but for a share (its strength) of their energy",
        strength=DIGITS_STRENGTHS["gpm"],
        projection=_gpm,
        dial=ENERGIES,
    ),
    Method(
        "nscl",
        "project gradients into the null space of past inputs, up to a ratio of eigenvalues (its strength)",
        strength=DIGITS_STRENGTHS["nscl"],
        projection=_nscl,
        dial=decades(0, 6),
    ),
    Method(
        "owm",
        "project gradients off past inputs that are large beside a constant (its strength) (OWM)",
        strength=DIGITS_STRENGTHS["owm"],
        projection=_owm,
        dial=decades(-5, 1),
    ),
    Method(
        "ftp",
        "project weights into balls whose radii are learned from gradients, at a rate (its strength)",
        strength=DIGITS_STRENGTHS["ftp"],
        projection=_ftp,
        dial=decades(-5, 0),
    ),
    Method(
        "tpgm",
        "project weights into balls whose radii are learned on old samples, at a rate (its strength)",
        strength=DIGITS_STRENGTHS["tpgm"],
        projection=_tpgm,
        data="validation",
        memory=SAMPLES,
        past_only=True,
        dial=decades(-5, 0),
    ),
]
