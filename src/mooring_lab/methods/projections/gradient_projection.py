"""Gradients of the runs of a fleet projected away from the inputs of past tasks: GPM, NSCL and OWM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mooring.curvature.kronecker_factors import group_rows, layer_groups, layer_rows, layers_with_factors
from mooring.errors import MooringError
from mooring_lab.fleet.evaluation import PIXELS_PER_BATCH
from mooring_lab.fleet.learner_plugin import PluginState, Step
from mooring_lab.fleet.stack.batched_layers import BatchedLayer
from mooring_lab.fleet.stack.stack import Stack, Tensors
from mooring_lab.methods.projections import GradientProjectionOptions
from mooring_lab.methods.projections.projection import InputProjection
from mooring_lab.methods.projections.projection_plugin import ProjectionPlugin
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet

MAX_INPUTS = 4096
"""Layers with more inputs or outputs stay as they are from the second task on: eigenvectors of more take too long."""


class GradientProjection(ProjectionPlugin):
    """The projection of every layer's gradient in each run, from the second task on.

    A protected parameter that has no layer with visible inputs, such as that of a normalization, keeps its value from
    the end of the first task.

    Attributes:
        states: what the method keeps for each layer; every tensor is of shape (runs, groups of a convolution, n, n).

    Raises:
        MooringError: if the stack runs in a mode in which the inputs of layers cannot be seen.
    """

    options: GradientProjectionOptions
    projection: InputProjection

    def __init__(self, options: GradientProjectionOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        super().__init__(options, specs, fleet)
        if fleet.stack.batched is None or fleet.stack.mode != "batched":
            raise MooringError(
                f"{specs[0].method} needs layers that can be batched over runs, and this network has others: compare "
                "it without this method"
            )
        self.names, self.dtype = frozenset(fleet.moorable), fleet.dtype
        self.layers = _projected_layers(fleet.stack, self.names)
        self.matrices: Tensors = {}

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Project the gradients that the optimizer gets."""
        if not self.states:
            return
        gradients = step.gradients
        projected = {name: 0 * g if name in self.names else g for name, g in gradients.items()}
        for name, matrix in self.matrices.items():
            parts = {part: gradients[f"{name}.{part}"] for part in self._parts(name) if f"{name}.{part}" in gradients}
            for part, g in self._project(matrix, parts).items():
                projected[f"{name}.{part}"] = g
        step.gradients = projected

    def _parts(self, name: str) -> tuple[str, ...]:
        return ("weight", "bias") if self.layers[name].bias is not None else ("weight",)

    def _project(self, matrix: Tensor, parts: Tensors) -> Tensors:
        """Return weight and bias times the projection; the bias is the last column."""
        if "weight" not in parts:
            return {}
        runs, groups = matrix.shape[:2]
        columns = [g.reshape(runs, groups, g.shape[1] // groups, -1) for g in parts.values()]
        sizes = [column.shape[-1] for column in columns]
        split = torch.split(torch.cat(columns, -1) @ matrix, sizes, -1)
        return {part: own.reshape(g.shape) for (part, g), own in zip(parts.items(), split, strict=True)}

    @torch.no_grad()
    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Look at the inputs of a task that ended."""
        if task + 1 == len(fleet.stream.tasks):
            return
        stack, data = fleet.stack, fleet.training_data
        order = order[:, : self.projection.samples or None].to(stack.device)
        moments: Tensors = {}

        def observe(name: str, layer: nn.Module, x: Tensor, out: Tensor, runs: int) -> None:
            if name in self.layers:
                moment = self._moment(layer, x, out, runs)
                moments[name] = moments[name] + moment if name in moments else moment

        most = max(1, PIXELS_PER_BATCH[stack.device.type] // (len(stack) * data.images[0].numel()))
        with stack.observed_with({**stack.parameters, **stack.buffers}, observe):
            for indices in torch.split(order, most, 1):
                batch = data.batch(indices, task)
                stack(batch.x, batch.head)
        count = order.shape[1]
        for name, moment in moments.items():
            state = self.projection.update(self.states.get(name, {}), moment, count)
            # as a checkpoint has it: products of another layout differ in the last bit
            self.states[name] = {key: tensor.contiguous() for key, tensor in state.items()}
        self._set_matrices()

    def _moment(self, layer: nn.Module, x: Tensor, out: Tensor, runs: int) -> Tensor:
        """Return the sum of x x' over the inputs of a layer, with 1 as the input of the bias."""
        rows = layer_rows(layer, x, out, runs)[0].flatten(1, 2).double()
        rows = group_rows(rows, layer_groups(layer))
        if layer.bias is not None:
            rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
        return rows.mT @ rows

    def _set_matrices(self) -> None:
        """Round the projections to the precision of the gradients."""
        self.matrices = {name: state["projection"].to(self.dtype) for name, state in self.states.items()}

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        super().keep(rows)
        self._set_matrices()

    def names_in_order(self, fleet: Fleet) -> Iterable[str]:
        """Return the layers that are projected."""
        return self.layers

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(fleet, state)
        self._set_matrices()


def _projected_layers(stack: Stack, names: Collection[str]) -> dict[str, nn.Module]:
    """Return the layers whose inputs are visible and whose weight is to be protected, by name."""
    visible = layers_with_factors(stack.network, MAX_INPUTS)
    assert stack.batched is not None
    batched = {module.name for module in stack.batched.modules() if isinstance(module, BatchedLayer)}
    layers = stack.network.named_modules()
    return {n: layer for n, layer in layers if layer in visible and n in batched and f"{n}.weight" in names}
