"""Saving a Mooring as a flat dictionary of tensors, and continuing from one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mooring.diagnose.coverage_watch import CoverageWatch
from mooring.errors import warn
from mooring.hold.gauge_state import PREFIX, pack_gauges, unpack_gauges
from mooring.hold.measured_budget import MeasuredBudget
from mooring.hold.unmeasured import Unmeasured
from mooring.reference.batches import Loss, Outputs
from mooring.reference.kinds import OutputKind
from mooring.rules import State
from mooring.state.chosen_rules import Rules
from mooring.state.memory import Memory
from mooring.state.mooring_state import MooringState
from mooring.state.state_dict import describe_states, pack_state, read_header, read_state
from mooring.step import TrainingStep


@dataclass(frozen=True)
class Parts:
    """The parts of a Mooring, which are replaced together when a saved state has other rules.

    Attributes:
        rules: the rules.
        states: the states of the moored parameters.
        watch: warns of what nothing holds.
        step: the hooks around the optimizer's step.
        meter: measures forgetting, if the pull is a measured budget.
    """

    rules: Rules
    states: MooringState
    watch: CoverageWatch
    step: TrainingStep
    meter: MeasuredBudget | Unmeasured


def pack(parts: Parts, *, gauge: bool) -> State:
    """Return everything needed to resume; `gauge` says whether that includes data and the average of parameters."""
    states, step, meter = parts.states, parts.step, parts.meter
    meter.settle()
    header = {**describe_states(states), **parts.rules.header()}
    if step.budget:
        header["spending"] = step.budget.state()
    if meter.stopped:
        header["stopped"] = True
    if meter.largest_scale is not None:
        header["largest_scale"] = meter.largest_scale
    tensors: State = {}
    if gauge and isinstance(meter, MeasuredBudget) and meter.gauges:
        header["gauges"], tensors = pack_gauges(meter.named_gauges())
        header["measured"] = meter.state()
        tensors |= meter.tensors()
    return pack_state(states.records.values(), step.norms.anchors, header) | tensors


class SavedMooring:
    """A saved state that was read for a Mooring; nothing of the Mooring has changed.

    Args:
        state: the state.
        parts: the parts of the Mooring.
        create: creates parts for other rules or another memory, if the state decides them.

    Attributes:
        parts: the parts to continue with.
    """

    def __init__(self, state: State, parts: Parts, create: Callable[[Rules, Memory], Parts]) -> None:
        self.state = state
        saved = read_header(state)
        rules, states = parts.rules.continued(saved), parts.states
        if states.products or states.products.reasons or "adapters" in saved:
            rules = rules.with_adapters(saved.get("adapters"))
        memory = states.memory
        if saved["steps"] and not saved.get("accumulates", True) and memory.accumulates:
            memory = replace(memory, current="none")  # the first steps of this task are missing
        rules.check(memory)
        fits = rules is parts.rules and memory is states.memory
        self.parts = parts if fits else create(rules, memory)
        try:
            own = {key: tensor for key, tensor in state.items() if not key.startswith(PREFIX)}
            self.header, self._records, self._buffers = read_state(own, self.parts.states)
        except BaseException:
            for observer in () if fits else self.parts.step.observers:
                observer.remove()
            raise

    def load(self, loss: Loss | None, outputs: Outputs | None, kind: OutputKind | None) -> None:
        """Continue from the state; the arguments are those of `attach`."""
        parts, header = self.parts, self.header
        parts.step.reset()
        parts.step.invalidate()
        parts.states.continue_from(self._records, header)
        parts.watch.forget_versions()
        parts.step.norms.load(self._buffers, header["tasks"])
        if parts.step.budget:
            parts.step.budget.load_state(header.get("spending"))
        if isinstance(parts.meter, MeasuredBudget):
            self._load_gauges(parts.meter, loss, outputs, kind)
        elif parts.step.budget:
            parts.step.budget.limit_to_estimate()

    def _load_gauges(
        self, meter: MeasuredBudget, loss: Loss | None, outputs: Outputs | None, kind: OutputKind | None
    ) -> None:
        header, saved = self.header, "gauges" in self.header
        gauges = unpack_gauges(header["gauges"], self.state, loss, outputs, kind) if saved else None
        if gauges is not None:
            meter.largest_scale = header.get("largest_scale")
            meter.load_gauges(gauges, header["measured"], self.state)
            return
        meter.clear()
        meter.stopped, meter.largest_scale = header.get("stopped", False), header.get("largest_scale")
        if saved:
            warn(
                "the state's budget was measured by a loss, and none is given, so forgetting is only estimated from "
                "now on: give attach the loss= and the reference= again"
            )
