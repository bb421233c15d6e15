"""The inputs of the last training batches, on which a repair keeps what was learned of the new task."""

import inspect
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from mooring.backends.host_copy import pinned_copy
from mooring.errors import MooringError
from mooring.hold.measure import Gauge
from mooring.observe.output_observer import ForwardHook, is_probing
from mooring.reference.batches import Outputs, map_tensors, resident_bytes, tensors_in
from mooring.reference.kinds import Classes, OutputKind
from mooring.reference.preserve_model_state import Settings, is_preserved, read_settings

KEPT_BATCHES = 16
"""The number of training batches whose inputs are kept."""


class TrainingHook(ForwardHook):
    """A forward hook that sees passes that may be of training, unless they are part of a compiled graph."""

    def __call__(self, *given: Any) -> None:
        """Call the method, if its observer still exists."""
        if not torch.compiler.is_compiling():
            self._call(*given)

    @_disable_dynamo  # torch.compiler.disable, without importing the compiler now
    def _call(self, *given: Any) -> None:
        if not is_probing() and not is_preserved() and torch.is_grad_enabled():
            super().__call__(*given)


class RecentInputs:
    """The inputs of the forward pass before each of the last steps, seen by a forward pre-hook of the model.

    Passes without gradients, such as evaluations, are not kept, and of several passes before one step, such as the
    micro-batches of an accumulated gradient, the last one is. They stay on their device, or are copied to the host's
    memory if KEPT_BATCHES of them take more of a GPU than the batches of a gauge may. No saved state contains them.

    Args:
        outputs: takes what the model returns and gives its outputs; None is as their kind finds them.

    Attributes:
        kind: what the outputs are.
        whole: whether the outputs of a sample depend on the others of its batch.
    """

    def __init__(self, outputs: Outputs | None = None) -> None:
        self.outputs = outputs
        self.kind: OutputKind = Classes()
        self.whole = False
        self._handle: Any = None
        self.clear()

    def clear(self) -> None:
        """Forget all inputs."""
        self._batches: deque[Any] = deque(maxlen=KEPT_BATCHES)
        self._settings: Settings | None = None
        self._pending: tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]] | None = None

    def hook(self, model: nn.Module) -> None:
        """Observe the inputs of a model."""
        if self._handle is None:
            hook = TrainingHook(self.before_forward)
            self._handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def unhook(self) -> None:
        """Observe nothing any more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember what the model is called with, which may be for a training step."""
        self._pending = module, args, kwargs

    def take(self, step: int) -> None:
        """Keep the inputs of the last pass for the step of the task that was taken, counted from 1."""
        if self._pending is None:
            return
        (model, args, kwargs), self._pending = self._pending, None
        if self._settings is None or step % KEPT_BATCHES == 1:
            self._settings = read_settings(model)
        if (inputs := named_inputs(model, args, kwargs)) is not None:
            self._batches.append(_copied(inputs))

    def recorded(self, model: nn.Module) -> Gauge | None:
        """Return the kept inputs with what the model gives for them now; None if there are none, or it cannot."""
        if not self._batches:
            return None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # inputs may still be on their way to the host
        gauge = Gauge(list(self._batches), outputs=self.outputs, kind=self.kind, whole=self.whole)
        gauge.settings = self._settings
        try:
            gauge.record(model)
        except torch.OutOfMemoryError:
            raise
        except (MooringError, RuntimeError, TypeError, ValueError):  # it cannot repeat a pass, or gives other outputs
            return None
        return gauge


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return one tensor, or inputs by the names of the model's arguments; None if they have no names.

    Example:
        >>> named_inputs(nn.Identity(), (torch.zeros(2),), {}), named_inputs(nn.Identity(), (), {"input": 1})
        (tensor([0., 0.]), {'input': 1})
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return args[0]
    try:
        signature = inspect.signature(model.forward)
        arguments = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    named: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            return None
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def _copied(inputs: Any) -> Any:
    """Return a copy of inputs, which a loader may write over, where there is room for KEPT_BATCHES of them."""
    tensors = tensors_in(inputs)
    device = next((t.device for t in tensors if t.device.type == "cuda"), None)
    if device is None or KEPT_BATCHES * sum(t.nbytes for t in tensors) <= resident_bytes(device):
        return map_tensors(inputs, lambda t: t.detach().clone())
    return map_tensors(inputs, lambda t: pinned_copy(t.detach()) if t.is_cuda else t.detach().clone())
