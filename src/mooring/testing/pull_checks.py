"""The conformance suite of pulls."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mooring.pulls import Budget, GradientPull, ParameterPull, Pull
from mooring.testing.cases import CASES, Case
from mooring.testing.checks import check_equal, check_resumes

__all__ = ["AWKWARD", "check_pull"]

Make = Callable[[], Pull]

AWKWARD = (0.0, 5e-324, 1e-300, 1e-12, 1.0, 3.5, 1e12, 1e300, float("inf"), -1.0, -1e-9)
"""Scores that break careless formulas: zeros, denormals, huge, infinite and negative ones."""


def check_pull(make: Make, cases: Iterable[Case] = CASES) -> None:
    """Raise AssertionError unless a pull keeps what Mooring promises, in every case.

    Without a past it is exactly plain fine-tuning; with one it does something; a rate lies between 0 and 1 and
    the pulled value between the parameter and its anchor, whatever the scores; a force vanishes where nothing was
    important; runs stack; training can be saved and resumed in the middle of a task.

    Args:
        make: makes the pull with the options to check.
        cases: networks, dtypes and optimizers; by default all.

    Example:
        >>> import mooring
        >>> check_pull(lambda: mooring.Interpolation(root=3), cases=CASES[:1])
    """
    pull = make()
    if not isinstance(pull, Budget):  # whose rate is no function of one parameter alone
        check_rule(pull)
        check_runs(pull)
    for case in cases:
        check_free_without_past(make, case)
        check_acts(make, case)
        check_resumes(lambda case=case: case.attach("ewc", make()))  # type: ignore[misc]


def check_rule(pull: GradientPull | ParameterPull) -> None:
    """0 <= rate <= 1 and 0 without importance; a force is 0 without importance."""
    scores = torch.tensor(AWKWARD, dtype=torch.float64)
    previous, current = (t.reshape(-1) for t in torch.meshgrid(scores, scores, indexing="ij"))
    kept = {"previous": previous.clone(), "current": current.clone()}
    theta, anchor = torch.linspace(-3, 2, len(previous)).double(), torch.linspace(5, -4, len(previous)).double()
    if isinstance(pull, ParameterPull):
        rate = pull.rate(previous, current, lr=0.1).double()
        pulled = torch.lerp(theta, anchor, rate.expand_as(theta))
        low, high = torch.minimum(theta, anchor), torch.maximum(theta, anchor)
        _require("rate lies in [0, 1]", (rate >= 0) & (rate <= 1), previous, current)
        _require("rate is 0 without importance", (rate == 0) | (previous > 0), previous, current)
        _require("the pulled value lies between the two", (pulled >= low) & (pulled <= high), previous, current)
    else:
        force = pull.force(previous, theta - anchor, lr=0.1)
        _require("force is 0 without importance", (force == 0) | (previous != 0), previous, current)
    check_equal("a pull must not write to the scores", {"previous": previous, "current": current}, kept)


def check_runs(pull: GradientPull | ParameterPull) -> None:
    """A leading run axis with one learning rate per run gives what each run alone gives."""
    generator = torch.Generator().manual_seed(0)
    previous, current, d = torch.rand(3, 2, 3, 4, generator=generator, dtype=torch.float64).unbind()
    lr = torch.tensor([0.1, 0.02], dtype=torch.float64)

    def apply(previous: Tensor, current: Tensor, d: Tensor, lr: Tensor | float) -> Tensor:
        if isinstance(pull, GradientPull):
            return pull.force(previous, d, lr)
        return pull.rate(previous, current, lr).expand_as(previous)

    alone = torch.stack([apply(previous[run], current[run], d[run], float(lr[run])) for run in range(2)])
    check_equal("runs stacked", {"pull": apply(previous, current, d, lr)}, {"pull": alone})


def check_free_without_past(make: Make, case: Case) -> None:
    """Before the first consolidation, training is plain fine-tuning, bit for bit."""
    plain, moored = case.new(), case.attach("ewc", make())
    snapshots = []
    for run in (plain, moored):
        torch.manual_seed(1)
        run.train(3)
        snapshots.append(run.snapshot())
    check_equal(f"{case}: a pull without a past", snapshots[1], snapshots[0])


def check_acts(make: Make, case: Case) -> None:
    """After a consolidation, training differs from plain fine-tuning: the pull is not silently nothing."""
    plain, moored = case.new(), case.attach("uniform", make())
    for run in (plain, moored):
        torch.manual_seed(1)
        run.train(2)
        if run is moored:
            run.moor.consolidate()
        run.train(40, first=2)
    pairs = zip(plain.model.parameters(), moored.model.parameters(), strict=True)
    if all(torch.equal(a, b) for a, b in pairs):
        raise AssertionError(f"{case}: the pull does nothing in 40 steps after a consolidation")


def _require(what: str, holds: Tensor, previous: Tensor, current: Tensor) -> None:
    if not bool(holds.all()):
        where = int((~holds).nonzero()[0])
        raise AssertionError(f"not so: {what}, at previous={float(previous[where])}, current={float(current[where])}")
