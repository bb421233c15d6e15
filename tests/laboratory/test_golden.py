"""Golden accuracy and forgetting of methods, with their intervals: a change of what a method does leaves them."""

import pytest

from laboratory.small import domain_stream, spec_for
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.methods import find_method

PLAIN = 62.47
"""The accuracy of plain fine-tuning on the same stream."""

GOLDEN: dict[str, tuple[float, tuple[float, float], tuple[float, float]]] = {
    "summed-ewc": (30, (63.3, 72.5), (10.3, 18.5)),
    "clamped-summed-ewc": (1000, (75.9, 78.1), (1.6, 4.9)),
    "laplace-kronecker": (3, (71.1, 78.0), (5.7, 12.4)),
    "clamped-laplace-kronecker": (30, (78.6, 81.6), (2.6, 4.5)),
    "lwf": (1, (70.3, 75.5), (8.9, 12.6)),
    "der++": (0.1, (78.9, 83.9), (2.5, 6.2)),
}
"""Strength, and the 95 % intervals of accuracy and forgetting over five seeds on two permutations of the digits."""


def means(method: str, strength: float | None) -> list[float]:
    stream = domain_stream(tasks=2, images=300)
    settings = {"strength": strength, "epochs": 3, "batch": 20, "lr": 0.03, "network": "mlp"}
    settings |= {"memory": 100} if find_method(method).memory else {}
    results = Fleet([spec_for(method, stream, seed, **settings) for seed in range(5)], stream).run()
    return [sum(r.metrics[metric] for r in results) / len(results) for metric in ("accuracy", "forgetting")]


@pytest.mark.parametrize("method", GOLDEN)
def test_accuracy_and_forgetting_stay_within_their_golden_intervals(method):
    strength, *intervals = GOLDEN[method]
    for (low, high), mean in zip(intervals, means(method, strength), strict=True):
        assert low <= mean <= high
    assert intervals[0][0] > PLAIN  # a method that does nothing is noticed


def test_plain_has_the_accuracy_that_the_intervals_are_compared_with():
    assert means("plain", None)[0] == pytest.approx(PLAIN, abs=0.2)  # two test images of one seed
