"""What plugins that project have in common: a projection by strength, and tensors for each layer or parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mooring_lab.fleet.learner_plugin import LearnerPlugin, PluginState
from mooring_lab.methods.projections import ProjectionOptions
from mooring_lab.methods.projections.projection import State
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class ProjectionPlugin(LearnerPlugin):
    """The projection of the runs, and what it keeps.

    Attributes:
        strengths: of the runs, float64 of shape (runs,).
        projection: with the strength of each run.
        states: by the name of a layer or parameter; every tensor has a leading run axis.
    """

    options: ProjectionOptions

    def __init__(self, options: ProjectionOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        super().__init__(options, specs, fleet)
        self.device, self.states = fleet.device, dict[str, State]()
        self.set_strengths(specs)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        strengths = [spec.strength or 0.0 for spec in specs]
        self.strengths = torch.tensor(strengths, dtype=torch.float64, device=self.device)
        self.projection: Any = self.options.make(self.strengths)

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        self.strengths = self.strengths[rows]
        self.projection = self.options.make(self.strengths)
        self.states = {name: {key: t[rows] for key, t in state.items()} for name, state in self.states.items()}

    def names_in_order(self, fleet: Fleet) -> Iterable[str]:
        """Return the names that may have a state, in the network's order."""
        return fleet.stack.parameters

    def state_dict(self) -> PluginState:
        """Return what is kept for each run."""
        return PluginState({f"{n}/{key}": t for n, state in self.states.items() for key, t in state.items()})

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from it, in the network's order."""
        self.states = {}
        for name in self.names_in_order(fleet):
            if own := state.below(name, self.device):
                self.states[name] = own
