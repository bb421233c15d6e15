"""Observes the outputs of a model's forward passes: counts samples and takes one extra gradient (the probe)."""

import dataclasses
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from mooring.backends.eager import autocast_disabled
from mooring.distributed.collectives import all_reduce_observation
from mooring.distributed.dtensor import gathered_parameters, local_tensor, local_tensors, rank, sharded, world_size
from mooring.errors import MooringError
from mooring.rules import Importance
from mooring.state.mooring_state import MooringState

_OUTPUTS_HINT = "pass outputs=, a function that takes what the model returns and gives the tensor of its outputs"

ZERO_SUM = 0.01
"""A gradient whose sums along a dimension are smaller than this part of it adds up to 0 there, up to rounding."""


@dataclasses.dataclass
class Observation:
    """The number of samples since the last step, and the probe's gradient by parameter.

    Attributes:
        samples: the number of predictions that the mean of the loss is over; on a GPU, counted there, because the
            host need not wait for it.
        gradients: the probe's gradient by parameter.
        counted: the number of predictions with a gradient, on the device, until `samples` takes it over.
    """

    samples: int | Tensor = 0
    gradients: dict[Tensor, Tensor] = dataclasses.field(default_factory=dict)
    counted: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return isinstance(self.samples, int) and self.samples == 0

    def add(self, other: "Observation") -> None:
        """Add another forward pass; both are sums over samples."""
        samples = other.samples
        if other.counted is not None:
            counted = torch.where(other.counted == 0, samples, other.counted)
            samples = int(counted) if counted.device.type == "cpu" else counted
        self.samples = self.samples + samples
        for parameter, gradient in other.gradients.items():
            total = self.gradients.get(parameter)  # not in place: autograd may return one tensor for two parameters
            self.gradients[parameter] = gradient if total is None else total + gradient


def find_outputs(returned: Any) -> Tensor:
    """Return the tensor of outputs in what a model returned; its first dimension is the samples.

    A tensor is returned as it is. Of a tuple or list it is the first tensor that is not a scalar; of a mapping or
    dataclass, its `logits`.

    Example:
        >>> find_outputs({"loss": torch.tensor(1.0), "logits": torch.zeros(4, 10)}).shape
        torch.Size([4, 10])
    """
    outputs = returned
    if isinstance(returned, Mapping):
        outputs = returned.get("logits")
    elif dataclasses.is_dataclass(returned):
        outputs = getattr(returned, "logits", None)
    elif isinstance(returned, tuple | list):
        outputs = next((t for t in returned if isinstance(t, Tensor) and t.ndim > 0), None)
    if isinstance(outputs, Tensor) and outputs.ndim > 0 and outputs.is_floating_point():
        return outputs
    kind = type(returned).__name__
    raise MooringError(f"cannot find the outputs in the {kind} that the model returned: {_OUTPUTS_HINT}")


def count_samples(outputs: Tensor) -> int:
    """Return the number of predictions in the outputs: one for each vector along the class dimension.

    Example:
        >>> [count_samples(torch.zeros(shape)) for shape in ((4, 10), (4, 7, 10), (4, 3, 8, 8))]
        [4, 28, 256]
    """
    return outputs.select(class_dimension(outputs), 0).numel() if outputs.ndim > 1 else len(outputs)


def class_dimension(outputs: Tensor) -> int:
    """Return the dimension of classes: 1 for (B, C), 2 for sequences (B, T, C), and 1 for dense (B, C, height, width).

    Example:
        >>> [class_dimension(torch.zeros((2,) * ndim)) for ndim in (2, 3, 4, 5)]
        [1, 2, 1, 1]
    """
    return 2 if outputs.ndim == 3 else 1


def at_least_float32(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 if that is what they have.

    Example:
        >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def class_dimension_of_gradient(gradient: Tensor) -> int:
    """Return the dimension of classes, from the gradient of a loss with respect to the outputs.

    The gradient of a cross entropy adds up to 0 along it. So outputs (B, C, T) and (B, height, width, C) differ from
    what `class_dimension` says. It decides for every other loss.

    Example:
        >>> logits = torch.zeros(2, 5, 3, requires_grad=True)
        >>> nn.functional.cross_entropy(logits, torch.tensor([[1, 4, 0], [2, 2, 3]])).backward()
        >>> class_dimension_of_gradient(logits.grad), class_dimension(logits)
        (1, 2)
    """
    usual, dtype = class_dimension(gradient), torch.promote_types(gradient.dtype, torch.float32)
    if gradient.ndim < 3:
        return usual
    total = torch.linalg.vector_norm(gradient, 1, dtype=dtype)  # without a copy: there may be 100,000 classes
    for dimension in dict.fromkeys((usual, 1, gradient.ndim - 1)):
        if bool(gradient.sum(dimension, dtype=dtype).abs().sum() <= ZERO_SUM * total):
            return dimension
    return usual


def count_trained(gradient: Tensor, dimension: int) -> Tensor | None:
    """Return the number of predictions that a loss counts, from its gradient with respect to the outputs.

    A mean loss is over the predictions that count, and has no gradient at the others, such as padding with a label of
    -100. With a single class the gradient of a certain prediction is 0 too, so None is returned. With several it is 0
    only if all other classes have a probability of 0, below about e^-87 in float32 and bfloat16.

    Args:
        gradient: in the shape of the outputs.
        dimension: the dimension of classes.

    Example:
        >>> logits = torch.zeros(2, 3, 5, requires_grad=True)
        >>> labels = torch.tensor([[1, 4, -100], [2, -100, -100]])
        >>> nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        >>> count_trained(logits.grad, dimension=2)
        tensor(3)
    """
    if gradient.ndim < 2 or gradient.shape[dimension] == 1:
        return None
    return gradient.any(dimension).sum()


def count_labels(args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: Any = None) -> int:
    """Return the number of predictions of a forward pass that returned no `logits`, from the model's arguments.

    It is the number of `labels` but those of -100, which losses ignore. Without labels it is that of logits of another
    name, such as CLIP's `logits_per_image` or the `start_logits` of questions; without those the number of token ids in
    the first tensor of integers, else the length of the first tensor. Models with a fused language-model head, such as
    those of TRL's trainers, compute the loss without logits.

    Example:
        >>> labels = torch.tensor([[-100, 1, 2], [3, 4, -100]])
        >>> count_labels((), {"input_ids": torch.zeros(2, 3), "labels": labels}), count_labels((torch.zeros(5, 2),), {})
        (4, 5)
        >>> count_labels((), {"input_ids": labels}, {"logits_per_image": torch.zeros(2, 2)})
        2
    """
    if isinstance(labels := kwargs.get("labels"), Tensor):
        return int((labels != -100).sum())
    named = returned if isinstance(returned, Mapping) else getattr(returned, "__dict__", {})
    if (logits := next((t for key, t in named.items() if "logits" in str(key) and _has_rows(t)), None)) is not None:
        return count_samples(logits)
    tensors = [t for t in (*args, *kwargs.values()) if _has_rows(t)]
    ids = next((t for t in tensors if not t.is_floating_point()), None)
    if ids is not None:
        return ids.numel()
    if not tensors:
        raise MooringError(
            "cannot count the samples of a model that returns no outputs and takes no tensor: give the importance "
            "batch_size=, as in EWC(decay=None, per_sample=True, batch_size=8)"
        )
    return len(tensors[0])


def _has_rows(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim > 0


class ForwardHook:
    """A forward hook with a weak reference to a method of its observer, which takes what torch gives the hook.

    A copied or unpickled model has the hook without a method, so it is not observed.
    """

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self.method: Callable[[], Any] = (lambda: None) if method is None else weakref.WeakMethod(method)

    @_disable_dynamo  # torch.compiler.disable, without importing the compiler now
    def __call__(self, *given: Any) -> None:
        """Call the method if its observer still exists."""
        if (method := self.method()) is not None:
            method(*given)

    def __deepcopy__(self, memo: Any) -> "ForwardHook":
        return ForwardHook()

    def __reduce__(self) -> tuple[type["ForwardHook"], tuple[()]]:
        return ForwardHook, ()


_probing: dict[int, int] = {}
"""How many contexts of `probing` each thread is in."""


@contextmanager
def probing() -> Iterator[None]:
    """Mark the passes of this thread as no part of training, so that observers of models do not count them."""
    thread = get_ident()
    _probing[thread] = _probing.get(thread, 0) + 1
    try:
        yield
    finally:
        _probing[thread] -= 1
        if not _probing[thread]:
            del _probing[thread]


def is_probing(thread: int | None = None) -> bool:
    """Return whether a thread, by default this one, takes passes that are no part of training.

    Example:
        >>> with probing():
        ...     is_probing()
        True
    """
    return (get_ident() if thread is None else thread) in _probing


class OutputObserver:
    """A forward hook on the model that counts samples and computes the probe's gradient.

    A forward pass counts once a backward pass has gone through it to the parameters. An evaluation without
    `torch.no_grad()`, or a gradient with respect to inputs, therefore changes nothing. The probe's gradient is taken
    with `torch.autograd.grad` on the graph of the forward pass, so the model is not run again. Compiled models need
    `torch._functorch.config.donated_buffer = False` for that; the observer sets it.

    Args:
        model: the model to observe.
        importance: says what to observe and defines the `probe`.
        states: says which parameters need a gradient, and counts tasks and steps.
        outputs: takes what the model returns and gives the tensor of outputs; None is `find_outputs`.
    """

    def __init__(
        self,
        model: nn.Module,
        importance: Importance,
        states: MooringState,
        outputs: Callable[[Any], Any] | None = None,
    ) -> None:
        self.importance, self.states, self.paused = importance, states, False
        self.find_outputs = outputs or find_outputs
        self._arriving: list[list[Observation]] = []
        self._versions: list[int] = []
        self._last_versions: list[int] = []
        self._backward_pass = -1
        self._class_dimensions: dict[int, int] = {}
        self.discard()
        self._handle = model.register_forward_hook(ForwardHook(self.after_forward), with_kwargs=True)
        if importance.watches == "outputs":
            _allow_second_backward()

    def collect(self, instead: int = 0) -> Observation:
        """Return the observation since the last step over all ranks, and start a new one.

        `instead` is the number of samples that the layers saw, for a model whose parts are called instead of itself.
        """
        total = Observation(self.observation.samples, self.observation.gradients)
        if world_size() > 1:
            wanted = self.states.trained() if self.importance.watches == "outputs" else []
            total = Observation(*all_reduce_observation(total.samples, total.gradients, wanted))
        self.discard()
        if total.is_empty and instead and self.importance.watches == "samples":
            return Observation(instead)
        if total.is_empty:
            raise MooringError(
                f"{self.importance.name} saw no outputs since the last step: call the model itself, model(x), "
                "with gradients enabled before optimizer.step(), and of a compiled model attach the one that "
                "torch.compile returned"
            )
        return total

    def discard(self) -> None:
        """Drop the observation; its step was taken or skipped."""
        self.observation, self._probes, self._had_gradient = Observation(), 0, False

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        """Observe the outputs, and count them once a backward pass goes through them to the parameters."""
        inside_torch_func = torch._C._functorch.peek_interpreter_stack() is not None
        paused = self.paused or is_probing() or not self.states.reads_outputs
        if paused or not torch.is_grad_enabled() or inside_torch_func:
            return
        tensors = _differentiable_tensors(returned, set())
        if (outputs := self._outputs_in(returned, countable=bool(tensors))) is None:
            pending = [Observation(count_labels(args, kwargs, returned))]
        elif not outputs.requires_grad:
            return
        else:
            pending = [self._observe(outputs)]

        thread = get_ident()  # hooks of a GPU's tensors run in another one

        def on_gradient(gradient: Tensor) -> None:
            if pending and not is_probing(thread):
                self._await_backward()
                self._arriving.append(pending)

        def count(gradient: Tensor) -> None:
            if pending and not is_probing(thread):
                pending[0].counted = count_trained(gradient.detach(), self._class_dimension(gradient.detach()))

        if outputs is not None and self.importance.watches == "samples":
            outputs.register_hook(count)  # type: ignore[no-untyped-call]
        for tensor in tensors:
            tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        if not tensors:  # the returned object hides its tensors, so no hook can wait for a gradient
            self.observation.add(pending.pop())

    def _class_dimension(self, gradient: Tensor) -> int:
        """Return the dimension of classes, read from the first gradient of outputs with so many dimensions."""
        known = self._class_dimensions.get(gradient.ndim)
        if known is None:
            known = class_dimension_of_gradient(gradient)
            if bool(gradient.any()):
                self._class_dimensions[gradient.ndim] = known
        return known

    def _outputs_in(self, returned: Any, *, countable: bool) -> Tensor | None:
        """Return the tensor of outputs; None if there is none, and countable samples are all that is needed."""
        try:
            outputs = self.find_outputs(returned)
        except MooringError as error:
            if self.find_outputs is not find_outputs:
                raise
            if self.importance.watches == "samples" and countable:
                return None
            raise MooringError(f"{error}; or use an importance that reads no outputs, such as EWC()") from None
        if not isinstance(outputs, Tensor) and self.importance.watches == "samples" and countable:
            return None  # a detector's dictionary, say
        if not isinstance(outputs, Tensor) or outputs.ndim == 0:
            raise MooringError("outputs= must give a tensor whose first dimension is the samples")
        return outputs

    def _await_backward(self) -> None:
        """Check at the end of the running backward pass whether it reached the parameters."""
        if self._backward_pass == (current := torch._C._current_graph_task_id()):
            return
        parameters = self.states.optimizer_parameters
        self._backward_pass, self._arriving, self._versions = current, [], gradient_versions(parameters())
        cleared = self._had_gradient and self._versions != self._last_versions
        if cleared:  # only then ask whether all are 0, for which the host waits
            cleared = not any(bool(local_tensor(g).any()) for p in self.states.trained() if (g := p.grad) is not None)

        def on_end() -> None:
            arriving, self._arriving = self._arriving, []
            if gradient_versions(parameters()) == self._versions and not any(map(sharded, parameters())):
                return  # a gradient with respect to something else; the loss's own may still come
            if cleared:
                self.discard()  # GradScaler skipped a step, and its gradients were thrown away
            for pending in arriving:
                if pending:
                    self.observation.add(pending.pop())
            self._had_gradient, self._last_versions = True, gradient_versions(parameters())

        torch.autograd.Variable._execution_engine.queue_callback(on_end)

    @autocast_disabled()
    def _observe(self, outputs: Tensor) -> Observation:
        samples = count_samples(outputs)
        if self.importance.watches == "samples" or not (parameters := self.states.trained()):
            return Observation(samples)
        gathered = gathered_parameters(self.states.model)  # they stand for the sharded parameters in the graph
        parameters = [p for p in parameters if p in gathered or not sharded(p)]
        precise = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        inputs = [gathered.get(p, p) for p in parameters]
        try:
            with probing():
                scalar = self.importance.probe(precise, self._generator(outputs.device))
                gradients = torch.autograd.grad(scalar, inputs, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" in str(error).lower():
                raise MooringError(
                    f"{self.importance.name} takes an extra gradient, for which activation checkpointing needs "
                    "use_reentrant=False"
                ) from error
            raise
        pairs = zip(parameters, gradients, strict=True)
        return Observation(samples, {p: gradient for p, gradient in pairs if gradient is not None})

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return a generator seeded by task, step, probe and rank, so that a resumed run draws the same numbers."""
        self._probes += 1
        key: tuple[int, ...] = (self.importance.seed, self.states.tasks, self.states.steps, self._probes)
        key = (*key, rank()) if rank() else key  # the cross terms of two ranks with equal draws would not cancel
        return torch.Generator(device).manual_seed(zlib.crc32(repr(key).encode()))


def _differentiable_tensors(returned: Any, visited: set[int]) -> list[Tensor]:
    """Return the tensors that require a gradient in what a model returned."""
    if id(returned) in visited:
        return []
    visited.add(id(returned))
    if isinstance(returned, Tensor):
        return [returned] if returned.requires_grad else []
    parts: Iterable[Any] = getattr(returned, "__dict__", {}).values()
    if isinstance(returned, Mapping):
        parts = returned.values()
    elif dataclasses.is_dataclass(returned):
        parts = [getattr(returned, field.name) for field in dataclasses.fields(returned)]
    elif isinstance(returned, tuple | list):
        parts = returned
    return [tensor for part in parts for tensor in _differentiable_tensors(part, visited)]


def _allow_second_backward() -> None:
    """Make compiled graphs keep their saved tensors, which they otherwise free in the first backward pass.

    Graphs that were compiled before are compiled again, because they would give wrong gradients without an error.
    """
    import torch._functorch.config as config

    if config.donated_buffer:
        config.donated_buffer = False
        if hasattr(torch.compiler.config, "cache_key_tag"):  # do not reuse such a graph from the cache on disk
            torch.compiler.config.cache_key_tag += "mooring"
        if "torch._dynamo" in sys.modules:  # otherwise nothing was compiled
            torch.compiler.reset()


def gradient_versions(parameters: list[Tensor]) -> list[int]:
    """Return identities and versions that change when a gradient is replaced or written to."""
    gradients = [p.grad for p in parameters]
    parts = local_tensors([g for g in gradients if g is not None])
    return [*map(id, gradients), *[part._version for part in parts]]
