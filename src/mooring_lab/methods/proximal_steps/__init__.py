"""EWC's penalty as a proximal step, which does not extrapolate at any strength, and pulls with a budget in nats."""

import mooring
from mooring_lab.methods.importance_table import layer_curvature, mean_fisher
from mooring_lab.methods.strengths import DIGITS_STRENGTHS
from mooring_lab.model.method import Method, decades

METHODS = [
    Method(
        "proximal-ewc",
        "EWC's penalty as a proximal step, with the sum of the tasks' mean Fisher information",
        mean_fisher,
        lambda strength: mooring.Proximal(strength),
        DIGITS_STRENGTHS["proximal-ewc"],
        merge="sum",
        dial=decades(0, 7),
    ),
    Method(
        "budget-ewc",
        "smallest pull that keeps the estimated rise of the old loss within a budget in nats (its strength)",
        mean_fisher,
        lambda nats: mooring.Budget(nats),
        DIGITS_STRENGTHS["budget-ewc"],
        merge="sum",
        dial=decades(-7, 0),
    ),
    Method(
        "budget-kronecker",
        "a budget in nats (its strength), with the curvature of whole layers instead of single weights",
        layer_curvature,
        lambda nats: mooring.Budget(nats),
        DIGITS_STRENGTHS["budget-kronecker"],
        merge="sum",
        dial=decades(-7, 0),
    ),
]
