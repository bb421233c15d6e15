"""A process that trains two small fleets of the same shape and prints when it reached each stage.

python -m fleets.fresh_process '{"spawned": 0, "network": "cnn6", "runs": 128, ...}'
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Import, train and print; imports stand here because their time is measured too."""
    request = json.loads(sys.argv[1])
    import mooring_lab  # noqa: F401  a user imports it
    from fleets.clock import now
    from fleets.noise import noise
    from fleets.pace import specs_of
    from mooring_lab.fleet.fleet import Fleet

    report: dict[str, Any] = {"import": time.time() - request["spawned"], "fleets": []}
    stream = noise(request["batch"], request["steps"])
    specs = specs_of(
        stream, request["method"], request["network"], 2 * request["runs"], request["batch"], request["dtype"]
    )
    for number in range(2):
        start = now(request["device"])
        fleet = Fleet(specs[number::2], stream, device=request["device"])
        built = now(request["device"])
        steps = StepTimes(lambda: now(request["device"]))
        fleet.run(steps)
        times = {"build": built - start, "first step": steps.first - built, "all compiled": steps.last - steps.first}
        report["fleets"].append(times)
    print(json.dumps(report))


class StepTimes:
    """The times at which the first and the last step ended."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.first, self.last = now, 0.0, 0.0

    def on_step(self, fleet: Any) -> None:
        """Record the time of a step."""
        self.last = self.now()
        self.first = self.first or self.last

    def on_task_end(self, fleet: Any) -> None:
        """Do nothing at the end of a task."""


if __name__ == "__main__":
    main()
