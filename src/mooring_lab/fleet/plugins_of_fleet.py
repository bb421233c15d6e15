"""The plugins of a fleet: what its method declares, and what takes part in every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooring_lab.fleet.learner_plugin import LearnerPlugin
from mooring_lab.fleet.method_groups import MethodGroups
from mooring_lab.fleet.run_records import RunRecords
from mooring_lab.fleet.run_statistics import RunStatistics
from mooring_lab.fleet.stack.stack_observer import StackObserver
from mooring_lab.model.known_methods import find_method
from mooring_lab.model.method import PluginOptions
from mooring_lab.networks.multi_head import MultiHeadNetwork

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet

Plugins = tuple[LearnerPlugin, RunStatistics, MethodGroups, RunRecords]


def make_plugins(fleet: Fleet, starts: Sequence[MultiHeadNetwork]) -> Plugins:
    """Return the plugins of new runs, from the outside to the inside of a step; their methods declare the same one.

    Args:
        fleet: with its networks, data and optimizer.
        starts: the initial network of each run.
    """
    specs, method = fleet.specs, find_method(fleet.common.method)
    observer = StackObserver(fleet.stack, *method.observation_limits) if method.observes_layers else None
    fleet.groups = MethodGroups(specs, fleet.moorable, fleet.optimizer, observer)
    options = method.plugin or PluginOptions()
    learner: LearnerPlugin = options.load()(options, specs, fleet)
    records = RunRecords(specs, starts, fleet.stream, fleet.device)
    return learner, RunStatistics(fleet.common.buffers), fleet.groups, records
