"""A context that restores a model: parameters, buffers, gradients, modes and random states."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mooring.observe.output_observer import OutputObserver


@contextmanager
def preserve_model_state(model: nn.Module, *, moves: bool) -> Iterator[None]:
    """Put the model in eval mode, and restore everything bit for bit at the end.

    Args:
        model: the model.
        moves: True if the body displaces the parameters: they are restored, and forward passes do not count as
            training. False if it runs backward passes: gradients are set aside and restored.

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
    random_state, probing = random.getstate(), OutputObserver.probing
    numpy = sys.modules.get("numpy")  # data loading may use its random state
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices):
        OutputObserver.probing = moves
        model.eval()
        for p, _ in gradients:
            p.grad = None
        try:
            yield
        finally:
            OutputObserver.probing = probing
            random.setstate(random_state)
            if numpy:
                numpy.random.set_state(numpy_state)
            for module, training in modes:
                module.training = training
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)
