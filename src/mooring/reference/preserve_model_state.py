"""A model that is looked at and left as it was: parameters, buffers, gradients, modes and random states."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mooring.observe.output_observer import OutputObserver

__all__ = ["preserve_model_state"]


@contextmanager
def preserve_model_state(model: nn.Module, *, moves: bool) -> Iterator[None]:
    """In eval mode; afterwards everything is as it was, to the bit.

    Args:
        model: what is looked at.
        moves: whether its parameters are displaced meanwhile. They are then kept aside, and forward passes do not
            count as training; if not, gradients are set aside instead, so that backward passes may write their own.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> with preserve_model_state(model, moves=False):
        ...     _ = model.train()(torch.randn(4, 2) + 9)
        >>> model.running_mean
        tensor([0., 0.])
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [(t, t.detach().clone()) for t in (*(model.parameters() if moves else ()), *model.buffers())]
    gradients = [] if moves else [(p, p.grad) for p in model.parameters()]
    devices = sorted({t.device.index for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"})
    state, looking = random.getstate(), OutputObserver.looking
    numpy = sys.modules.get("numpy")  # data may be drawn with it
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices):
        OutputObserver.looking = moves
        model.eval()
        for p, _ in gradients:
            p.grad = None
        try:
            yield
        finally:
            OutputObserver.looking = looking
            random.setstate(state)
            if numpy:
                numpy.random.set_state(numpy_state)
            for module, training in modes:
                module.training = training
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)
