"""Where a training stack keeps its Mooring: attached when model and optimizer are there, carried from task to task."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mooring.attachment import attach
from mooring.errors import MooringError, unknown
from mooring.importance import State
from mooring.integrations.state_file import load, load_for, save
from mooring.moor import Mooring

__all__ = ["DeferredAttach", "SavedState"]

SavedState = State | str | Path | None
"""A mooring's state, the file or folder that it was saved to, or nothing."""


class DeferredAttach:
    """Holds the options of `mooring.attach` until a stack has made its model and optimizer.

    A stack may make a new optimizer for each task, which the Mooring is then bound to, or even a new model: that one is
    moored from the state of the one before.

    Args:
        state: what the first Mooring goes on from; None starts afresh.
        options: of `mooring.attach`.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> berth = DeferredAttach(None, {"importance": "uniform"})
        >>> first = berth.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> first.consolidate()
        >>> berth.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)).tasks
        1
    """

    def __init__(self, state: SavedState, options: dict[str, Any]) -> None:
        allowed = attach.__kwdefaults__ or {}
        for name in options.keys() - allowed.keys():
            raise unknown("option of mooring.attach", name, allowed)
        self.options = options
        self._state = load(state) if isinstance(state, str | Path) else state
        self._moor: Mooring | None = None

    @property
    def moor(self) -> Mooring:
        """The Mooring; there is none before training began."""
        if self._moor is None:
            raise MooringError("nothing is moored yet: train first, or give the state to go on from as state=")
        return self._moor

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, resumes: bool = False) -> Mooring:
        """The Mooring of this model and optimizer, with the state so far.

        A reference is for a model that nothing is known of: not where there is a state, or one is about to come.
        """
        before = self._moor
        if before is not None and before.model is model:
            before.rebind(optimizer)
            self.settle()
            return before
        if before is not None:
            self._state = before.state_dict()
            before.detach()
        known = resumes or self._state is not None
        options = {k: v for k, v in self.options.items() if not (known and k in ("reference", "loss"))}
        moor = attach(model, optimizer, **options)
        if self._state is not None:
            try:
                moor.load_state_dict(self._state)
            except MooringError:
                moor.detach()
                raise
        self._moor, self._state = moor, None
        return moor

    def settle(self) -> None:
        """Bring what is kept to where the model is now: Lightning takes it to the GPU to train, and back."""
        if self.moor._states.astray():
            self.moor.load_state_dict(self.moor.state_dict())

    def state(self) -> State | None:
        """What the next Mooring would go on from; None where nothing is known yet."""
        return self._state if self._moor is None else self._moor.state_dict()

    def resume(self, state: State) -> None:
        """Go on from this state: at once, or as soon as something is moored."""
        if self._moor is None:
            self._state = state
        else:
            self._moor.load_state_dict(state)

    def resume_from(self, *places: Path) -> Path:
        """Go on from the first of these files whose state belongs to the weights that the model has now."""
        state, file = load_for(self.moor.model, places)
        self.moor.load_state_dict(state)
        return file

    def save(self, path: str | Path) -> Path:
        """Write the state to a file, or into a folder; a kill meanwhile leaves the old file as it was."""
        return save(self.moor, path)
