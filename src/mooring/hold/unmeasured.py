"""The meter of a Mooring without a measured budget: it measures nothing, distils nothing and keeps nothing."""

from collections.abc import Collection, Sequence

from mooring.hold.measure import Gauge, MeasuredPoint


class Unmeasured:
    """A meter that measures nothing; the attributes and methods are those of `MeasuredBudget` that a Mooring reads."""

    gauges: Sequence[Gauge] = ()
    history: Sequence[MeasuredPoint] = ()
    distillation = None
    kind = None
    largest_scale: float | None = None
    stopped = False
    distils_all = False
    announces = False
    rewritten = False

    def hook(self) -> None:
        """Observe nothing."""

    def unhook(self) -> None:
        """Observe nothing."""

    def settle(self) -> None:
        """Wait for nothing."""

    def start_task(self, gauge: Gauge | None = None, recorded: Collection[Gauge] = ()) -> None:
        """Store no predictions."""

    def running_value(self) -> float | None:
        """Return None: nothing was measured."""
        return None
