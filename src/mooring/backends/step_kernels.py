"""The rules of a step over lists of parameters, in generated kernels, and the memory of penalized gradients."""

from collections.abc import Mapping, Sequence
from operator import is_

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler, penalty_rule, run_in_chunks, step_rule
from mooring.backends.fused import FusedRule, KernelArgs
from mooring.backends.gradients import ParameterSteps, step_tensors
from mooring.backends.kernels.tensor_list import TensorForm, TensorList, TensorLists
from mooring.distributed.dtensor import local_tensor, local_tensors
from mooring.rules import GradientPull, Importance, ParameterPull, Pull
from mooring.rules.pull import Number

SMALL = 1 << 14
"""Weights of a parameter whose penalized gradient is kept between steps."""


class StepKernels:
    """The generated kernels of a step, their plans, and the memory of penalized gradients.

    Args:
        importance: the importance.
        pull: the pull.
        lists: the tensors of a step, whose addresses are read once.

    Attributes:
        step: the rule after the optimizer's step.
        penalty: the rule before it.
    """

    def __init__(self, importance: Importance, pull: Pull | None, lists: TensorLists) -> None:
        self.importance, self.pull, self.lists = importance, pull, lists
        parameter_pull = pull if isinstance(pull, ParameterPull) else None
        self.step = FusedRule(lambda kind: step_rule(importance, parameter_pull if kind[1] else None, updates=kind[0]))
        self.penalty = FusedRule(lambda kind: penalty_rule(pull)) if isinstance(pull, GradientPull) else None
        self.small = SmallGradients()

    def invalidate(self) -> None:
        """Discard plans: tensors that are kept have other addresses now."""
        self.small = SmallGradients()
        self.step.invalidate()
        if self.penalty:
            self.penalty.invalidate()

    def run_step(
        self,
        steps: ParameterSteps,
        before: Mapping[Tensor, Tensor],
        probes: Mapping[Tensor, Tensor],
        samples: Number,
        *,
        accumulates: bool,
        pulls: bool,
    ) -> Sequence[int]:
        """Run the rule after the optimizer's step where possible; return the indices of the remaining parameters."""

        def args(index: int) -> KernelArgs:
            state = steps.states[index]
            numbers = {"lr": steps.rates[index], "count": state.count, "samples": samples}
            needs_anchor = self.importance.needs_anchor
            tensors = step_tensors(steps, index, before, probes, pulls=pulls, needs_anchor=needs_anchor)
            return KernelArgs(
                tensors, numbers, state.compute_dtype, kinds[index], anchor_moves=state.staged is not None
            )

        def tensors(name: str) -> TensorList:
            if name in ("before", "probe"):
                own = before if name == "before" else probes
                known = map(own.get, steps.parameters, steps.parameters)  # itself where p's kernel does not read it
                return self.lists.find(name, [local_tensor(t) for t in known])
            return self._present(name, steps)

        def numbers(name: str) -> Sequence[Number]:
            return [samples] * len(steps) if name == "samples" else _numbers(name, steps)

        updating, resting = (accumulates, pulls), (False, pulls)
        kinds = [updating] * len(steps)
        if steps.updates is not None:
            kinds = [updating if updates else resting for updates in steps.updates]
        return self.step.run(steps.states, kinds, args, tensors, numbers)

    def penalize(self, pull: GradientPull, steps: ParameterSteps) -> list[Tensor]:
        """Return the penalized gradient of each parameter, which has a step of its own."""
        theta = self._present("theta", steps)
        gradients = self.small.allocate(steps.parameters, theta.form, steps.own_gradients)
        parts = local_tensors(gradients)

        def args(index: int) -> KernelArgs:
            state = steps.states[index]
            tensors = {**state.pull_tensors(), "g": steps.g[index], "penalized": parts[index]}
            return KernelArgs(tensors, steps.numbers(index), state.compute_dtype, anchor_moves=state.staged is not None)

        def tensors(name: str) -> TensorList:
            if name == "theta":
                return theta
            return self.lists.find(name, parts) if name == "penalized" else self._present(name, steps)

        remaining = list(range(len(steps)))
        if self.penalty and any(has_compiler(p.device) for p in steps.parameters):
            kinds = [scale is None for scale in steps.grad_scales]
            remaining = self.penalty.run(steps.states, kinds, args, tensors, lambda name: _numbers(name, steps))
        for index in remaining:
            arg = args(index)
            run_in_chunks(penalty_rule(pull), arg.tensors, arg.numbers, arg.dtype)
        return gradients

    def _present(self, name: str, steps: ParameterSteps) -> TensorList:
        """Return the parameters on this rank, their gradients or their anchors, where they are in this step."""
        if name == "g":
            return self.lists.find(name, steps.g)
        if name == "anchor":
            return self.lists.find(name, [state.device_anchor for state in steps.states])
        assert name == "theta"
        parts = steps.parameters if steps.plain else local_tensors(steps.parameters)
        return self.lists.find(name, parts).replace(parts)


def _numbers(name: str, steps: ParameterSteps) -> Sequence[Number]:
    """Return a number of each parameter, by name."""
    if name == "lr":
        return steps.rates
    if name == "grad_scale":
        return [1.0 if scale is None else scale for scale in steps.grad_scales]
    assert name == "count"
    return [state.count for state in steps.states]


class SmallGradients:
    """Memory of the penalized gradients of small parameters, kept from step to step.

    To allocate one takes the host as long as the rest of the step of a small parameter.

    Attributes:
        tensors: the memory; None for parameters that are not small.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self._parameters: list[Tensor] = []
        self._form: TensorForm | None = None
        self._addresses: list[int] = []

    def allocate(self, parameters: list[Tensor], form: TensorForm, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return a tensor for the penalized gradient of each parameter.

        What is kept is allocated again if an optimizer has given it other memory: kernels know its addresses.

        Args:
            parameters: the parameters; for others it is allocated again, too.
            form: their form, likewise.
            gradients: their gradients now; after a step that failed these may be what is kept.
        """
        kept = [t for t in self.tensors if t is not None]
        known = parameters is self._parameters and form is self._form and _addresses(kept) == self._addresses
        if not known or any(map(is_, self.tensors, gradients)):
            self.tensors = [None if p.numel() > SMALL else torch.empty_like(p) for p in parameters]
            kept = [t for t in self.tensors if t is not None]
            self._parameters, self._form, self._addresses = parameters, form, _addresses(kept)
        if len(kept) == len(parameters):
            return self.tensors  # type: ignore[return-value]
        return [torch.empty_like(p) if t is None else t for p, t in zip(parameters, self.tensors, strict=True)]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of the parts on this rank."""
    return list(map(Tensor.data_ptr, local_tensors(tensors)))
