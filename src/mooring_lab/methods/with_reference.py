"""Methods that keep inputs of past tasks as a reference: distillation, measured budgets, and both together.

A task ends at its last parameters, as with all other methods, and not at an average of them.
"""

import mooring
from mooring_lab.methods.baselines import SAMPLES
from mooring_lab.methods.method import Method
from mooring_lab.methods.proximal_steps import layer_curvature
from mooring_lab.methods.strengths import DIGITS_STRENGTHS

NATS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

METHODS = [
    Method(
        "distil",
        "add the divergence from the last task's model on old samples, times a weight (its strength)",
        strength=DIGITS_STRENGTHS["distil"],
        data="reference",
        memory=SAMPLES,
        dial=WEIGHTS,
    ),
    Method(
        "budget-measured",
        "budget-kronecker with a budget in nats (its strength) that is measured on old samples, and kept",
        layer_curvature,
        lambda nats: mooring.Budget(nats, distil=False, average=False),
        DIGITS_STRENGTHS["budget-measured"],
        merge="sum",
        data="reference",
        memory=SAMPLES,
        dial=NATS,
    ),
    Method(
        "budget-distil",
        "a budget measured on some old samples (its strength, in nats), with distillation of the others",
        layer_curvature,
        lambda nats: mooring.Budget(nats, distil=True, average=False),
        DIGITS_STRENGTHS["budget-distil"],
        merge="sum",
        data="reference",
        memory=SAMPLES,
        dial=NATS,
    ),
]
