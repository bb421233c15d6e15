"""Running statistics of the normalization layers of a fleet: `mooring.state.norm_statistics` with a run axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mooring.backends.eager import merge_statistics
from mooring.rules import ParameterPull
from mooring.state.norm_statistics import merges_weights
from mooring.state.selection import STATISTICS
from mooring_lab.fleet.learner_plugin import LearnerPlugin, PluginState
from mooring_lab.fleet.stack.stack import Tensors

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class RunStatistics(LearnerPlugin):
    """What becomes of the statistics of every run once a task has ended.

    Args:
        mode: "follow" or "frozen", as in `mooring.attach`.

    Attributes:
        anchors: the statistics at the end of the last task, by name, each of shape (runs, ...).
    """

    key = "statistics"

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.anchors: Tensors = {}

    def start_task(self, fleet: Fleet, task: int) -> None:
        """Freeze the layers, from the second task on and if asked for."""
        fleet.stack.freeze_norms(self.mode == "frozen" and task > 0)

    def end_task(self, fleet: Fleet, task: int) -> None:
        """Merge statistics that follow the data, of methods that merge weights at the end of a task; before they do."""
        if self.mode != "follow":
            return
        buffers = fleet.stack.buffers
        for rows, state in fleet.groups.moored:
            if isinstance(state.pull, ParameterPull) and merges_weights(state.pull) and state.tasks:
                for name, anchor in self.anchors.items():
                    merge_statistics(state.pull, buffers[name][rows], anchor[rows], state.tasks, state.lr)

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Remember the statistics."""
        names = [name for name in fleet.stack.buffers if name.endswith(STATISTICS)]
        self.anchors = {name: fleet.stack.buffers[name].clone() for name in names}

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.anchors = {name: anchor[rows] for name, anchor in self.anchors.items()}

    def state_dict(self) -> PluginState:
        """Return the statistics at the end of the last task."""
        return PluginState(dict(self.anchors))

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue with these, in the network's order."""
        names = [name for name in fleet.stack.buffers if name in state.tensors]
        self.anchors = {name: state.tensors[name].to(fleet.device) for name in names}
