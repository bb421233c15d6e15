"""Observes the inputs of layers and the gradients of their outputs, for the Kronecker factors of their curvature."""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from mooring.backends.eager import autocast_disabled
from mooring.curvature.kronecker_factors import is_transposed
from mooring.curvature.observed_factors import (
    FactorShapes,
    ObservedFactors,
    all_reduce_factors,
    observe,
    observed_shapes,
)
from mooring.curvature.product_factors import factor_shapes, observe_products
from mooring.distributed.dtensor import gathered_parameters, sharded, world_size
from mooring.errors import MooringError
from mooring.observe.output_observer import ForwardHook, gradient_versions, is_probing
from mooring.state.mooring_state import MooringState, is_one_graph


class LayerObserver:
    """Forward hooks on layers that compute Kronecker factors in each backward pass.

    A pass counts for a parameter if it accumulates a gradient in it, and until that gradient is cleared. Gradients with
    respect to inputs, and passes whose gradients are thrown away, therefore change nothing. The factors of all calls of
    a layer, and of all layers that share a parameter, are added as they come.

    Args:
        states: says which layers to observe, in which iterations, and how many there were in this task.
        predictions: returns the number of predictions that this rank's mean loss averages over in this iteration;
            0 if it is not known. None if each sample is one prediction.

    Attributes:
        samples: the number of samples in the last observed iteration; set in a single process only.
    """

    def __init__(self, states: MooringState, predictions: Callable[[], float | Tensor] | None = None) -> None:
        self.states, self.predictions, self.paused, self.samples = states, predictions, False, 0
        if is_one_graph(states.model):
            raise MooringError(
                f"{states.importance.name}() observes every layer, which torch.compile(fullgraph=True) does not allow: "
                'compile without it, or use importance="ewc"'
            )
        self._passes: dict[Tensor, ObservedFactors] = {}
        self._open: dict[int, dict[Tensor, ObservedFactors]] = {}
        self._versions: dict[Tensor, list[int]] = {}
        self._handles: dict[nn.Module, Any] = {}
        self._gathered: dict[Tensor, Tensor] = {}
        self._layers: dict[nn.Module, dict[str, Tensor]] = {}
        self.hook_layers()

    @property
    def due(self) -> bool:
        """Whether this iteration is observed."""
        return self.states.observes

    def hook_layers(self) -> None:
        """Observe the layers that the model has now."""
        if self._layers is self.states.layers:
            return
        self._layers = self.states.layers
        for layer in self._handles.keys() - self._layers.keys():
            self._handles.pop(layer).remove()
        for layer in self._layers.keys() - self._handles.keys():
            hook = ForwardHook(self.after_forward)
            self._handles[layer] = layer.register_forward_hook(hook, with_kwargs=True)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        """Register a hook on the output that computes the factors when its gradient arrives."""
        if self.paused or is_probing() or not torch.is_grad_enabled() or not self.due:
            return
        if not any(p.requires_grad for p in self._layers.get(module, {}).values()):  # frozen since it was hooked
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func has no backward pass
            return
        a = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        if a is None or not a.numel() or not isinstance(returned, Tensor) or not returned.requires_grad:
            return
        a = a.detach()

        thread = get_ident()

        def on_gradient(b: Tensor) -> None:
            own = {name: p for name, p in self._layers.get(module, {}).items() if _accumulates(self._leaf(p))}
            if own and not is_probing(thread):
                with torch.no_grad(), autocast_disabled():
                    observed = self._observe(module, own, a, b)
                for name, p in own.items():
                    self._add_use(p, observed[name])

        returned.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _observe(self, module: nn.Module, own: dict[str, Tensor], a: Tensor, b: Tensor) -> dict[str, ObservedFactors]:
        """Return the factors of the parameters of a layer that are named in `own`."""
        products = {name: p for name, p in self.states.products.of_module(module).items() if name in own}
        names, importance = own.keys() - products.keys(), self.states.importance
        observed = observe(module, a, b, names, importance.blocks, importance.places) if names else {}
        if products:
            firsts = {product.a: self._leaf(product.a) for product in products.values() if sharded(product.a)}
            observed |= observe_products(products, self.states.largest_side, a, b, firsts)
        return observed

    def _leaf(self, p: Tensor) -> Tensor:
        """Return the tensor that the running backward pass differentiates: of a shard, the gathered parameter."""
        if not sharded(p):
            return p
        if p not in self._gathered:
            self._gathered = gathered_parameters(self.states.model)
        return self._gathered.get(p, p)

    def _add_use(self, p: Tensor, observed: ObservedFactors) -> None:
        """Add a call of a layer to the running backward pass, and at its start drop passes that were thrown away."""
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass not in self._open:
            self._open[backward_pass] = {}
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_pass(backward_pass))
        uses = self._open[backward_pass]
        if p in uses:
            uses[p].add_use(observed)
            return
        uses[p] = observed
        if sharded(p):  # its gradient appears after the pass, so every pass counts
            return
        untouched = self._versions.get(p) == gradient_versions([p])
        if p in self._passes and (p.grad is None or not (untouched or bool(p.grad.any()))):
            del self._passes[p]

    def _end_pass(self, backward_pass: int) -> None:
        """Add the factors of a backward pass to those since the last step."""
        for p, observed in self._open.pop(backward_pass, {}).items():
            observed.end_pass()
            if p in self._passes:
                self._passes[p].add_pass(observed)
            else:
                self._passes[p] = observed
            self._versions[p] = gradient_versions([p])

    def collect(self) -> dict[Tensor, ObservedFactors]:
        """Return the factors since the last step over all passes and ranks, and start a new iteration.

        A sample may hold several predictions, such as the positions of a sequence. The loss is then a mean over
        predictions, so the gradient of a single one is larger by their number per sample.
        """
        observed, self._passes, self._open, self._versions = self._passes, {}, {}, {}
        self._gathered = {}
        if not self.due:
            return {}
        predictions = self.predictions() if self.predictions and observed else 0.0
        for factors in observed.values():
            factors.outputs = factors.outputs * _predictions_per_sample(predictions, factors.samples)
        if observed and world_size() == 1:
            self.samples = min(factors.samples for factors in observed.values())
        parameters = dict.fromkeys(p for own in self._layers.values() for p in own.values())
        transposed = {own["weight"] for layer, own in self._layers.items() if is_transposed(layer) and "weight" in own}
        shapes = {p: self._shapes(p, transposed=p in transposed) for p in parameters} if world_size() > 1 else {}
        return all_reduce_factors(list(parameters), observed, shapes, transposed)

    def _shapes(self, p: Tensor, *, transposed: bool) -> FactorShapes:
        """Return the shapes of what is observed for a parameter; of a B, those of its product and of itself."""
        if product := self.states.products.by_b.get(p):
            return *factor_shapes(product, self.states.largest_side), tuple(p.flatten(1).shape)
        groups = self.states.groups.get(p, 1)
        return observed_shapes(p, self.states.importance.blocks, transposed=transposed, groups=groups)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()


def _predictions_per_sample(predictions: float | Tensor, samples: int) -> float | Tensor:
    """Return the number of predictions of a sample; 1 if that of all is 0. The host waits for none on a device.

    Example:
        >>> _predictions_per_sample(6, 2), _predictions_per_sample(torch.tensor(0), 2), _predictions_per_sample(0, 2)
        (3.0, tensor(1., dtype=torch.float64), 1.0)
    """
    if isinstance(predictions, Tensor):
        return torch.where(predictions == 0, 1.0, predictions.double() / samples)
    return predictions / samples or 1.0


def _accumulates(p: Tensor) -> bool:
    """Return whether the running backward pass accumulates a gradient in a parameter."""
    if not p.requires_grad:
        return False
    with torch.enable_grad():
        node: Any = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad() returns its gradient instead
        return False
