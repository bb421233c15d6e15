"""Pulls: the rules that draw a moored parameter back to its anchor. One file per rule."""

from mooring.pulls.base import GradientPull, ParameterPull, Pull
from mooring.pulls.interpolation import Interpolation
from mooring.pulls.penalty import Penalty
from mooring.pulls.proximal import Proximal

__all__ = ["GradientPull", "Interpolation", "ParameterPull", "Penalty", "Proximal", "Pull"]
