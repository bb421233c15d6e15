"""Controls for every comparison: methods that moor nothing."""

from dataclasses import dataclass

from mooring_lab.model.method import Method, PluginOptions


@dataclass(frozen=True)
class FreezingOptions(PluginOptions):
    """The number of tasks that train the backbone."""

    plugin: str = "mooring_lab.methods.controls.freezing:Freezing"
    trained_tasks: int = 0


@dataclass(frozen=True)
class JointOptions(PluginOptions):
    """Training on the data of all tasks at once."""

    plugin: str = "mooring_lab.methods.controls.joint_training:JointTraining"
    all_tasks = True


METHODS = [
    Method("plain", "plain fine-tuning on each task, without protection", group="controls"),
    Method("frozen", "train the heads only and never change the backbone", plugin=FreezingOptions(), group="controls"),
    Method(
        "frozen-after-first",
        "train the backbone on the first task, then freeze it",
        plugin=FreezingOptions(trained_tasks=1),
        group="controls",
    ),
    Method(
        "joint",
        "train on all tasks at once, for as many steps: a reference without forgetting",
        plugin=JointOptions(),
        group="controls",
    ),
]
