"""Mooring keeps a neural network moored to what it knows while it learns something new, without keeping old data."""

from mooring import drift as drift
from mooring import stability as stability
from mooring.attach import attach
from mooring.importance import EWC, MAS, SI, Balanced, RWalk, Uniform
from mooring.importance import Random as Random
from mooring.memory import Memory as Memory
from mooring.moor import Mooring
from mooring.pulls import Budget, Interpolation, Penalty, Proximal

__all__ = [
    "EWC",
    "MAS",
    "SI",
    "Balanced",
    "Budget",
    "Interpolation",
    "Mooring",
    "Penalty",
    "Proximal",
    "RWalk",
    "Uniform",
    "attach",
]

__version__ = "0.1.0"
