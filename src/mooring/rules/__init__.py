"""Importances, pulls and merges: one rule per file, written as functions of tensors.

An importance scores how much each parameter matters to a task. A pull moves a parameter towards its anchor. A merge
combines the importance of a finished task with that of the tasks before.
"""

from mooring.rules.balanced import Balanced
from mooring.rules.blend import Blend
from mooring.rules.budget import Budget
from mooring.rules.ewc import EWC
from mooring.rules.importance import Importance, Iteration, State
from mooring.rules.importance_names import IMPORTANCES, resolve
from mooring.rules.interpolation import Interpolation
from mooring.rules.kronecker import Kronecker
from mooring.rules.mas import MAS
from mooring.rules.penalty import Penalty
from mooring.rules.proximal import Proximal
from mooring.rules.pull import GradientPull, ParameterPull
from mooring.rules.random import Random
from mooring.rules.rwalk import RWalk
from mooring.rules.si import SI
from mooring.rules.uniform import Uniform

__all__ = [
    "EWC",
    "IMPORTANCES",
    "MAS",
    "SI",
    "Balanced",
    "Blend",
    "Budget",
    "GradientPull",
    "Importance",
    "Interpolation",
    "Iteration",
    "Kronecker",
    "ParameterPull",
    "Penalty",
    "Proximal",
    "Pull",
    "RWalk",
    "Random",
    "State",
    "Uniform",
    "resolve",
]

Pull = GradientPull | ParameterPull | Budget
"""A pull that acts before the step, after it, or after it on all parameters together."""
