"""Evidence that a model was trained before its first moored step, so that it has something to forget."""

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from mooring.distributed.dtensor import local_tensor
from mooring.state.mooring_state import MooringState


@torch.no_grad()
def evidence_of_training(states: MooringState) -> str:
    """Return what shows that the model was trained before, in words; empty if nothing does.

    Adapters are made for trained models, an optimizer with a history has trained this one, and training makes the
    equal weights and biases of a normalization layer differ. A trained model may show none of this. A model from
    random weights shows none of it, so that a first task from scratch is not taken for fine-tuning.
    """
    products = states.products
    if any(p.requires_grad for p in (*products.by_b, *products.reasons)):
        return "it has adapters"
    if _has_history(states.optimizer):
        return "the optimizer has already taken steps"
    if layer := _trained_norm(states):
        return f"the weights of {layer!r} are not those of a new layer"
    return ""


def _has_history(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has taken a step; Adagrad and others have a state before their first one."""
    state = next((state for state in optimizer.state.values() if isinstance(state, dict)), {})
    steps = state.get("step", 0)
    counted = isinstance(steps, int | float | Tensor) and bool(torch.as_tensor(steps).any())  # of each row in some
    return counted or state.get("momentum_buffer") is not None


def _trained_norm(states: MooringState) -> str:
    """Return the name of a normalization layer whose moored weights, and biases, differ; empty if there is none."""
    for name, module in states.model.named_modules():
        if "Norm" in type(module).__name__:
            own = [p for p in (getattr(module, "weight", None), getattr(module, "bias", None)) if p in states.names]
            if own and all(map(_differs_within, own)):
                return str(name)
    return ""


def _differs_within(p: Tensor) -> bool:
    """Return whether the elements of a vector differ from each other, on this rank."""
    if is_lazy(p) or p.is_meta or p.ndim != 1:
        return False
    values = local_tensor(p)
    return bool((values != values[:1]).any())
