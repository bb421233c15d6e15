"""Define an importance outside the library, check it, and compare it with EWC.

It is the squared gradient of EWC, reduced for small weights: a weight that is nearly 0 may move.

python examples/third_party_importance.py
"""

import argparse
from dataclasses import dataclass

from digits import train

import mooring
from mooring.errors import check_number
from mooring.rules import Importance, Iteration, State
from mooring.testing import CASES, check_importance


@dataclass(frozen=True)
class Relative(Importance):
    """current <- decay * current + (1 - decay) * g^2 * theta^2 / (theta^2 + floor).

    Args:
        decay: the weight of previous values in the running average.
        floor: weights much smaller than its square root have almost no importance.
    """

    decay: float = 0.2
    floor: float = 1e-3

    def __post_init__(self) -> None:
        """Check that every option is allowed."""
        check_number("decay", self.decay, 0, 1)
        check_number("floor", self.floor, 0, above=True)

    def update(self, state: State, it: Iteration) -> None:
        """Update in place and elementwise, so that it works for one model, a stack of runs, and a shard."""
        size = it.theta.square()
        score = it.g.square() * size / (size + self.floor)
        state["current"].mul_(self.decay).add_(score, alpha=1 - self.decay)


def main() -> None:
    """Run the conformance suite, then train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    check_importance(Relative, CASES[:1])  # without the second argument, all cases are checked
    print("Relative() passes the conformance suite")
    for name, importance in {"plain": None, "EWC()": mooring.EWC(), "Relative()": Relative()}.items():
        accuracy, forgotten = train(importance and {"importance": importance}, seed=0, epochs=options.epochs)
        print(f"{name:12s} accuracy {accuracy:5.1f} %   forgotten {forgotten:5.1f} %")


if __name__ == "__main__":
    main()
