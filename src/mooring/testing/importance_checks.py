"""The conformance suite of importances."""

from collections.abc import Callable, Iterable, Set
from dataclasses import replace

import torch

from mooring.errors import MooringError
from mooring.rules import Importance, Interpolation, Iteration, Penalty, State
from mooring.testing.cases import CASES, Case, check_equal, check_plain_training, check_resumes

Make = Callable[[], Importance]


def check_importance(make: Make, cases: Iterable[Case] = CASES) -> None:
    """Raise AssertionError unless an importance conforms in every case.

    It must not change the model. Its scores must be finite, of the right shape and not all zero, and start again with
    each task. It must resume from a saved state in the middle of a task, be elementwise over a leading run axis, and
    not write to the iteration.

    Args:
        make: creates the importance with the options to check.
        cases: networks, dtypes and optimizers; by default all.

    Example:
        >>> import mooring
        >>> check_importance(lambda: mooring.SI(damping=0.1), cases=CASES[:1])
    """
    argument: object = make
    if isinstance(argument, Importance):
        name = type(argument).__name__
        raise MooringError(f"check_importance got an instance: give a function, {name} or lambda: {name}(...)")
    check_rule(make)
    for case in cases:
        check_plain_training("training with an importance", case, case.attach(make()), steps=4)
        check_scores(make, case)
        check_resumes(lambda case=case: case.attach(make(), Penalty(0.01)))  # type: ignore[misc]
        check_resumes(lambda case=case: case.attach(make(), Interpolation()))  # type: ignore[misc]


def check_scores(make: Make, case: Case) -> None:
    """Check that scores are finite, of the parameter's shape, not all zero, reproducible, and reset with each task."""
    states = []
    for _ in range(2):
        run = case.attach(make())
        torch.manual_seed(1)
        run.train(3)
        states.append({name: score.clone() for name, score in run.moor.current.items()})
    shapes = {name: p.shape for name, p in run.model.named_parameters()}
    for name, score in states[0].items():
        if score.shape != shapes[name]:
            raise AssertionError(f"{case}: current[{name!r}] has shape {tuple(score.shape)}, not {tuple(shapes[name])}")
        if not bool(score.isfinite().all()):
            raise AssertionError(f"{case}: current[{name!r}] is not finite")
    if not any(bool(score.any()) for score in states[0].values()):
        raise AssertionError(f"{case}: every score is zero after three steps")
    check_equal(f"{case}: two equal runs", states[0], states[1])
    run.moor.consolidate()
    fresh = {n: make().start(c, name=n, task=1)["current"].expand_as(c) for n, c in run.moor.current.items()}
    if not make().balances:
        check_equal(f"{case}: current after a consolidation", run.moor.current, fresh)


def check_rule(make: Make) -> None:
    """Check that `update` is elementwise over a leading run axis and does not write to the iteration."""
    importance = make()
    iterations = [_iteration(seed) for seed in (0, 1)]
    alone = [_updated(importance, importance.start(it.theta, name="w", task=0), it) for it in iterations]
    starts = [importance.start(it.theta, name="w", task=0) for it in iterations]
    stack = {slot: torch.stack([start[slot] for start in starts]) for slot in starts[0]}
    stacked = {name: torch.stack([getattr(it, name) for it in iterations]) for name in Iteration.TENSORS}
    together = _updated(importance, stack, Iteration(**stacked, samples=8, count=1))
    expected = {slot: torch.stack([state[slot] for state in alone]) for slot in together}
    check_equal("two runs stacked, and each run alone", together, expected)
    if importance.needs_step:
        it = iterations[0]
        shared = importance.start(it.theta, name="w", task=0)
        assert it.before is not None
        shared["current"] = it.before.clone()  # a training step shares the memory too
        _updated(importance, shared, replace(it, before=shared["current"]), may_write={"before"})
        check_equal("with `before` in the memory of `current`", shared, alone[0])


def _updated(importance: Importance, state: State, it: Iteration, may_write: Set[str] = frozenset()) -> State:
    names = set(Iteration.TENSORS) - may_write
    before = {name: getattr(it, name).clone() for name in names}
    importance.update(state, it)
    check_equal("update must not write to the iteration", {name: getattr(it, name) for name in names}, before)
    return state


def _iteration(seed: int) -> Iteration:
    generator = torch.Generator().manual_seed(seed)
    g, theta, anchor, before, probe = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64).unbind()
    return Iteration(g=g, theta=theta, anchor=anchor, before=before, probe=probe, samples=8, count=1)
