"""The gradients of one optimizer step: those of the task are collected, checked, and replaced while it lasts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import TypeVar, cast

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler
from mooring.backends.finite_guard import FiniteGuard
from mooring.backends.kernels.tensor_list import TensorLists
from mooring.distributed.dtensor import (
    all_ranks_agree,
    local_gradients,
    local_tensor,
    local_tensors,
    reduce_over_shards,
)
from mooring.errors import NonFiniteError
from mooring.rules import GradientPull, Pull, State
from mooring.rules.pull import Number, learning_rate
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import ParameterState

T = TypeVar("T")


class ParameterSteps:
    """The moored parameters that have a gradient in a step; kept from step to step as long as they are the same.

    What belongs to a parameter has its index in each list. An object for each of thousands of parameters would take the
    host longer than the rest of a step.

    Args:
        states: the states of the parameters.

    Attributes:
        parameters: the parameters.
        own_gradients: what each parameter has as its gradient when the step begins.
        g: the gradients of the task's loss on this rank's parts; nothing writes to them until the step is over.
        rates: the learning rates.
        grad_scales: the factor of g in the gradient that the optimizer gets: -1 if it maximizes, GradScaler's scale if
            a fused kernel unscales; None is 1.
        scale: GradScaler's scale, by which a fused kernel divides gradients; None if there is none.
        updates: whether this step changes the importance of each parameter; None if it changes all.
        plain: whether neither a parameter nor a gradient is sharded.
    """

    def __init__(self, states: list[ParameterState]) -> None:
        self.states, self.parameters = states, [state.parameter for state in states]
        self.own_gradients: list[Tensor] = []
        self.g: list[Tensor] = []
        self.rates: list[Number] = []
        self.grad_scales: list[Number | None] = []
        self.updates: list[bool] | None = None
        self.scale: Tensor | None = None
        self.plain = True
        self._parts: dict[str, tuple[list[int], ParameterSteps]] = {}

    def __len__(self) -> int:
        return len(self.states)

    def chosen(self, indices: Sequence[int]) -> "ParameterSteps":
        """Return the steps at some indices; the object itself if these are all."""
        if len(indices) == len(self):
            return self
        return self._filled(ParameterSteps(select(self.states, indices)), indices)

    def part(self, kind: str, belongs: Callable[[ParameterState], bool]) -> "ParameterSteps":
        """Return the steps of the states of one kind; which these are is determined once."""
        if kind not in self._parts:
            indices = [index for index, state in enumerate(self.states) if belongs(state)]
            self._parts[kind] = indices, self.chosen(indices)
        indices, part = self._parts[kind]
        return part if part is self else self._filled(part, indices)

    def _filled(self, part: "ParameterSteps", indices: Sequence[int]) -> "ParameterSteps":
        """Set the gradients, rates and flags of this step in a part of the steps."""
        part.own_gradients, part.g = select(self.own_gradients, indices), select(self.g, indices)
        part.rates, part.grad_scales = select(self.rates, indices), select(self.grad_scales, indices)
        part.updates, part.plain = self.updates and select(self.updates, indices), self.plain
        return part

    def forget_parts(self) -> None:
        """Forget which states are of which kind, because that has changed."""
        self._parts = {}

    def release(self) -> None:
        """Drop the references to gradients, whose memory is not kept between steps."""
        self.own_gradients, self.g, self.updates = [], [], None
        for _, part in self._parts.values():
            if part is not self:
                part.release()

    def numbers(self, index: int) -> dict[str, Number]:
        """Return the learning rate of a parameter, and the factor of the gradient if there is one."""
        rate, scale = self.rates[index], self.grad_scales[index]
        return {"lr": rate} if scale is None else {"lr": rate, "grad_scale": scale}


def select(values: Sequence[T], indices: Sequence[int]) -> list[T]:
    """Return the values at increasing indices, which are often all of them."""
    return list(values) if len(indices) == len(values) else [values[index] for index in indices]


def are(objects: Collection[object], others: Collection[object]) -> bool:
    """Return whether both have the same objects in the same order."""
    return len(objects) == len(others) and all(map(is_, objects, others))


def versions_of(gradients: Sequence[Tensor | None]) -> list[int]:
    """Return numbers that grow when a gradient is written to."""
    return [part._version for part in local_tensors([g for g in gradients if g is not None])]


def present_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    """Return the gradient of each parameter of an optimizer."""
    return [p.grad for group in optimizer.param_groups for p in group["params"]]


def step_tensors(
    steps: ParameterSteps,
    index: int,
    before: Mapping[Tensor, Tensor],
    probes: Mapping[Tensor, Tensor],
    *,
    pulls: bool,
    needs_anchor: bool,
) -> State:
    """Return the tensors of a parameter by name: its past only for a pull, its anchor only if it is read.

    Args:
        steps: the parameters with a gradient.
        index: the index of the parameter.
        before: the parameters before the optimizer's step, where they are kept.
        probes: the gradients of the importance's own function.
        pulls: whether a pull acts.
        needs_anchor: whether the importance reads the anchor.
    """
    state = steps.states[index]
    tensors = state.pull_tensors() if pulls else {"theta": state.theta}
    if not pulls and needs_anchor:
        tensors["anchor"] = state.device_anchor
    tensors["g"] = steps.g[index]
    tensors |= {f"state_{slot}": tensor for slot, tensor in state.importance_state.items()}
    if (parameter := before.get(state.parameter)) is not None:
        tensors["before"] = parameter
    if (probe := probes.get(state.parameter)) is not None:
        tensors["probe"] = local_tensor(probe)
    return tensors


class _KnownParameters:
    """The parameters of an optimizer, and the steps of those that are moored and had a gradient in the last step.

    Args:
        groups: the parameters of each group of the optimizer.
        gradients: the gradients of all of them.
        states: the states of the model.
    """

    def __init__(self, groups: list[list[Tensor]], gradients: Sequence[Tensor | None], states: MooringState) -> None:
        self._groups, self._records = groups, list(states.records.values())
        self._missing = [g is None for g in gradients]
        index, moored = 0, list[ParameterState]()
        self.indices: list[int] = []
        self.counts: list[int] = []
        self.free: list[Tensor] = []
        for group in groups:
            before = len(moored)
            for p in group:
                if gradients[index] is not None:
                    if (state := states.get_or_create(p)) is None:
                        self.free.append(p)
                    else:
                        moored.append(state)
                        self.indices.append(index)
                index += 1
            self.counts.append(len(moored) - before)
        self.steps = ParameterSteps(moored)
        self._shapes, self._dtypes = [s.shape for s in moored], [s.dtype for s in moored]

    def match(self, groups: list[list[Tensor]], gradients: Sequence[Tensor | None], states: MooringState) -> bool:
        """Return whether the parameters, their shapes, dtypes and states are those of the last step."""
        return (
            len(groups) == len(self._groups)
            and all(map(are, groups, self._groups))
            and [g is None for g in gradients] == self._missing
            and are(states.records.values(), self._records)
            and [p.shape for p in self.steps.parameters] == self._shapes
            and [p.dtype for p in self.steps.parameters] == self._dtypes
            and not any(p in states.names for p in self.free)
        )


class GradientCollector:
    """Collects the gradients of the task's loss; the lists are kept while the parameters are the same.

    Args:
        states: the states of the moored parameters.
        pull: the pull, which may read learning rates, or give the optimizer other gradients.
    """

    def __init__(self, states: MooringState, pull: Pull | None) -> None:
        self.states, self.penalizes = states, isinstance(pull, GradientPull)
        self.rate_reader = type(pull).__name__ if getattr(pull, "reads_lr", False) else ""
        self._known: _KnownParameters | None = None

    def forget(self) -> None:
        """Forget the parameters of the last step."""
        self._known = None

    @property
    def takes_all(self) -> bool:
        """Whether every parameter that had a gradient is moored."""
        return self._known is not None and not self._known.free

    def collect(self, optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor | None]) -> ParameterSteps:
        """Return the moored parameters that have a gradient; none if a fused kernel will skip the step."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return ParameterSteps([])
        scale = getattr(optimizer, "grad_scale", None)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        known = self._known
        if known is None or self.states.created or not known.match(groups, gradients, self.states):
            known = self._known = _KnownParameters(groups, gradients, self.states)
        steps = known.steps
        steps.own_gradients = cast("list[Tensor]", select(gradients, known.indices))
        steps.g, steps.rates, steps.grad_scales = local_gradients(steps.parameters, steps.own_gradients), [], []
        steps.plain, steps.scale = steps.g is steps.own_gradients, scale
        for group, count in zip(optimizer.param_groups, known.counts, strict=True):
            lr = group.get("lr", 1.0)
            lr = learning_rate(group, self.rate_reader) if lr is None else lr
            grad_scale: Number | None = -1.0 if group.get("maximize") else None
            if scale is not None:
                grad_scale = scale if grad_scale is None else -scale
            # torch's own optimizers leave gradients as they are, except Nesterov's foreach form
            preserves = type(optimizer).__module__.startswith("torch.optim.") and not group.get("nesterov")
            if grad_scale is not None or not preserves:
                if steps.g is steps.own_gradients:
                    steps.g = [*steps.g]
                here = slice(len(steps.rates), len(steps.rates) + count)
                pairs = zip(steps.states[here], steps.g[here], strict=True)
                steps.g[here] = [self._task_gradient(state, g, grad_scale, preserves) for state, g in pairs]
            steps.rates += [lr] * count
            steps.grad_scales += [grad_scale] * count
        return steps

    def _task_gradient(self, state: ParameterState, grad: Tensor, grad_scale: Number | None, preserves: bool) -> Tensor:
        if grad_scale is not None:
            return grad.to(state.compute_dtype) / grad_scale
        if preserves or (self.penalizes and state.previous is not None):
            return grad  # with a penalty the optimizer gets another tensor
        return grad.clone()


class ReplacedGradients:
    """Gradients swapped in for one optimizer step: with the force of a penalty, or with that of distillation.

    They are in lists, because an object for each of thousands of parameters makes Python's collector run in each step.

    Args:
        parameters: the parameters.
        task_gradients: the gradients of the task's loss, to be restored.
        replacements: the gradients that the optimizer gets.
    """

    def __init__(self, parameters: list[Tensor], task_gradients: list[Tensor], replacements: list[Tensor]) -> None:
        self.parameters, self.task_gradients, self.replacements = parameters, task_gradients, replacements
        self._versions: list[int] = []

    def __len__(self) -> int:
        return len(self.parameters)

    def set(self) -> None:
        """Give each parameter its other gradient."""
        self._versions = [gradient._version for gradient in self.replacements]
        for p, gradient in zip(self.parameters, self.replacements, strict=True):
            p.grad = gradient

    def joined(self, other: "ReplacedGradients") -> "ReplacedGradients":
        """Return these and others together."""
        return ReplacedGradients(
            [*self.parameters, *other.parameters],
            [*self.task_gradients, *other.task_gradients],
            [*self.replacements, *other.replacements],
        )

    def unscale(self, scale: Tensor) -> None:
        """Divide the task's gradients by GradScaler's scale, as the fused kernel leaves them."""
        for g in self.task_gradients:
            local_tensor(g).div_(scale)

    def restore(self, *, finished: bool) -> None:
        """Restore the task's gradients, except of parameters that were given another one since.

        Args:
            finished: whether the optimizer has taken its step; before that a gradient that was written to is kept.
        """
        lists = self.parameters, self.task_gradients, self.replacements, self._versions
        for p, task_gradient, replacement, version in zip(*lists, strict=True):
            if p.grad is replacement and (finished or replacement._version == version):
                p.grad = task_gradient


class GradientCheck:
    """Stops a step before anything changes if a gradient is not finite; on a GPU one step later, unless it waits.

    Args:
        states: the states of the moored parameters.
        lists: the tensors of a step, whose addresses are read once.
    """

    def __init__(self, states: MooringState, lists: TensorLists) -> None:
        self.states, self.lists = states, lists
        self.guard: FiniteGuard | None = None
        self._named: tuple[list[Tensor], list[str]] = [], []

    def check(self, steps: ParameterSteps, replaced: ReplacedGradients | None, *, takes_all: bool, waits: bool) -> None:
        """Raise if a gradient that the optimizer will get is not finite, moored or not.

        Args:
            steps: the moored parameters that have a gradient.
            replaced: the gradients that take the place of the task's.
            takes_all: whether these are all parameters that have a gradient.
            waits: whether the host waits for a GPU.
        """
        kind = "gradient" if replaced is None else "penalized gradient"
        if takes_all and (replaced is None or are(replaced.parameters, steps.parameters)):
            gradients: Sequence[Tensor] = steps.own_gradients if replaced is None else replaced.replacements
            others = [] if gradients is steps.g else steps.g
            self.check_tensors(kind, self._names_of(steps.parameters), gradients, others, waits=waits)
            return
        parameters, gradients = self._all_gradients()
        if replaced is not None:
            instead = dict(zip(replaced.parameters, replaced.replacements, strict=True))
            gradients = list(map(instead.get, parameters, gradients))
        checked = set(map(id, gradients))
        others = [g for g in steps.g if id(g) not in checked]
        self.check_tensors(kind, self._names_of(parameters), gradients, others, waits=waits)

    def check_task(self, *, waits: bool) -> None:
        """Raise if a gradient of the task's loss is not finite."""
        parameters, gradients = self._all_gradients()
        self.check_tensors("gradient", self._names_of(parameters), gradients, waits=waits)

    def check_tensors(
        self,
        what: str,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        others: Sequence[Tensor] = (),
        *,
        waits: bool,
    ) -> None:
        """Raise if a tensor is not finite; on a GPU it and `others` become 0 instead, and the next step raises."""
        if not waits and tensors and has_compiler(tensors[0].device):
            self.guard = self.guard or FiniteGuard()
            checked = self.lists.find(f"checked {what}", local_tensors(tensors))
            further = self.lists.find("others", local_tensors(others)) if others else None
            if self.guard.check(what, names, checked, further, whole=() if checked.tensors is tensors else tensors):
                return
        check_finite(what, list(zip(names, tensors, strict=True)))

    def report(self) -> None:
        """Raise if a gradient of a step that is over was not finite and was replaced by 0."""
        if self.guard:
            self.guard.report()

    def _all_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters of the optimizer that have a gradient, and their gradients."""
        held, strided = self.states.optimizer_parameters(), torch.strided
        parameters = [p for p in held if (g := p.grad) is not None and g.layout is strided]
        return parameters, [g for p in parameters if (g := p.grad) is not None]

    def _names_of(self, parameters: list[Tensor]) -> list[str]:
        """Return the names of parameters; those of the same parameters as before are kept."""
        if not are(parameters, self._named[0]):
            self._named = parameters, [self.states.name(p) for p in parameters]
        return self._named[1]


def check_finite(what: str, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise unless every value is finite; the error names the tensor with the largest share of bad values.

    Of the ranks that have shards of these tensors, either all raise or none.

    Args:
        what: what the tensors are, for the message.
        named: pairs of name and tensor.

    Example:
        >>> check_finite("gradient", [("weight", torch.tensor([1.0, float("nan")]))])
        Traceback (most recent call last):
        ...
        mooring.errors.NonFiniteError: the gradient of 'weight' is not finite (1 of 2 values); nothing was changed: ...
    """
    tensors = [t for _, t in named]
    parts = [local_tensor(t) for t in tensors]
    if all_ranks_agree(not parts or bool(largest_values(parts).isfinite().all()), tensors):
        return
    counts = reduce_over_shards([(~t.isfinite()).sum() for t in parts], tensors)
    bad = {name: (int(count), t.numel()) for (name, t), count in zip(named, counts, strict=True)}
    worst = max(bad, key=lambda name: bad[name][0] / max(1, bad[name][1]))
    others = sum(count > 0 for count, _ in bad.values()) - 1
    more = f", and of {others} more" if others else ""
    raise NonFiniteError(
        f"the {what} of {worst!r}{more} is not finite ({bad[worst][0]} of {bad[worst][1]} values); "
        "nothing was changed: lower the learning rate or the strength, clip gradients, or call diagnose()"
    )


def largest_values(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each tensor, NaN if it has one, in few operations for thousands of tensors.

    Example:
        >>> largest_values([torch.tensor([1.0, -3.0]), torch.zeros(0), torch.tensor([torch.nan, 1.0])])
        tensor([3., 0., nan], dtype=torch.float64)
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, t in enumerate(tensors):
        if t.numel():  # an empty tensor has no largest value
            by_kind.setdefault((t.device, t.dtype), []).append(index)
    device = tensors[0].device
    if len(by_kind) == 1 and len(next(iter(by_kind.values()))) == len(tensors):
        return torch.stack(torch._foreach_norm(list(tensors), float("inf"))).to(torch.float64)
    largest = [torch.zeros((), dtype=torch.float64, device=device)] * len(tensors)
    for indices in by_kind.values():
        norms = torch._foreach_norm([tensors[index] for index in indices], float("inf"))
        for index, value in zip(indices, torch.stack(norms).to(device, torch.float64).unbind(), strict=True):
            largest[index] = value
    return torch.stack(largest)
