"""Running statistics of the normalization layers of a fleet: `mooring.state.norm_statistics` with a run axis."""

from torch import Tensor

from mooring.backends.eager import merge_statistics
from mooring.rules import ParameterPull
from mooring.state.norm_statistics import merges_weights
from mooring.state.selection import STATISTICS
from mooring_lab.fleet.method_groups import MethodGroups
from mooring_lab.fleet.stack.stack import Stack, Tensors


class RunStatistics:
    """What becomes of the statistics of every run once a task has ended.

    Args:
        stack: the runs.
        mode: "follow" or "frozen", as in `mooring.attach`.

    Attributes:
        anchors: the statistics at the end of the last task, by name, each of shape (runs, ...).
    """

    def __init__(self, stack: Stack, mode: str) -> None:
        self.stack, self.mode = stack, mode
        self.anchors: Tensors = {}

    def start_task(self, task: int) -> None:
        """Freeze the layers, from the second task on and if asked for."""
        self.stack.freeze_norms(self.mode == "frozen" and task > 0)

    def merge(self, groups: MethodGroups) -> None:
        """Merge statistics that follow the data, of methods that merge weights at the end of a task; before they do."""
        if self.mode != "follow":
            return
        for rows, state in groups.moored:
            if isinstance(state.pull, ParameterPull) and merges_weights(state.pull) and state.tasks:
                for name, anchor in self.anchors.items():
                    merge_statistics(state.pull, self.stack.buffers[name][rows], anchor[rows], state.tasks, state.lr)

    def end_task(self) -> None:
        """Remember the statistics."""
        names = [name for name in self.stack.buffers if name.endswith(STATISTICS)]
        self.anchors = {name: self.stack.buffers[name].clone() for name in names}

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.anchors = {name: anchor[rows] for name, anchor in self.anchors.items()}
