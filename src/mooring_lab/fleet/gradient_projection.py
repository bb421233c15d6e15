"""Gradients of the runs of a fleet projected away from the inputs of past tasks: GPM, NSCL and OWM."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from mooring.curvature.kronecker_factors import group_rows, layer_groups, layer_rows, layers_with_factors
from mooring.errors import MooringError
from mooring_lab.fleet.data import TrainingData
from mooring_lab.fleet.evaluation import PIXELS_PER_BATCH
from mooring_lab.fleet.method_state import Tensors
from mooring_lab.fleet.stack.batched_layers import BatchedLayer
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.methods import Method
from mooring_lab.methods.projection import InputProjection, State
from mooring_lab.model.spec import RunSpec

MAX_INPUTS = 4096
"""Layers with more inputs or outputs stay as they are from the second task on: eigenvectors of more take too long."""


class GradientProjection:
    """The projection of every layer's gradient in each run, from the second task on.

    A protected parameter that has no layer with visible inputs, such as that of a normalization, keeps its value from
    the end of the first task.

    Args:
        method: of the runs.
        specs: the runs.
        stack: the runs' networks.
        names: the parameters to protect.

    Attributes:
        states: what the method keeps for each layer; every tensor is of shape (runs, groups of a convolution, n, n).

    Raises:
        MooringError: if the stack runs in a mode in which the inputs of layers cannot be seen.
    """

    def __init__(self, method: Method, specs: Sequence[RunSpec], stack: Stack, names: Collection[str]) -> None:
        if stack.batched is None or stack.mode != "batched":
            raise MooringError(
                f"{method.name} needs layers that can be batched over runs, and this network has others: compare it "
                "without this method"
            )
        self.method, self.names = method, frozenset(names)
        self.layers = _projected_layers(stack, self.names)
        self.states: dict[str, State] = {}
        self.matrices: Tensors = {}
        self.dtype = next(iter(stack.parameters.values())).dtype
        self.set_strengths(specs)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        assert self.method.projection is not None
        strengths = torch.tensor([spec.strength or 0.0 for spec in specs], dtype=torch.float64)
        projection = self.method.projection(strengths)
        assert isinstance(projection, InputProjection)
        self.projection = projection

    def project_gradients(self, gradients: Tensors) -> Tensors:
        """Return the gradients that the optimizer gets."""
        if not self.states:
            return gradients
        projected = {name: 0 * g if name in self.names else g for name, g in gradients.items()}
        for name, matrix in self.matrices.items():
            parts = {part: gradients[f"{name}.{part}"] for part in self._parts(name) if f"{name}.{part}" in gradients}
            for part, g in self._project(matrix, parts).items():
                projected[f"{name}.{part}"] = g
        return projected

    def project_parameters(self, parameters: Tensors, validate: Callable[[], Tensors]) -> None:
        """Do nothing: parameters stay where the optimizer moved them."""

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
    def end_task(self, stack: Stack, data: TrainingData, order: Tensor, task: int) -> None:
        """Look at the inputs of a task that ended.

        Args:
            stack: the runs.
            data: the images.
            order: the images of the task in each run's order, of shape (runs, images).
            task: the number of the task.
        """
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
        """Keep only the runs in these rows."""
        self.states = {name: {key: t[rows] for key, t in state.items()} for name, state in self.states.items()}
        self._set_matrices()

    # In checkpoints

    def tensors(self) -> Tensors:
        """Return what is kept for each run, by name."""
        return {f"{name}/{key}": tensor for name, state in self.states.items() for key, tensor in state.items()}

    def load(self, tensors: Tensors) -> None:
        """Continue from what `tensors` returned."""
        self.states = {}
        for name in self.layers:  # in the network's order
            own = {key.rpartition("/")[2]: t for key, t in tensors.items() if key.rpartition("/")[0] == name}
            self.states |= {name: own} if own else {}
        self._set_matrices()


def _projected_layers(stack: Stack, names: Collection[str]) -> dict[str, nn.Module]:
    """Return the layers whose inputs are visible and whose weight is to be protected, by name."""
    visible = layers_with_factors(stack.network, MAX_INPUTS)
    assert stack.batched is not None
    batched = {module.name for module in stack.batched.modules() if isinstance(module, BatchedLayer)}
    layers = stack.network.named_modules()
    return {n: layer for n, layer in layers if layer in visible and n in batched and f"{n}.weight" in names}
