"""Methods with a budget: the strength is the number of nats that may be forgotten in a task."""

import mooring
from mooring.lab.methods.method import Method, decades
from mooring.lab.methods.proximal_steps import mean_fisher
from mooring.lab.methods.strengths import DIGITS_STRENGTHS

__all__ = ["METHODS"]

METHODS = [
    Method(
        "budget-ewc",
        "smallest pull that keeps the estimated rise of the old loss within a budget in nats (its strength)",
        mean_fisher,
        lambda nats: mooring.Budget(nats),
        strength=DIGITS_STRENGTHS["budget-ewc"],
        merge="sum",
        dial=decades(-7, 0),
    ),
    Method(
        "budget-kronecker",
        "a budget in nats (its strength), with the curvature of whole layers instead of single weights",
        lambda seed: mooring.importance.Kronecker(every=4),
        lambda nats: mooring.Budget(nats),
        strength=DIGITS_STRENGTHS["budget-kronecker"],
        merge="sum",
        dial=decades(-7, 0),
    ),
]
