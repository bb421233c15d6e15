"""Joint training: every task trains on the data of all tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooring_lab.fleet.learner_plugin import EpochPlan, LearnerPlugin, Step
from mooring_lab.model.order import joint_order

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class JointTraining(LearnerPlugin):
    """Batches of the data of all tasks, as many as each task has; each sample is trained with its own task's head."""

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Take the samples of all tasks instead of those of the present one."""
        parts, epochs = [part.train for part in fleet.stream.tasks], fleet.common.epochs
        plan.order = fleet.training_data.epoch_order(
            fleet.specs,
            plan.task,
            plan.epoch,
            lambda seed: joint_order(seed, plan.task, plan.epoch, parts, epochs),
        )

    def choose_batch(self, fleet: Fleet, step: Step) -> None:
        """Use each sample's own head."""
        step.head_task = None

    def metrics(self, fleet: Fleet) -> list[dict[str, Any]]:
        """Return `Result.joint` of each run."""
        if fleet.stream.heads != "growing":
            return [{"joint": record.matrix[-1]} for record in fleet.measured.records]
        tasks = len(fleet.stream.tasks)
        return [{"joint": row} for row in fleet.measured.score(fleet, tasks - 1, tasks, None)]
