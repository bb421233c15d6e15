"""The coverage of a model: which of its parameters are held, free by request, unable to move, or held by nothing."""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.distributed.dtensor import reduce_over_shards
from mooring.errors import first_and_count
from mooring.rules import Pull
from mooring.state import mooring_state
from mooring.state.displacement import is_true
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import ParameterState
from mooring.state.quantization import QuantizedImportance
from mooring.state.selection import moorable

HELD, FREE, FIXED, UNHELD = "held", "free by request", "cannot move", "unheld"

FIRST_TASK = "no task was consolidated and no reference was read yet"
NO_GRADIENT = "had no gradient in a past task"
NO_IMPORTANCE = "got an importance of 0 everywhere"
ELSEWHERE = "moved by another optimizer"

HOLD_NEW = "exclude it if it should stay free; consolidate(data=...) before training holds it"
REMEDIES = {
    FIRST_TASK: "for a model that is already trained give a reference=... or load a state",
    NO_GRADIENT: f"{HOLD_NEW}; if it makes the logits, give attach outputs= that finds them in what the model returns",
    NO_IMPORTANCE: "check that the loss of the past task depends on it; exclude it if it should stay free",
    ELSEWHERE: "attach a Mooring to that optimizer too, or exclude it",
    mooring_state.APPEARED: HOLD_NEW,
    mooring_state.REPLACED: HOLD_NEW,
    mooring_state.RESHAPED: HOLD_NEW,
    mooring_state.NOT_TRAINED: HOLD_NEW,
    mooring_state.NOT_ESTIMATED: "unfreeze parameters and give them to the optimizer before the reference or data",
}
"""What to do about a parameter that nothing holds, by reason."""


@dataclass(frozen=True)
class ParameterCoverage:
    """Whether one parameter of a model is held.

    Attributes:
        name: the parameter's name.
        size: the number of its weights.
        status: "held", "free by request", "cannot move" or "unheld".
        how: by what it is held, "scores", "factors", or the "product" of a low-rank adapter; empty if it is not.
        reason: why it is not held, or why it has scores although the importance is by layer.
        remedy: what to do if it should be.
    """

    name: str
    size: int
    status: str
    how: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Coverage:
    """The result of `Mooring.coverage`: print it, or use `to_dict()`.

    Attributes:
        tasks: the number of consolidated tasks.
        parameters: one entry for each parameter of the model, in its order.
    """

    tasks: int
    parameters: tuple[ParameterCoverage, ...]

    def of(self, status: str) -> list[ParameterCoverage]:
        """Return the parameters with this status."""
        return [entry for entry in self.parameters if entry.status == status]

    @property
    def held(self) -> list[ParameterCoverage]:
        """The parameters that the next pull would return to their anchors."""
        return self.of(HELD)

    @property
    def unheld(self) -> list[ParameterCoverage]:
        """The parameters that can move, are not free by request, and that nothing holds."""
        return self.of(UNHELD)

    @property
    def summary(self) -> str:
        """One line: how many parameters are held, and the first of those that are not.

        Example:
            >>> Coverage(1, (ParameterCoverage("body", 6, HELD), ParameterCoverage("head", 2, FREE))).summary
            '1 of 2 parameters held (6 of 8 weights), 1 free by request'
        """
        if not self.tasks:
            return f"nothing held yet: first task; {REMEDIES[FIRST_TASK]}"
        weights = sum(entry.size for entry in self.held), sum(entry.size for entry in self.parameters)
        line = f"{len(self.held)} of {len(self.parameters)} parameters held ({weights[0]:,} of {weights[1]:,} weights)"
        line += "".join(f", {len(entries)} {status}" for status in (FREE, FIXED) if (entries := self.of(status)))
        return line + (f", {len(self.unheld)} unheld: {describe_unheld(self.unheld)}" if self.unheld else "")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings and lists."""
        parameters = [asdict(entry) for entry in self.parameters]
        return {"tasks": self.tasks, "summary": self.summary, "parameters": parameters}

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for entry in self.parameters:
            if entry.status != HELD and self.tasks:
                groups.setdefault((entry.status, entry.reason, entry.remedy), []).append(entry.name)
        lines = [
            f"{status}: {', '.join(names)}: {reason}" + (f"; {remedy}" if remedy else "")
            for (status, reason, remedy), names in sorted(groups.items(), key=lambda group: group[0][0] != UNHELD)
        ]
        return "\n".join([self.summary, *lines])


def describe_unheld(entries: Collection[ParameterCoverage]) -> str:
    """Return the first name of each reason, the number of the others, and the remedy.

    Example:
        >>> describe_unheld([ParameterCoverage(name, 1, UNHELD, "", "appeared", "train it") for name in "abc"])
        "'a' and 2 others appeared (train it)"
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry.reason, entry.remedy), []).append(entry.name)
    return "; ".join(f"{first_and_count(names)} {why} ({remedy})" for (why, remedy), names in groups.items())


@torch.no_grad()
def find_coverage(
    states: MooringState, pull: Pull, *, elsewhere: Collection[str] = (), siblings: Collection[Tensor] = ()
) -> Coverage:
    """Return the coverage of a model; under `fully_shard`, on every rank at once.

    Args:
        states: the states of the moored parameters.
        pull: the pull; one with strength 0 holds nothing, by request.
        elsewhere: the names of parameters that moved although the optimizer does not train them.
        siblings: the parameters that other Moorings of the model train.
    """
    states.refresh()
    known = [state for state in states.records.values() if state.has_previous]
    held = {state.parameter for state, any_score in zip(known, _any_scores(known), strict=True) if any_score}
    in_optimizer, entries = {*states.optimizer_parameters()}, []
    for p, name in moorable(states.model, ()).items():
        if not (size := p.numel()):
            if p in states.products.reasons:  # an adapter of rank 0
                entries.append(ParameterCoverage(name, 0, FIXED, "", states.products.reasons[p]))
            continue
        status, how, reason, remedy = UNHELD, "", "", ""
        if p not in states.names:
            status, reason, remedy = FREE, "is excluded", "to hold it, leave it out of exclude"
        elif p not in in_optimizer and name in elsewhere and p not in siblings:
            reason = ELSEWHERE
        elif p not in in_optimizer:
            status, reason = FIXED, "has another Mooring" if p in siblings else "is not in the optimizer"
        elif not p.requires_grad:
            status, reason = FIXED, "is frozen, requires_grad=False"
        elif states.tasks and _is_zero(pull):
            status, reason, remedy = FREE, "is moored with a pull of strength 0", "to hold it, give one above 0"
        elif p in held:
            own, status = states.records[p], HELD
            how = "product" if own.held_with else "factors" if own.factors else "scores"
            reason = states.products.reasons.get(p, "" if own.held_with else states.diagonal_reasons.get(p, ""))
        else:
            reason = _why_unheld(states, p)
        if status == UNHELD:
            remedy = REMEDIES.get(reason, HOLD_NEW)
        entries.append(ParameterCoverage(name, size, status, how, reason, remedy))
    return Coverage(states.tasks, tuple(entries))


def _why_unheld(states: MooringState, p: Tensor) -> str:
    """Return why nothing holds a parameter that the optimizer trains."""
    state = states.records.get(p)
    if not states.tasks:
        return FIRST_TASK
    if state is None:
        return states.reason_of_new_state(states.names[p])
    return NO_IMPORTANCE if state.has_previous else state.unheld_reason or NO_GRADIENT


def _any_scores(states: Iterable[ParameterState]) -> list[bool]:
    """Return whether each parameter has an importance that is not 0 somewhere, on any rank."""
    known = list(states)
    scores = [_scores(state) for state in known]
    flags = [score.any().float() if not score.is_meta else torch.ones(()) for score in scores]
    return is_true(reduce_over_shards(flags, [state.parameter for state in known], "max"))


def _scores(state: ParameterState) -> Tensor:
    if state.is_product_input:
        assert state.held_with is not None
        return _scores(state.held_with)
    if state.factors:
        return state.factors.past_is_known()
    assert state.previous is not None
    return state.previous.code if isinstance(state.previous, QuantizedImportance) else state.previous


def _is_zero(pull: Pull) -> bool:
    """Return whether a pull has strength 0 and therefore holds nothing."""
    strengths = (getattr(pull, option, None) for option in ("strength", "stiffness"))
    return any(isinstance(strength, int | float) and strength == 0 for strength in strengths)
