"""Importances: scores of how much each parameter matters to a task. One file per definition."""

from mooring.importance.balanced import Balanced
from mooring.importance.definition import Importance, Iteration, State
from mooring.importance.ewc import EWC
from mooring.importance.kronecker import Kronecker
from mooring.importance.mas import MAS
from mooring.importance.names import IMPORTANCES, resolve
from mooring.importance.random import Random
from mooring.importance.rwalk import RWalk
from mooring.importance.si import SI
from mooring.importance.uniform import Uniform

__all__ = [
    "EWC",
    "IMPORTANCES",
    "MAS",
    "SI",
    "Balanced",
    "Importance",
    "Iteration",
    "Kronecker",
    "RWalk",
    "Random",
    "State",
    "Uniform",
    "resolve",
]
