"""The conformance suites on every importance and every pull, over all cases."""

import pytest
import torch

import mooring
from mooring.errors import MooringError
from mooring.rules import GradientPull, Importance, ParameterPull
from mooring.testing import CASES, check_importance, check_pull

IMPORTANCES = {
    "ewc": mooring.EWC,
    "ewc task mean": lambda: mooring.EWC(decay=None),
    "ewc per sample": lambda: mooring.EWC(per_sample=True),
    "ewc sampled": lambda: mooring.EWC(labels="sampled", seed=3),
    "mas": mooring.MAS,
    "mas task mean": lambda: mooring.MAS(decay=None),
    "si": mooring.SI,
    "si absolute": lambda: mooring.SI(sign="absolute"),
    "si signed": lambda: mooring.SI(sign="signed"),
    "si half signed": lambda: mooring.SI(sign=0.5),
    "si flipped": lambda: mooring.SI(sign="flipped"),
    "rwalk": mooring.RWalk,
    "si rising": lambda: mooring.SI(path="rising", damping=1e-10),
    "rwalk rising": lambda: mooring.RWalk(path="rising", damping=1e-10),
    "uniform": mooring.Uniform,
    "random": lambda: mooring.Random(seed=5),
    "balanced ewc": lambda: mooring.Balanced("ewc"),
    "balanced si": lambda: mooring.Balanced(mooring.SI(damping=0.1)),
    "balanced mas": lambda: mooring.Balanced("mas"),
}
PULLS = {
    "penalty": lambda: mooring.Penalty(0.5),
    "penalty clamped": lambda: mooring.Penalty(1e6, clamp=True),
    "interpolation": mooring.Interpolation,
    "interpolation soft": lambda: mooring.Interpolation(stiffness=0.1),
    "interpolation sparse": lambda: mooring.Interpolation(every=3),
    "interpolation cube root": lambda: mooring.Interpolation(root=3),
    "interpolation plain ratio": lambda: mooring.Interpolation(root=1),
    "proximal": lambda: mooring.Proximal(10.0),
    "proximal huge": lambda: mooring.Proximal(1e30),
    "budget": lambda: mooring.Budget(1e-6),
    "budget every 2": lambda: mooring.Budget(1e-7, every=2),
}
QUICK_CASE = "linear-float64-adam"
ALL_CASES = [pytest.param(case, marks=[pytest.mark.slow] * (str(case) != QUICK_CASE), id=str(case)) for case in CASES]
"""All but one are slow together."""


@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("name", IMPORTANCES)
def test_importance_conforms(name, case):
    check_importance(IMPORTANCES[name], [case])


@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("name", PULLS)
def test_pull_conforms(name, case):
    check_pull(PULLS[name], [case])


class _Magnitude(Importance):
    """An importance of a third party."""

    def update(self, state, it):
        state["current"].copy_(it.theta.abs())


class _HalfwayHome(ParameterPull):
    """A pull of a third party."""

    def rate(self, previous, current, lr):
        return 0.5 * (previous > 0)


def test_third_party_importance_and_pull_conform_and_train():
    check_importance(_Magnitude, CASES[:1])
    check_pull(_HalfwayHome, CASES[:1])
    case = CASES[0].attach(_Magnitude(), _HalfwayHome())
    case.train(2)
    case.moor.consolidate()
    case.train(2)
    assert case.moor.importance.name == "_Magnitude"


class _Nothing(Importance):
    pass


class _WritesToTheGradient(Importance):
    def update(self, state, it):
        state["current"].copy_(it.g.square_())


class _MixesRuns(Importance):
    def update(self, state, it):
        state["current"].copy_(it.g.abs() / it.g.abs().sum())


class _TouchesTheRandomState(Importance):
    def update(self, state, it):
        state["current"].copy_(it.g.abs() + torch.rand_like(it.g))


class _Forgets(Importance):
    """An importance whose own attribute is lost on resume."""

    def __init__(self):
        self.calls = 0

    def update(self, state, it):
        self.calls += 1
        state["current"].copy_(it.g.abs() * self.calls)


class _ReadsItsOwnCurrent(Importance):
    needs_step = True

    def update(self, state, it):
        state["current"].add_(it.g * it.step)


@pytest.mark.parametrize(
    "broken", [_Nothing, _WritesToTheGradient, _MixesRuns, _TouchesTheRandomState, _Forgets, _ReadsItsOwnCurrent]
)
def test_suite_rejects_a_broken_importance(broken):
    with pytest.raises(AssertionError):
        check_importance(broken, CASES[:1])


class _Extrapolates(ParameterPull):
    def rate(self, previous, current, lr):
        return lr * 100 * previous


class _FreezesDeadUnits(ParameterPull):
    def rate(self, previous, current, lr):
        return (previous.clamp(0, 1e300) / (previous.clamp(0, 1e300) + current.clamp(0, 1e300))).nan_to_num(nan=1.0)


class _Inert(GradientPull):
    def force(self, previous, d, lr):
        return 0 * d


class _IgnoresRuns(GradientPull):
    def force(self, previous, d, lr):
        return previous * d * torch.as_tensor(lr).mean()


@pytest.mark.parametrize("broken", [_Extrapolates, _FreezesDeadUnits, _Inert, _IgnoresRuns])
def test_suite_rejects_a_broken_pull(broken):
    with pytest.raises(AssertionError):
        check_pull(broken, CASES[:1])


def test_instance_instead_of_a_function_is_refused():
    with pytest.raises(MooringError, match=r"got an instance: give a function, EWC or lambda: EWC"):
        check_importance(mooring.EWC())
