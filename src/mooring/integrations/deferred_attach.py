"""A Mooring that is attached once a training library has created its model and optimizer."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mooring.attachment import UnreadReference, attach
from mooring.distributed.dtensor import gathered, rank
from mooring.errors import MooringError, UnheldWarning, unknown, warn
from mooring.integrations.state_file import load, load_for, save
from mooring.mooring import Mooring
from mooring.rules import State
from mooring.state.memory import Memory

SavedState = State | str | Path | None
"""The state of a Mooring, the file or folder that it was saved to, or None."""


MEASURED = "mooring/measured_nats"
"""The name under which measured forgetting is logged."""


class MooringOwner:
    """The part that the callbacks of training libraries share: options of `mooring.attach`, and later the Mooring.

    A library may create a new optimizer for each task, to which the Mooring is bound then. It may also create a new
    model with the weights of the model before, which is moored with that one's state.

    Args:
        state: the state that the first Mooring resumes from; None starts without one.
        options: options of `mooring.attach`, kept until the library has created its model and optimizer.
        consolidates: whether the library ends tasks by `consolidate()`, for which training has to be observed.
        verbose: whether to print what is held when training begins, and what was forgotten when it ends.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> owner = MooringOwner(None, {"importance": "uniform"})
        >>> first = owner._attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> first.consolidate()
        >>> owner._attach(model, torch.optim.SGD(model.parameters(), lr=0.1)).tasks
        1
    """

    def __init__(
        self, state: SavedState, options: dict[str, Any], *, consolidates: bool = True, verbose: bool = True
    ) -> None:
        allowed = attach.__kwdefaults__ or {}
        for name in options.keys() - allowed.keys():
            raise unknown("option of mooring.attach", name, allowed)
        if consolidates and "memory" not in options:
            options = {**options, "memory": Memory()}
        self._options, self.verbose = options, verbose
        self._state = load(state) if isinstance(state, str | Path) else state
        self._moor: Mooring | None = None

    @property
    def moor(self) -> Mooring:
        """The Mooring; it exists from the start of the first training."""
        if self._moor is None:
            raise MooringError(
                "there is no Mooring before training: train first, or give the state to resume from as state="
            )
        return self._moor

    def _attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, resumes: bool = False, reference: Any = None
    ) -> Mooring:
        """Return the Mooring of this model and optimizer, with the state so far.

        Args:
            model: the model; a new one must have the weights of the model before, whose state it continues.
            optimizer: its optimizer.
            resumes: whether a state is loaded right after this call.
            reference: the reference in batches, instead of that of the options. It is read only if there is no state.
        """
        before = self._moor
        if before is not None and before.model is model:
            before.rebind(optimizer)
            self._move_to_model()
            return before
        if before is not None:
            if not resumes:
                _check_same_weights(before.model, model)
                self._state = before.state_dict()
            before.detach()
        has_state = resumes or self._state is not None
        if has_state and self._options.get("reference") is not None:
            reference = UnreadReference()
        moor = attach(model, optimizer, **self._options | ({} if reference is None else {"reference": reference}))
        if self._state is not None:
            try:
                moor.load_state_dict(self._state)
            except MooringError:
                moor.detach()
                raise
        self._moor, self._state = moor, None
        return moor

    def _move_to_model(self) -> None:
        """Move the state to the model's device; Lightning moves the model to the GPU for training, and back."""
        states = self.moor._states
        slots = ((state, slot, t) for state in states.records.values() for slot, t in state.slots().items())
        if any(t.device != s.theta.device for s, slot, t in slots if slot != "anchor" or not states.memory.host):
            self.moor.load_state_dict(self.moor.state_dict())

    def _next_state(self) -> State | None:
        """Return the state that the next Mooring would resume from; None if there is none."""
        return self._state if self._moor is None else self._moor.state_dict()

    def _resume(self, state: State) -> None:
        """Load this state now, or as soon as there is a Mooring."""
        if self._moor is None:
            self._state = state
        else:
            self._moor.load_state_dict(state)

    def _resume_from(self, *files: Path) -> Path:
        """Load the first of these files whose state belongs to the model's present weights, and return it."""
        state, file = load_for(self.moor.model, files)
        self.moor.load_state_dict(state)
        return file

    def print_coverage(self) -> None:
        """Print on stderr, in the first process, what is held in the training that begins; not if verbose is false."""
        if not self.verbose:
            return
        summary = self.moor.coverage().summary  # ranks with shards find it together
        if rank() == 0:
            print(f"mooring: {summary}", file=sys.stderr)

    def warn_if_unfinished(self, what: str) -> None:
        """Warn that a model is saved or used whose budget is exceeded, because `finish()` was not called.

        Args:
            what: what is done with the model, such as "saved".
        """
        if self._moor is None or not self._moor.exceeds_budget or rank():
            return
        last = self._moor.measured_history[-1]
        warn(
            f"the model is {what} with {last.nats:.3g} nats forgotten, and {last.named:g} are allowed, because its "
            "task was not ended: call moor.finish() or consolidate() before",
            UnheldWarning,
        )

    def end_task(self) -> None:
        """Consolidate, and print on stderr what was forgotten, as `print_coverage` does, if that was measured.

        A task of which no importance is kept cannot be consolidated. It ends all the same, and a warning says so.
        """
        if self.moor.needs_data and self.moor.tasks:
            forgotten = self.moor.end_unheld_task()
            warn(
                'what this training taught is not held in the next one, because Memory(current="none") keeps no '
                "importance of it: give memory=Memory() to hold it, unless this was the last training",
            )
        else:
            forgotten = self.moor.consolidate()
        if forgotten is not None and self.verbose and rank() == 0:
            print(f"mooring: forgotten: {forgotten}", file=sys.stderr)

    def save(self, path: str | Path) -> Path:
        """Write the state to a file or folder, for `state=` in another process; a kill leaves the old file as it is.

        Of a sharded model every rank must call this, and the first one writes.
        """
        return save(self.moor, path)


@torch.no_grad()
def _check_same_weights(before: nn.Module, model: nn.Module) -> None:
    """Refuse a model with other weights than the one moored before, which would be pulled to that one's anchors."""
    others = dict(before.named_parameters())
    for name, p in model.named_parameters():
        other = others.get(name)
        if other is None or other.shape != p.shape or other.is_meta or p.is_meta:
            continue  # `load_state_dict` names parameters that do not fit
        narrow = min(p.dtype, other.dtype, key=lambda dtype: dtype.itemsize)  # it may have been saved rounded
        if not torch.equal(gathered(p).cpu().to(narrow), gathered(other).cpu().to(narrow)):
            raise MooringError(
                f"this callback moors another model, whose weights are not this one's ({name!r} differs): create a "
                "callback for each model, or load the first one's weights to continue its tasks"
            )
