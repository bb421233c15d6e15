"""A fresh process that trains a small fleet and then another of the same shape, and says when it got where.

python -m fleets.newborn '{"spawned": 0, "network": "cnn6", "runs": 128, ...}'
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Nothing is imported before the clock runs: importing is one of the things measured."""
    asked = json.loads(sys.argv[1])
    import mooring.lab  # noqa: F401  what a user imports
    from fleets.clock import now
    from fleets.noise import noise
    from fleets.pace import specs_of
    from mooring.lab.fleet.fleet import Fleet

    told: dict[str, Any] = {"import": time.time() - asked["spawned"], "fleets": []}
    stream = noise(asked["batch"], asked["steps"])
    every = specs_of(stream, asked["method"], asked["network"], 2 * asked["runs"], asked["batch"], asked["dtype"])
    for number in range(2):
        began = now(asked["device"])
        fleet = Fleet(every[number::2], stream, device=asked["device"])
        built = now(asked["device"])
        steps = Steps(lambda: now(asked["device"]))
        fleet.run(steps)
        times = {"build": built - began, "first step": steps.first - built, "all compiled": steps.last - steps.first}
        told["fleets"].append(times)
    print(json.dumps(told))


class Steps:
    """When the first step was over, and the last."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.first, self.last = now, 0.0, 0.0

    def on_step(self, fleet: Any) -> None:
        """A fleet took a step."""
        self.last = self.now()
        self.first = self.first or self.last

    def on_task_end(self, fleet: Any) -> None:
        """A fleet ended a task."""


if __name__ == "__main__":
    main()
