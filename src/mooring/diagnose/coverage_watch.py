"""Warns, once a task begins, of replaced weights, of what nothing holds, and of budgets without a reference."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from mooring.diagnose.coverage import ELSEWHERE, REMEDIES, ParameterCoverage, describe_unheld, find_coverage
from mooring.distributed.dtensor import local_tensor, version_of
from mooring.errors import UnheldWarning, first_and_count, warn
from mooring.rules import Budget, Pull
from mooring.state.displacement import displaced
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import ParameterState
from mooring.state.selection import moorable

MAX_WRITES = 4
"""How often a parameter may be written to after the last step and not be trained: weights are loaded or averaged."""


class CoverageWatch:
    """The checks of one Mooring; each parameter is warned of once.

    They need values of parameters at the first step of a task only, and when a parameter gets its state.

    Args:
        states: the states of the moored parameters.
        pull: the pull.

    Attributes:
        pending: unheld parameters that had no gradient since they were found, and were not warned of.
        stepped: a parameter that the last step moved, and its version after that step; written by each step.
        between_steps: the most that it was written to between two steps, such as by a user's clamp.
    """

    def __init__(self, states: MooringState, pull: Pull) -> None:
        self.states, self.pull = states, pull
        self._moved_elsewhere: set[str] = set()
        self._outside: dict[Tensor, int] = {}  # versions of parameters that the optimizer does not train
        self.pending: dict[Tensor, ParameterCoverage] = {}
        self._warned: set[str] = set()
        self._checked_task = 0
        self._checked_budget = False
        self._unseen_task = 0  # the task whose training this Mooring was warned not to have seen
        self.stepped: tuple[Tensor, int] | None = None
        self.between_steps = 0

    def before_step(self, moving: Iterable[ParameterState], *, created: bool) -> None:
        """Check the parameters that the optimizer is about to move; `created` says that some have a new state."""
        states, moving = self.states, list(moving)
        if not states.steps:
            self._outside = {p: version_of(p) for p in self._trainable_outside()}
            if states.tasks != self._checked_task:
                self._checked_task = states.tasks
                self._warn_of_other_weights(moving)
        if not states.tasks:
            self._warn_of_budget_without_reference()
            return
        if not states.steps or created:
            unheld = {entry.name: entry for entry in find_coverage(states, self.pull).unheld}
            self.pending = {p: unheld[n] for p, n in states.names.items() if n in unheld and n not in self._warned}
        if self.pending and any(state.parameter in self.pending for state in moving):
            entries, self.pending = list(self.pending.values()), {}
            self._warned |= {entry.name for entry in entries}
            warn(
                f"training moves parameters that nothing holds: {describe_unheld(entries)}; moor.coverage() lists them",
                UnheldWarning,
            )

    def moved_by_mooring(self) -> None:
        """Forget what was written since the last step: the end of a task returns parameters towards their anchors."""
        if self.stepped:
            self.stepped = self.stepped[0], version_of(self.stepped[0])

    def warn_of_unseen_steps(self, siblings: Collection[Tensor]) -> None:
        """Warn of training that went on after the last step that this Mooring saw."""
        writes = self._writes_since_step()
        if self.stepped and self.stepped[0] not in siblings and writes > self.between_steps + MAX_WRITES:
            name = self.states.names.get(self.stepped[0], "a parameter")
            self.moved_by_mooring()
            warn(
                f"{name!r} was written to {writes} times after the last step that this Mooring saw; if that was "
                "training, nothing was held: call moor.rebind(optimizer) as soon as you make a new optimizer, and do "
                "not detach() before training ends",
                UnheldWarning,
            )

    @property
    def rewritten(self) -> bool:
        """Whether parameters were written since the last step more often than between two steps of training."""
        return self._writes_since_step() > self.between_steps

    def _writes_since_step(self) -> int:
        return version_of(self.stepped[0]) - self.stepped[1] if self.stepped else 0

    def moved_elsewhere(self) -> set[str]:
        """Return the names of parameters that moved in a task although the optimizer does not train them."""
        moved = (p for p, version in self._outside.items() if version_of(p) != version)
        self._moved_elsewhere |= {self.states.names[p] for p in moved if p in self.states.names}
        return self._moved_elsewhere

    def before_finish(self, siblings: Collection[Tensor]) -> None:
        """Warn of parameters that moved in this task and that no step of this Mooring moved."""
        self._warn_of_other_training(siblings)
        states = self.states
        if not states.tasks or states.steps or states.tasks == self._unseen_task:
            return
        if names := displaced(state for state in states.records.values() if state.has_previous):
            self._unseen_task = states.tasks
            warn(
                f"{first_and_count(names)} moved since the last task or reference, and this Mooring saw no step of its "
                "optimizer, so nothing was held in training: call moor.rebind(optimizer) when you make a new "
                "optimizer, and do not detach() before training ends",
                UnheldWarning,
            )

    def end_task(self, siblings: Collection[Tensor]) -> None:
        """Warn of parameters that moved in this task by an optimizer without a Mooring."""
        self._warn_of_other_training(siblings)
        self.forget_versions()

    def _warn_of_other_training(self, siblings: Collection[Tensor]) -> None:
        """Warn of what other optimizers moved, and of parameters that are no part of the model any more."""
        moored = {self.states.names[p] for p in siblings if p in self.states.names}
        if names := sorted(self.moved_elsewhere() - moored - self._warned):
            self._warned |= {*names}
            warn(
                f"{first_and_count(names)} {ELSEWHERE}, and nothing holds what the model knows there: "
                f"{REMEDIES[ELSEWHERE]}; moor.coverage() lists what is held",
                UnheldWarning,
            )
        if {*self.states.optimizer_parameters()}.isdisjoint(moorable(self.states.model, ())):
            warn(
                "the optimizer holds none of the model's parameters any more, so its steps change nothing and nothing "
                "is held: load_state_dict(assign=True) and similar calls replace parameters, so make the optimizer "
                "after them, and attach to it or call moor.rebind(optimizer)",
                UnheldWarning,
            )
        self.warn_of_unseen_steps(siblings)

    def forget_versions(self) -> None:
        """Forget the versions of parameters; weights that are loaded do not count."""
        self._outside = {}
        self.stepped, self.between_steps = None, 0

    def _trainable_outside(self) -> list[Tensor]:
        own = {*self.states.optimizer_parameters()}
        return [p for p in self.states.names if p.requires_grad and p not in own]

    def _warn_of_other_weights(self, moving: Iterable[ParameterState]) -> None:
        if names := displaced(state for state in moving if state.has_previous):
            warn(
                f"{first_and_count(names)} changed between the last task or reference and training, so training pulls "
                "the old values back: load weights before attach(reference=...) or consolidate(); if the new values "
                "are right, call consolidate() again before training",
                UnheldWarning,
            )

    def _warn_of_budget_without_reference(self) -> None:
        """Warn at the first step if the pull is a budget and the model was trained before.

        Before that step a state may still be loaded, or data consolidated. A model that shows no sign of training is
        taken to start from scratch, where a first task has nothing to hold.
        """
        if self._checked_budget or self.states.steps or not isinstance(self.pull, Budget):
            return
        self._checked_budget = True
        if evidence := evidence_of_training(self.states):
            warn(
                f"Budget({self.pull.nats:g}) has no reference and the model was trained before ({evidence}), so "
                "nothing is held or measured in this task, and after consolidate() forgetting is only estimated: give "
                "attach(reference=...) data that shows what the model knows",
                UnheldWarning,
            )


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
    norms = ((name, module) for name, module in states.model.named_modules() if "Norm" in type(module).__name__)
    for name, module in norms:
        own = [p for p in (getattr(module, "weight", None), getattr(module, "bias", None)) if p in states.names]
        if own and all(map(_differs_within, own)):
            return f"the weights of {name!r} are not those of a new layer"
    return ""


def _has_history(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has taken a step; Adagrad and others have a state before their first one."""
    state = next((state for state in optimizer.state.values() if isinstance(state, dict)), {})
    steps = state.get("step", 0)
    counted = isinstance(steps, int | float | Tensor) and bool(torch.as_tensor(steps).any())  # of each row in some
    return counted or state.get("momentum_buffer") is not None


def _differs_within(p: Tensor) -> bool:
    """Return whether the elements of a vector differ from each other, on this rank."""
    if p.is_meta or p.ndim != 1:
        return False
    values = local_tensor(p)
    return bool((values != values[:1]).any())
