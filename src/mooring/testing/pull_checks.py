"""The conformance suite of pulls."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mooring.rules import Budget, GradientPull, ParameterPull, Pull
from mooring.testing.cases import CASES, Case, check_equal, check_plain_training, check_resumes

Make = Callable[[], Pull]

AWKWARD = (0.0, 5e-324, 1e-300, 1e-12, 1.0, 3.5, 1e12, 1e300, float("inf"), -1.0, -1e-9)
"""Scores that break careless formulas: zero, denormal, huge, infinite and negative ones."""


def check_pull(make: Make, cases: Iterable[Case] = CASES) -> None:
    """Raise AssertionError unless a pull conforms in every case.

    Without previous importance training must be exactly plain fine-tuning; with it the pull must have an effect. A rate
    must lie between 0 and 1, and the pulled value between the parameter and its anchor, for any scores. A force must
    be 0 without importance. Runs must stack, and training must resume from a saved state in the middle of a task.

    Args:
        make: creates the pull with the options to check.
        cases: networks, dtypes and optimizers; by default all.

    Example:
        >>> import mooring
        >>> check_pull(lambda: mooring.Interpolation(root=3), cases=CASES[:1])
    """
    pull = make()
    if not isinstance(pull, Budget):  # its rate depends on all parameters
        check_rule(pull)
        check_runs(pull)
    for case in cases:
        check_plain_training("a pull without previous importance", case, case.attach("ewc", make()), steps=3)
        check_has_an_effect(make, case)
        check_resumes(lambda case=case: case.attach("ewc", make()))  # type: ignore[misc]


def check_rule(pull: GradientPull | ParameterPull) -> None:
    """Check that a rate lies in [0, 1] and is 0 without importance, and that a force is 0 without importance."""
    scores = torch.tensor(AWKWARD, dtype=torch.float64)
    previous, current = (t.reshape(-1) for t in torch.meshgrid(scores, scores, indexing="ij"))
    before = {"previous": previous.clone(), "current": current.clone()}
    theta, anchor = torch.linspace(-3, 2, len(previous)).double(), torch.linspace(5, -4, len(previous)).double()
    if isinstance(pull, ParameterPull):
        rate = pull.rate(previous, current, lr=0.1).double()
        pulled = torch.lerp(theta, anchor, rate.expand_as(theta))
        low, high = torch.minimum(theta, anchor), torch.maximum(theta, anchor)
        _require("rate lies in [0, 1]", (rate >= 0) & (rate <= 1), previous, current)
        _require("rate is 0 without importance", (rate == 0) | (previous > 0), previous, current)
        _require("the pulled value lies in between", (pulled >= low) & (pulled <= high), previous, current)
    else:
        force = pull.force(previous, theta - anchor, lr=0.1)
        _require("force is 0 without importance", (force == 0) | (previous != 0), previous, current)
    check_equal("a pull must not write to the scores", {"previous": previous, "current": current}, before)


def check_runs(pull: GradientPull | ParameterPull) -> None:
    """Check that runs stacked on a leading axis, each with its learning rate, equal each run alone."""
    generator = torch.Generator().manual_seed(0)
    previous, current, d = torch.rand(3, 2, 3, 4, generator=generator, dtype=torch.float64).unbind()
    lr = torch.tensor([0.1, 0.02], dtype=torch.float64)

    def apply(previous: Tensor, current: Tensor, d: Tensor, lr: Tensor | float) -> Tensor:
        if isinstance(pull, GradientPull):
            return pull.force(previous, d, lr)
        return pull.rate(previous, current, lr).expand_as(previous)

    alone = torch.stack([apply(previous[run], current[run], d[run], float(lr[run])) for run in range(2)])
    check_equal("runs stacked", {"pull": apply(previous, current, d, lr)}, {"pull": alone})


def check_has_an_effect(make: Make, case: Case) -> None:
    """Check that training after a consolidation differs from plain fine-tuning."""
    plain, moored = case.new(), case.attach("uniform", make())
    for run in (plain, moored):
        torch.manual_seed(1)
        run.train(2)
        if run is moored:
            run.moor.consolidate()
        run.train(40, first=2)
    if all(map(torch.equal, plain.model.parameters(), moored.model.parameters())):
        raise AssertionError(f"{case}: the pull has no effect in 40 steps after a consolidation")


def _require(what: str, holds: Tensor, previous: Tensor, current: Tensor) -> None:
    if not bool(holds.all()):
        i = int((~holds).nonzero()[0])
        raise AssertionError(f"violated: {what}, at previous={float(previous[i])}, current={float(current[i])}")
