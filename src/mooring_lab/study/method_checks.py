"""Checks that a method of your own has to pass before its numbers mean anything."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.testing import CASES, check_importance, check_pull
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.methods import Method, find_method
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import by_class, digits
from mooring_lab.streams.slices import limit_images, select_tasks
from mooring_lab.streams.stream import Stream

CHECKED_CASES = CASES[1::6]
"""Each network of the conformance suites once, in float64 with momentum, as the laboratory trains."""

WEIGHT_TOLERANCE = 1e-9
"""The largest difference of weights in float64 between a run alone and in a fleet."""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check of a method.

    Attributes:
        check: what was checked.
        problem: why it failed, in one line; empty if it passed.
    """

    check: str
    problem: str

    @property
    def passed(self) -> bool:
        """Whether the method passed."""
        return not self.problem


def check_method(name: str) -> list[CheckOutcome]:
    """Run every check that applies to a method, and return what each found.

    The importance and the pull pass the conformance suites of `mooring.testing`. Small runs on the digits then show
    that strengths are accepted, that seeds repeat, that a run alone equals the run in a fleet, that an interrupted run
    continues as if it had not been, and that the method changes training at all.

    Args:
        name: a registered method, or `package.module:METHOD`.

    Example:
        >>> [outcome.passed for outcome in check_method("plain")]
        [True, True, True]
    """
    method = find_method(name)
    checks: dict[str, Callable[[], None]] = {}
    if method.importance is not None and not method.observes_layers:  # the suites pull by every rule, and layers do not
        importance, strength = method.importance, method.strength or 0.0
        checks["importance: conformance suite"] = lambda: check_importance(lambda: importance(0), CHECKED_CASES)
        if method.memory is None:
            checks["pull: conformance suite"] = lambda: check_pull(lambda: method.pull(strength), CHECKED_CASES)
    if method.has_strength:
        checks["every strength of its dial is accepted"] = lambda: _check_dial(method)
    runs = _SmallRuns(method)
    checks["a seed gives the same run twice"] = runs.check_repeats
    checks["a run in a fleet equals the run alone"] = runs.check_fleet
    checks["an interrupted run continues as it was"] = runs.check_continues
    if method.name != "plain":
        checks["training differs from plain"] = runs.check_differs_from_plain
    return [CheckOutcome(check, _problem(run)) for check, run in checks.items()]


def _problem(check: Callable[[], None]) -> str:
    """Return the first line of what a check raises; empty if it raises nothing."""
    try:
        check()
    except Exception as error:  # code of the user may raise anything
        lines = str(error).strip().splitlines()
        return lines[0] if isinstance(error, AssertionError | MooringError) and lines else f"{error!r}"
    return ""


def _check_dial(method: Method) -> None:
    if not method.dial:
        raise AssertionError("it has a strength and no dial: `mooring frontier` has nothing to sweep")
    for strength in (method.strength, *method.dial):
        method.pull(strength or 0.0)


class _InterruptedError(Exception):
    """Raised to stop a fleet after its first task."""


class _StopAfterTask:
    """A callback that saves a fleet after its first task and stops it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step(self, fleet: Fleet) -> None:
        pass

    def on_task_end(self, fleet: Fleet) -> None:
        checkpoint.save(fleet, self.path)
        raise _InterruptedError


class _SmallRuns:
    """Runs of a method with two seeds on three small tasks of the digits, in float64."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.stream: Stream = limit_images(select_tasks(by_class(digits(), 2), 0, 3), 40)
        self.specs = [self._spec(method, seed) for seed in (0, 1)]

    def _spec(self, method: Method, seed: int) -> RunSpec:
        memory = 20 if method.memory else None
        settings = {"strength": method.strength, "memory": memory, "dtype": "float64", "epochs": 2, "batch": 10}
        return RunSpec(self.stream.name, self.stream.fingerprint, method.name, seed, **settings)  # type: ignore[arg-type]

    def _weights(self, specs: list[RunSpec], *, interrupted: bool = False) -> dict[str, Tensor]:
        """Train a fleet and return the final weights of all runs."""
        fleet = Fleet(specs, self.stream)
        if interrupted:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "fleet"
                try:
                    fleet.run(_StopAfterTask(path))
                except _InterruptedError:
                    fleet = Fleet(specs, self.stream)
                    checkpoint.restore(fleet, path)
        seeds = [spec.seed for spec in fleet.specs]  # a fleet that has finished has no runs left
        failed = [result.reason for result in fleet.run() if result.status != "finished"]
        if failed:
            raise AssertionError(f"the run did not finish: {failed[0]}")
        networks = {seed: fleet.stack.network_of(row) for row, seed in enumerate(seeds)}
        return {f"{seed} {key}": t for seed, network in networks.items() for key, t in network.state_dict().items()}

    def check_repeats(self) -> None:
        _require_equal(self._weights(self.specs[:1]), self._weights(self.specs[:1]), 0.0)

    def check_fleet(self) -> None:
        alone = self._weights(self.specs[:1]) | self._weights(self.specs[1:])
        _require_equal(alone, self._weights(self.specs), WEIGHT_TOLERANCE)

    def check_continues(self) -> None:
        _require_equal(self._weights(self.specs), self._weights(self.specs, interrupted=True), 0.0)

    def check_differs_from_plain(self) -> None:
        ours, plain = (self._weights([self._spec(m, 0)]) for m in (self.method, find_method("plain")))
        if all(torch.equal(ours[key], plain[key]) for key in plain):
            raise AssertionError("the weights equal those of plain: it pulls nothing, or its strength is too small")


def _require_equal(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    if not one or one.keys() != other.keys():
        raise AssertionError("the runs do not have the same weights")
    for key, tensor in one.items():
        difference = float((tensor - other[key]).abs().max()) if tensor.numel() else 0.0
        if not difference <= tolerance:
            raise AssertionError(f"weights {key.partition(' ')[2]} differ by up to {difference:.3g}")
