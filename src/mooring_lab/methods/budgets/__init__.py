"""Methods that keep inputs of past tasks as a reference: distillation, and measured budgets, the product's own code."""

from dataclasses import dataclass

import mooring
from mooring_lab.methods.importance_table import layer_curvature
from mooring_lab.methods.strengths import DIGITS_STRENGTHS, SAMPLES
from mooring_lab.model.method import Method, PluginOptions

NATS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class ReferenceOptions(PluginOptions):
    """Options of methods that keep a reference; a measured budget is that of one method.

    Args:
        measures: whether a `Budget` is measured on it.
        attached: whether a run is moored once its first task is over, as `attach(reference=...)` does: the importance
            of each task is estimated on its reference, and later statistics of normalization layers stay as they were.
    """

    plugin: str = "mooring_lab.methods.budgets.reference_plugin:ReferencePlugin"
    measures: bool = False
    attached: bool = False
    one_method = True


METHODS = [
    Method(
        "mooring",
        "the default of attach(reference=...): a budget (its strength, in nats), kept with old samples",
        lambda seed: mooring.EWC(decay=None, per_sample=True),
        lambda nats: mooring.Budget(nats),
        DIGITS_STRENGTHS["mooring"],
        merge="sum",
        plugin=ReferenceOptions(measures=True, attached=True),
        memory=SAMPLES,
        dial=NATS,
    ),
    Method(
        "distil",
        "add the divergence from the last task's model on old samples, times a weight (its strength)",
        strength=DIGITS_STRENGTHS["distil"],
        plugin=ReferenceOptions(),
        memory=SAMPLES,
        dial=WEIGHTS,
    ),
    Method(
        "budget-measured",
        "budget-kronecker with a budget in nats (its strength) that is measured on old samples, and kept",
        layer_curvature,
        lambda nats: mooring.Budget(nats, distil=False),
        DIGITS_STRENGTHS["budget-measured"],
        merge="sum",
        plugin=ReferenceOptions(measures=True),
        memory=SAMPLES,
        dial=NATS,
    ),
    Method(
        "budget-distil",
        "a budget measured on some old samples (its strength, in nats), with distillation of the others",
        layer_curvature,
        lambda nats: mooring.Budget(nats),
        DIGITS_STRENGTHS["budget-distil"],
        merge="sum",
        plugin=ReferenceOptions(measures=True),
        memory=SAMPLES,
        dial=NATS,
    ),
]
