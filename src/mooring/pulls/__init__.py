"""Pulls: rules that move a parameter towards its anchor. One file per rule."""

from mooring.pulls.blend import Blend
from mooring.pulls.budget import Budget
from mooring.pulls.interpolation import Interpolation
from mooring.pulls.penalty import Penalty
from mooring.pulls.proximal import Proximal
from mooring.pulls.pull import GradientPull, ParameterPull

__all__ = ["Blend", "Budget", "GradientPull", "Interpolation", "ParameterPull", "Penalty", "Proximal", "Pull"]

Pull = GradientPull | ParameterPull | Budget
"""A pull that acts before the step, after it, or after it on all parameters together."""
