"""Parameters of the runs of a fleet projected into balls around their anchors, with learned radii: TPGM and FTP."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from mooring_lab.fleet.data import TrainingData
from mooring_lab.fleet.method_state import Tensors
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.methods import Method
from mooring_lab.methods.layer_balls import SMALLEST_RADIUS, adam_step, project, radius_gradient
from mooring_lab.methods.projection import RadiusProjection, State
from mooring_lab.model.spec import RunSpec


class WeightProjection:
    """A ball around the anchor of each parameter in each run, from the second task on.

    Args:
        method: of the runs.
        specs: the runs.
        stack: the runs' networks.
        names: the parameters to project.

    Attributes:
        states: of each parameter: its anchor, its displacement before the last projection, and for each run the radius
            and what Adam keeps for it.
    """

    def __init__(self, method: Method, specs: Sequence[RunSpec], stack: Stack, names: Collection[str]) -> None:
        self.method, self.names, self.device = method, list(names), stack.device
        self.states: dict[str, State] = {}
        self.set_strengths(specs)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        assert self.method.projection is not None
        strengths = [spec.strength or 0.0 for spec in specs]
        projection = self.method.projection(torch.tensor(strengths, dtype=torch.float64, device=self.device))
        assert isinstance(projection, RadiusProjection)
        self.projection = projection

    def project_gradients(self, gradients: Tensors) -> Tensors:
        """Learn the radii from the gradients of a training step, unless they are validated; return the gradients."""
        if not self.projection.validates:
            self._learn_radii(gradients)
        return gradients

    @torch.no_grad()
    def _learn_radii(self, gradients: Tensors) -> None:
        """Take a step on the radii, by gradients of a loss at the projected parameters.

        Nothing was projected before the first step of a task: its displacement is 0, and so is the radius' gradient.
        """
        for name, state in self.states.items():
            if name in gradients:
                own = radius_gradient(gradients[name], state["displacement"], state["radius"])
                adam_step(state, own, torch.as_tensor(self.projection.radius_lr).to(own))

    @torch.no_grad()
    def project_parameters(self, parameters: Tensors, validate: Callable[[], Tensors]) -> None:
        """Project the parameters after the optimizer's step, in place.

        Args:
            parameters: of the stack.
            validate: returns the gradients of the validation loss.
        """
        for name, state in self.states.items():
            state["displacement"].copy_(parameters[name] - state["anchor"])
        if self.states and self.projection.validates:
            self._move(parameters)
            with torch.enable_grad():
                gradients = validate()
            self._learn_radii(gradients)
        self._move(parameters)

    def _move(self, parameters: Tensors) -> None:
        for name, state in self.states.items():
            parameters[name].copy_(state["anchor"] + project(state["displacement"], state["radius"]))

    def end_task(self, stack: Stack, data: TrainingData, order: Tensor, task: int) -> None:
        """Anchor the parameters where they are, with radii that start again; no image of the task is looked at."""
        for name in self.names:
            theta = stack.parameters[name].detach()
            zeros = theta.new_zeros(len(theta))
            self.states[name] = {
                "anchor": theta.clone(),
                "displacement": torch.zeros_like(theta),
                "radius": torch.full_like(zeros, SMALLEST_RADIUS),
                **{key: zeros.clone() for key in ("mean", "square", "steps")},
            }

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.states = {name: {key: t[rows] for key, t in state.items()} for name, state in self.states.items()}

    # In checkpoints

    def tensors(self) -> Tensors:
        """Return what is kept for each run, by name."""
        return {f"{name}/{key}": tensor for name, state in self.states.items() for key, tensor in state.items()}

    def load(self, tensors: Tensors) -> None:
        """Continue from what `tensors` returned."""
        self.states = {}
        for name in self.names:
            own = {key.rpartition("/")[2]: t for key, t in tensors.items() if key.rpartition("/")[0] == name}
            self.states |= {name: own} if own else {}
