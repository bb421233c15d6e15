"""Sees the outputs of a model's forward pass, counts samples and takes one extra gradient of them."""

import dataclasses
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mooring.distributed.collectives import rank, seen_over_ranks
from mooring.distributed.dtensor import leaves, local_tensor, sharded
from mooring.errors import MooringError
from mooring.importance import Importance
from mooring.observe.forward_hook import ForwardHook
from mooring.state.mooring_state import MooringState, marks

__all__ = ["Observation", "OutputObserver", "count_samples", "find_outputs"]

_HOW = "pass outputs=, a function from what the model returns to the tensor of its outputs"


@dataclasses.dataclass
class Observation:
    """What the forward passes since the last step showed: samples, and the probe's gradient by parameter."""

    samples: int = 0
    gradients: dict[Tensor, Tensor] = dataclasses.field(default_factory=dict)

    def of(self, parameter: Tensor) -> Tensor | None:
        """The probe's gradient of a parameter, where the outputs depend on it."""
        return self.gradients.get(parameter)

    def add(self, other: "Observation") -> None:
        """Join another forward pass to this one: both are sums over samples."""
        self.samples += other.samples
        for parameter, gradient in other.gradients.items():
            known = self.gradients.get(parameter)  # autograd may give one tensor for two parameters
            self.gradients[parameter] = gradient if known is None else known + gradient


def find_outputs(returned: Any) -> Tensor:
    """The tensor of outputs in what a model returned, its first dimension the samples.

    A tensor is itself; a tuple or list gives its first tensor that is not a scalar; a mapping or dataclass gives
    its `logits`.

    Example:
        >>> find_outputs({"loss": torch.tensor(1.0), "logits": torch.zeros(4, 10)}).shape
        torch.Size([4, 10])
    """
    found = returned
    if isinstance(returned, Mapping):
        found = returned.get("logits")
    elif dataclasses.is_dataclass(returned):
        found = getattr(returned, "logits", None)
    elif isinstance(returned, tuple | list):
        found = next((t for t in returned if isinstance(t, Tensor) and t.ndim > 0), None)
    if isinstance(found, Tensor) and found.ndim > 0 and found.is_floating_point():
        return found
    raise MooringError(f"cannot find the outputs in the {type(returned).__name__} that the model returned; {_HOW}")


def count_samples(outputs: Tensor) -> int:
    """How many predictions the outputs hold: (B, C) has B, a batch of sequences (B, T, C) has B * T.

    Example:
        >>> count_samples(torch.zeros(4, 10)), count_samples(torch.zeros(4, 7, 10))
        (4, 28)
    """
    return outputs.shape[0] * outputs.shape[1] if outputs.ndim == 3 else outputs.shape[0]


class OutputObserver:
    """A forward hook on the model.

    A forward pass counts once a backward pass has gone through it to the parameters, so an evaluation that forgot
    `torch.no_grad()`, or a gradient with respect to inputs, leaves no trace. The extra gradient is taken with
    `torch.autograd.grad` on the graph that the loss will use too: nothing of the model is run again. For compiled
    models that means `torch._functorch.config.donated_buffer = False`, from here on.

    Args:
        model: the model whose forward pass is watched.
        importance: says what to watch, and has the `probe`.
        states: knows which parameters' gradients are wanted, and the time.
        outputs: from what the model returns to the tensor of outputs; None looks for it.
    """

    looking: ClassVar[bool] = False
    """Whether some extra gradient is being taken, which is not a backward pass of a loss."""

    def __init__(
        self,
        model: nn.Module,
        importance: Importance,
        states: MooringState,
        outputs: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.importance = importance
        self.states = states
        self.find = outputs or find_outputs
        self.seen = Observation()
        self.paused = False
        self._arriving: list[list[Observation]] = []
        self._marks: list[int] = []
        self._random: torch.Generator | None = None
        self._pass = -1
        self._looks = 0
        self._had_gradient = False
        self._handle = model.register_forward_hook(ForwardHook(self))
        if importance.watches == "outputs":
            _let_graphs_be_differentiated_twice()

    def take(self, instead: int = 0) -> Observation:
        """What was seen since the last step, by all ranks together; a new count begins.

        Args:
            instead: the samples that others saw, of a model whose parts are called and not itself.
        """
        wanted = self.states.trained() if self.importance.watches == "outputs" else []
        seen = Observation(*seen_over_ranks(self.seen.samples, self.seen.gradients, wanted))
        self.forget()
        if seen.samples == 0 and instead and self.importance.watches == "samples":
            return Observation(instead)
        if seen.samples == 0:
            raise MooringError(
                f"{self.importance.name} saw no outputs since the last step: call the model itself, model(x), "
                "with gradients enabled before optimizer.step()"
            )
        return seen

    def forget(self) -> None:
        """Drop what was seen: the step it belonged to was taken, or skipped."""
        self.seen, self._looks, self._had_gradient = Observation(), 0, False

    def remove(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def after_forward(self, module: nn.Module, args: Any, returned: Any) -> None:
        """The model has run: look at its outputs, and keep what was found until a backward pass comes through."""
        if self.paused or OutputObserver.looking or not torch.is_grad_enabled():
            return  # an evaluation
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return  # inside torch.func
        outputs = self.find(returned)
        if not isinstance(outputs, Tensor) or outputs.ndim == 0:
            raise MooringError("outputs= must give a tensor whose first dimension is the samples")
        if not outputs.requires_grad:
            return
        pending = [self._look(outputs)]

        def commit(gradient: Tensor) -> None:
            if pending and not OutputObserver.looking:
                self._expect()
                self._arriving.append(pending)

        tensors = _tensors(returned, set())
        for tensor in tensors:
            tensor.register_hook(commit)  # type: ignore[no-untyped-call]
        if not tensors:
            self.seen.add(pending.pop())  # nothing to wait for in an object that hides its tensors

    def _expect(self) -> None:
        """A backward pass is under way: when it is over, see whether it reached the parameters."""
        if self._pass == (current := torch._C._current_graph_task_id()):
            return
        self._pass, self._arriving, self._marks = current, [], marks(self.states.held())
        cleared = self._had_gradient and not self._some_gradient()

        def arrived() -> None:
            arriving, self._arriving = self._arriving, []
            if marks(self.states.held()) == self._marks and not any(map(sharded, self.states.held())):
                return  # a gradient with respect to something else; the loss's own may still come
            if cleared:
                self.forget()  # GradScaler skipped a step, and its gradients were thrown away
            for pending in arriving:
                if pending:
                    self.seen.add(pending.pop())
            self._had_gradient = self._some_gradient()

        torch.autograd.Variable._execution_engine.queue_callback(arrived)

    def _look(self, outputs: Tensor) -> Observation:
        samples = count_samples(outputs)
        parameters = self.states.trained()
        if self.importance.watches == "samples" or not parameters:
            return Observation(samples)
        gathered = leaves(self.states.model)  # what stands for a sharded parameter in the graph
        parameters = [p for p in parameters if p in gathered or not sharded(p)]
        wide = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        OutputObserver.looking = True
        try:
            scalar = self.importance.probe(wide, self._generator(outputs.device))
            inputs = [gathered.get(p, p) for p in parameters]
            gradients = torch.autograd.grad(scalar, inputs, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" in str(error).lower():
                raise MooringError(
                    f"{self.importance.name} takes an extra gradient, for which activation checkpointing needs "
                    "use_reentrant=False"
                ) from error
            raise
        finally:
            OutputObserver.looking = False
        pairs = zip(parameters, gradients, strict=True)
        return Observation(samples, {p: gradient for p, gradient in pairs if gradient is not None})

    def _generator(self, device: torch.device) -> torch.Generator:
        """Random numbers of its own, fixed by the time and the rank: a resumed run draws the same."""
        self._looks += 1
        moment: tuple[int, ...] = (self.importance.seed, self.states.tasks, self.states.steps, self._looks)
        moment = (*moment, rank()) if rank() else moment  # where two ranks drew alike, their scores would not cancel
        if self._random is None or self._random.device != device:
            self._random = torch.Generator(device)
        return self._random.manual_seed(zlib.crc32(repr(moment).encode()))

    def _some_gradient(self) -> bool:
        return any(p.grad is not None and bool(local_tensor(p.grad).any()) for p in self.states.trained())


def _tensors(returned: Any, visited: set[int]) -> list[Tensor]:
    """The differentiable tensors in what a model returned."""
    if id(returned) in visited:
        return []
    visited.add(id(returned))
    if isinstance(returned, Tensor):
        return [returned] if returned.requires_grad else []
    if isinstance(returned, Mapping):
        parts = list(returned.values())
    elif dataclasses.is_dataclass(returned):
        parts = [getattr(returned, field.name) for field in dataclasses.fields(returned)]
    elif isinstance(returned, tuple | list):
        parts = list(returned)
    else:
        parts = list(getattr(returned, "__dict__", {}).values())
    return [tensor for part in parts for tensor in _tensors(part, visited)]


def _let_graphs_be_differentiated_twice() -> None:
    """Compiled graphs give their saved tensors away in the first backward pass, unless told not to.

    What was compiled before is compiled again: it would give wrong gradients in silence.
    """
    import torch._functorch.config as config

    if config.donated_buffer:
        config.donated_buffer = False
        if hasattr(torch.compiler.config, "cache_key_tag"):  # nor take it from the cache on disk
            torch.compiler.config.cache_key_tag += "mooring"
        if "torch._dynamo" in sys.modules:  # where it is not, nothing was compiled
            torch.compiler.reset()
