"""Mooring keeps a neural network moored to what it knows while it learns something new, without keeping old data."""

import sys

from mooring.attach import attach
from mooring.diagnose import drift as drift
from mooring.diagnose import stability as stability
from mooring.importance import EWC, MAS, SI, Balanced, RWalk, Uniform
from mooring.importance import Random as Random
from mooring.moor import Mooring
from mooring.pulls import Budget, Interpolation, Penalty, Proximal
from mooring.state.memory import Memory as Memory

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

for _module in (drift, stability):  # importable as mooring.drift and mooring.stability too
    sys.modules[f"mooring.{_module.__name__.rpartition('.')[2]}"] = _module

__version__ = "0.1.0"
