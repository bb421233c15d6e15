"""The metrics by name: what tables call them, and how they are defined.

a[i, k] is the accuracy on task k after training on task i, in percent; T is the number of tasks.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricDefinition:
    """The definition of a metric, as it is shown beside its values.

    Attributes:
        title: its name in the literature.
        formula: how it is computed.
        meaning: what it measures, and where it comes from.
        unit: "%", or "points" of a difference.
        signed: whether it can be negative.
    """

    title: str
    formula: str
    meaning: str
    unit: str = "points"
    signed: bool = False

    @property
    def column(self) -> str:
        """Its name above a column of a table."""
        return f"{self.title} %" if self.unit == "%" else self.title

    def __str__(self) -> str:
        return f"{self.title}: {self.meaning}; {self.formula}"


DEFINITIONS = {
    "accuracy": MetricDefinition(
        "average accuracy", "mean over k of a[T, k]", "accuracy of the final model over all tasks", "%"
    ),
    "incremental": MetricDefinition(
        "average incremental accuracy",
        "mean over i of the mean over k <= i of a[i, k]",
        "average accuracy after each task, on the tasks so far (Rebuffi et al., 2017)",
        "%",
    ),
    "forgetting_earlier": MetricDefinition(
        "forgetting (T-1)",
        "mean over k < T of max over k <= i < T of a[i, k], minus a[T, k]",
        "best earlier accuracy minus the final one, over the T-1 tasks before the last (Chaudhry et al., 2018)",
        signed=True,
    ),
    "forgetting": MetricDefinition(
        "forgetting (T)",
        "mean over k of max over i >= k of a[i, k], minus a[T, k]",
        "best accuracy so far minus the final one, over all T tasks, of which the last counts 0, as in the paper that "
        "Mooring reproduces",
    ),
    "learned": MetricDefinition(
        "learning accuracy",
        "mean over k of a[k, k]",
        "accuracy on each task right after its training (Riemer et al., 2019)",
        "%",
    ),
    "backward": MetricDefinition(
        "backward transfer",
        "mean over k < T of a[T, k] - a[k, k]",
        "the effect of later tasks on earlier ones (Lopez-Paz and Ranzato, 2017)",
        signed=True,
    ),
    "forward": MetricDefinition(
        "forward transfer",
        "mean over k > 1 of a[k-1, k] - a[0, k]",
        "the effect of earlier tasks on later ones; a[0, k] is before any training (Lopez-Paz and Ranzato, 2017)",
        signed=True,
    ),
    "intransigence": MetricDefinition(
        "intransigence",
        "mean over k of j[k] - a[k, k]",
        "what joint training with the same seed learned of each task (j) and the method did not; only where `joint` "
        "is compared too (after Chaudhry et al., 2018, whose joint model has the tasks up to k; ours has all of them)",
        signed=True,
    ),
}
"""The metrics in the order of tables and files."""

NOTATION = "a[i, k]: accuracy on task k after task i of T, %"
"""The notation of the formulas."""
