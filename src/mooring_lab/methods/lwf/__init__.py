"""Learning without forgetting: old heads keep their outputs on the new task's inputs."""

from dataclasses import dataclass

from mooring_lab.methods.strengths import DIGITS_STRENGTHS
from mooring_lab.model.method import Method, PluginOptions


@dataclass(frozen=True)
class LwFOptions(PluginOptions):
    """The temperature of the distillation."""

    plugin: str = "mooring_lab.methods.lwf.learning_without_forgetting:LearningWithoutForgetting"
    temperature: float = 2.0


METHODS = [
    Method(
        "lwf",
        "distil the old heads' outputs on the new task's inputs, times a weight (its strength; LwF)",
        strength=DIGITS_STRENGTHS["lwf"],
        dial=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
        plugin=LwFOptions(),
        group="published",
    ),
]
