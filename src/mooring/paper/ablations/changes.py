"""What could make our cells differ from the paper's: single changes of a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mooring.lab.methods import find_method
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import REGULARIZERS, Case

__all__ = ["BASE", "CHANGES", "Change"]

ORDER = 1
"""The seed of the other order of classes."""

EXAMINED = ("plain", *REGULARIZERS, "explicit-ewc", "er")
"""The methods with which everything is changed; with the others, the backbone."""

MULTIPLIED = ("plain", "ewc", "explicit-ewc")
"""Those of them with which products are changed too: no pull, a penalty and an explicit step."""


@dataclass(frozen=True)
class Change:
    """One thing that is changed.

    Attributes:
        name: what it is called.
        spec: the changed run; None where there is nothing to change.
        fits: whether a method has what is changed.
        score: a metric of a run; another one where it is the measure that is changed.
        trains: whether there are new runs to train.
    """

    name: str
    spec: Callable[[Laboratory, Case, RunSpec], RunSpec | None]
    fits: Callable[[str], bool] = lambda method: True
    score: Callable[[Result, str], float] = lambda result, metric: result.metrics[metric]
    trains: bool = True


def _one_backbone(lab: Laboratory, case: Case, spec: RunSpec) -> RunSpec | None:
    starts = lab.starts.get(case.network, [])
    return replace(spec, init=starts[0]) if len(starts) > 1 else None


def _another_backbone(lab: Laboratory, case: Case, spec: RunSpec) -> RunSpec | None:
    return replace(spec, init=lab.instead) if lab.instead and spec.init != lab.instead else None


def _random_start(lab: Laboratory, case: Case, spec: RunSpec) -> RunSpec | None:
    return replace(spec, init="") if spec.init else None


def _shuffled(lab: Laboratory, case: Case, spec: RunSpec) -> RunSpec:
    stream = lab.trained(case.data, shuffle=ORDER)
    return replace(spec, stream=stream.name, data=stream.fingerprint)


def _entire(lab: Laboratory, case: Case, spec: RunSpec) -> RunSpec:
    stream = lab.entire(case.data)
    return replace(spec, stream=stream.name, data=stream.fingerprint)


def _more_exact(lab: Laboratory, case: Case, spec: RunSpec) -> RunSpec | None:
    return replace(spec, dtype="tf32") if spec.dtype == "bf16" else None


def _stronger(times: Callable[[RunSpec], float]) -> Callable[[Laboratory, Case, RunSpec], RunSpec]:
    return lambda lab, case, spec: replace(spec, strength=(spec.strength or 0.0) * times(spec))


def _faster(times: float) -> Callable[[Laboratory, Case, RunSpec], RunSpec]:
    return lambda lab, case, spec: replace(spec, lr=spec.lr * times)


def _with(**told: object) -> Callable[[Laboratory, Case, RunSpec], RunSpec]:
    return lambda lab, case, spec: replace(spec, **told)  # type: ignore[arg-type]


def _examined(method: str) -> bool:
    return method in EXAMINED


def _strong(method: str) -> bool:
    return _examined(method) and find_method(method).has_strength


def _but_the_last(result: Result, metric: str) -> float:
    """Forgetting averaged over the tasks that can be forgotten: the last counts as 0 in ours.

    Example:
        >>> spec = RunSpec("digits", "0", "plain", 0)
        >>> result = Result(spec, "finished", "", [10.0, 10.0], [[90.0, 20.0], [70.0, 80.0]])
        >>> result.metrics["forgetting"], _but_the_last(result, "forgetting")
        (10.0, 20.0)
    """
    tasks = len(result.matrix)
    value = result.metrics[metric]
    return value * tasks / (tasks - 1) if metric == "forgetting" and tasks > 1 else value


BASE = Change("nothing", _with())
"""What changes are compared with."""

CHANGES: tuple[Change, ...] = (
    Change("the first backbone for all seeds", _one_backbone, _examined),
    Change("another backbone", _another_backbone),
    Change("a random start", _random_start, _examined),
    Change("classes in another order", _shuffled, _examined),
    Change("the searched tasks trained too", _entire, _examined),
    Change("strength x 2", _stronger(lambda spec: 2.0), _strong),
    Change("strength / 2", _stronger(lambda spec: 0.5), _strong),
    Change("strength x batch", _stronger(lambda spec: spec.batch), _strong),
    Change("strength / batch", _stronger(lambda spec: 1 / spec.batch), _strong),
    Change("absolute scores", _with(method="si-absolute"), lambda method: method == "si"),
    Change("learning rate x 3", _faster(3.0), lambda method: method == "plain"),  # the paper does not tell plain's
    Change("learning rate / 3", _faster(1 / 3), lambda method: method == "plain"),
    Change("a gradient from 256 old samples", _with(method="a-gem-256"), lambda method: method == "a-gem"),
    Change("fresh heads", _with(heads="fresh"), _examined),
    Change("momentum 0", _with(momentum=0.0), _examined),
    Change("weight decay 1e-4", _with(weight_decay=1e-4), _examined),
    Change("batch 32", _with(batch=32), _examined),
    Change("products in tf32 instead of bf16", _more_exact, lambda method: method in MULTIPLIED),
    Change("forgetting without the last task", _with(), score=_but_the_last, trains=False),
)
"""Backbone, split, the penalty's factor 1/2, the batch in the Fisher, definitions, what the paper leaves open, and the
products of a GPU."""
