"""Single changes of a run that may explain a difference from the paper, and the methods and regimes they apply to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mooring_lab.methods import find_method
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import PUBLISHED_CODE, REPLAY, ROWS, Condition, Scale

SHUFFLE_SEED = 1
"""The seed of the other order of classes."""

PRECISION_METHODS = ("plain", "ewc", "explicit-ewc")
"""The methods with which the precision is changed: without a pull, with a penalty and with an explicit step."""

MAX_SEEDS_ELSEWHERE = 3
"""The seeds of a changed run outside the first regime, where a run takes much longer."""

SpecChange = Callable[[PaperContext, Condition, RunSpec], RunSpec | None]
"""Returns the changed specification of a run; None if there is nothing to change."""


@dataclass(frozen=True)
class Change:
    """A single change of a run.

    Attributes:
        name: its name on the page.
        spec: changes the specification of a run.
        methods: the methods that have what is changed.
        regimes: where it is tested: in the "first" regime only, or in "all"; in the others a run takes much longer.
        score: returns a metric of a run; another definition if the change is one of the measure.
        trains: whether there are new runs to train.
        apart: whether its runs need a fleet of their own, because its data, precision or memory are others. It is
            tested only where no other change explains a row.
        always: whether it is tested in every regime where a method differs, whatever it does in the first one.
    """

    name: str
    spec: SpecChange
    methods: tuple[str, ...] = ROWS
    regimes: Literal["first", "all"] = "first"
    score: Callable[[Result, str], float] = lambda result, metric: result.metrics[metric]
    trains: bool = True
    apart: bool = False
    always: bool = False


def _first_backbone(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec | None:
    backbones = context.backbones.get(condition.network, [])
    return replace(spec, init=backbones[0]) if len(backbones) > 1 else None


def _random_start(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec | None:
    return replace(spec, init="") if spec.init else None


def _other_class_order(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec:
    stream = context.main_stream(condition.data, shuffle=SHUFFLE_SEED)
    return replace(spec, stream=stream.name, data=stream.fingerprint)


def _all_tasks(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec:
    stream = context.full_stream(condition.data)
    return replace(spec, stream=stream.name, data=stream.fingerprint)


def _higher_precision(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec | None:
    return replace(spec, dtype="tf32") if spec.dtype == "bf16" else None


def _scale_strength(factor: Callable[[RunSpec], float]) -> SpecChange:
    return lambda context, condition, spec: replace(spec, strength=(spec.strength or 0.0) * factor(spec))


def _scale_lr(factor: float) -> SpecChange:
    return lambda context, condition, spec: replace(spec, lr=spec.lr * factor)


def _set(**fields: object) -> SpecChange:
    return lambda context, condition, spec: replace(spec, **fields)  # type: ignore[arg-type]


def _decay_of_the_code(context: PaperContext, condition: Condition, spec: RunSpec) -> RunSpec:
    """Return a run that decays as in the authors' code: plain fine-tuning always, others in their first task."""
    if spec.method == "plain":
        return replace(spec, weight_decay=1e-4)
    return replace(spec, method=f"{spec.method}-decays-first")


def _variant(suffix: str) -> SpecChange:
    return lambda context, condition, spec: replace(spec, method=f"{spec.method}-{suffix}")


def _without_last_task(result: Result, metric: str) -> float:
    """Return forgetting averaged over all tasks but the last, which cannot be forgotten; ours counts it as 0.

    Example:
        >>> spec = RunSpec("digits", "0", "plain", 0)
        >>> result = Result(spec, "finished", "", [10.0, 10.0], [[90.0, 20.0], [70.0, 80.0]])
        >>> result.metrics["forgetting"], _without_last_task(result, "forgetting")
        (10.0, 20.0)
    """
    tasks = len(result.matrix)
    value = result.metrics[metric]
    return value * tasks / (tasks - 1) if metric == "forgetting" and tasks > 1 else value


_WITH_DAMPING = ("si", "rwalk", "explicit-si", "explicit-rwalk")
_WITH_STRENGTH = tuple(method for method in ROWS if find_method(method).has_strength)

BASE = Change("nothing", _set(), regimes="all", trains=False)
"""The unchanged run."""

CHANGES: tuple[Change, ...] = (
    # Backbone and split of the data.
    Change("the first backbone for all seeds", _first_backbone, regimes="all", always=True),
    Change("a random start", _random_start),
    Change("classes in another order", _other_class_order, apart=True),
    Change("the searched tasks trained too", _all_tasks, apart=True),
    # The factor 1/2 of a penalty, and the batch in the Fisher information.
    Change("strength x 2", _scale_strength(lambda spec: 2.0), _WITH_STRENGTH),
    Change("strength / 2", _scale_strength(lambda spec: 0.5), _WITH_STRENGTH),
    Change("strength x batch", _scale_strength(lambda spec: spec.batch), _WITH_STRENGTH, "all"),
    Change("strength / batch", _scale_strength(lambda spec: 1 / spec.batch), _WITH_STRENGTH, "all"),
    # The authors' public code, where it differs from the equations.
    Change("the authors' definition", _variant("as-published"), PUBLISHED_CODE, "all", always=True),
    Change("damping 1e-10", _variant("damping-1e-10"), _WITH_DAMPING, "all", always=True),
    Change("weight decay as in the code", _decay_of_the_code, regimes="all", always=True),
    Change("scored with unrestored biases", _variant("unrestored"), REPLAY, "all", apart=True, always=True),
    # Definitions, and what the paper does not specify: it gives no learning rate for plain fine-tuning.
    Change("absolute scores", _set(method="si-absolute"), ("si",), "all"),
    Change("learning rate x 3", _scale_lr(3.0), regimes="all"),
    Change("learning rate / 3", _scale_lr(1 / 3), regimes="all"),
    Change("fresh heads", _set(heads="fresh"), regimes="all"),
    Change("momentum 0", _set(momentum=0.0)),
    Change("weight decay 1e-4", _set(weight_decay=1e-4), regimes="all"),
    # Replay: what is drawn, and how often a batch is trained.
    Change("50 replayed samples in a step", _variant("50"), ("er",), apart=True),
    Change("a gradient from 256 old samples", _variant("256"), ("a-gem",), apart=True),
    Change("replay of past tasks only", _variant("past"), ("er",), apart=True),
    Change("2 updates for each batch", _variant("2-updates"), REPLAY, apart=True),
    # The precision of matrix products on a GPU, and the measure of forgetting.
    Change("products in tf32 instead of bf16", _higher_precision, PRECISION_METHODS, apart=True),
    Change("forgetting without the last task", _set(), regimes="all", score=_without_last_task, trains=False),
)


def applicable_changes(scale: Scale, condition: Condition, method: str) -> list[Change]:
    """Return the changes to test with a method under a condition.

    Example:
        >>> from mooring_paper.context.scale import PAPER
        >>> first, *_, last = PAPER.conditions()
        >>> [len(applicable_changes(PAPER, condition, "explicit-mas")) for condition in (first, last)]
        [12, 8]
    """
    is_first = condition.regime == scale.regimes[0]
    return [c for c in CHANGES if method in c.methods and (is_first or c.regimes == "all")]


def changed_seeds(scale: Scale, condition: Condition) -> int:
    """Return how many seeds a changed run has: all in the first regime, fewer in the others.

    Example:
        >>> from mooring_paper.context.scale import PAPER
        >>> [changed_seeds(PAPER, condition) for condition in (PAPER.conditions()[0], PAPER.conditions()[-1])]
        [5, 3]
    """
    return scale.seeds if condition.regime == scale.regimes[0] else min(scale.seeds, MAX_SEEDS_ELSEWHERE)
