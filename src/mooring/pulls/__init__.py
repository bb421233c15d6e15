"""Pulls: the rules that draw a moored parameter back to its anchor. One file per rule."""

from mooring.pulls.blend import Blend
from mooring.pulls.budget import Budget
from mooring.pulls.interpolation import Interpolation
from mooring.pulls.penalty import Penalty
from mooring.pulls.proximal import Proximal
from mooring.pulls.pull import GradientPull, ParameterPull

__all__ = ["Blend", "Budget", "GradientPull", "Interpolation", "ParameterPull", "Penalty", "Proximal", "Pull"]

Pull = GradientPull | ParameterPull | Budget
"""Before the step, after it, or after it and with all parameters together."""
