"""The claims about layers and the explicit step: the unrolled form, depth, balanced importance and the root."""

import math
from collections.abc import Sequence

from mooring.lab.model.metrics import Interval
from mooring.paper.claims.claim import Claim, claim_on_count, claim_on_difference
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import EXPLICIT, REGULARIZERS
from mooring.paper.context.seed_statistics import mean_difference, metric_values
from mooring.paper.figures import effective_lr
from mooring.paper.figures.cka import deep_cka, shallow_cka, train_balanced
from mooring.paper.figures.importance_by_layer import depth_correlation, relative_to_mean, train_regularizers
from mooring.paper.figures.roots import ROOTS, train_roots

FLOAT64_TOLERANCE = 1e-10
"""Relative differences in float64 below this are rounding."""

FREE_FRACTION = 0.9
"""The fraction of its learning rate from which on a parameter moves freely."""

ACCURACY_TOLERANCE = 1.0
"""Points of accuracy within which two forms are comparable."""

FORGETTING_TOLERANCE = 0.5
"""Points of forgetting within which two roots are equivalent."""


def claims(context: PaperContext) -> list[Claim]:
    """Return the claims; their runs are those of the figures."""
    return [*_unrolled(context), *_depth(context), *_balance(context), *_roots(context)]


def _unrolled(context: PaperContext) -> list[Claim]:
    rates = effective_lr.measure(context)
    largest = max(value for task in rates.tasks.values() for value in task.difference.values())
    smallest = min(float(quantiles[1]) for quantiles in rates.fraction_at_safe_strength.values())
    return [
        Claim(
            "A penalty interpolates at every iteration: unrolled, it is an effective learning rate for each gradient.",
            f"the unrolled form and the iterates differ by less than {FLOAT64_TOLERANCE:g} of the movement of a layer, "
            "in float64",
            f"{largest:.1e}",
            "equal",
            "holds" if largest < FLOAT64_TOLERANCE else "does not hold",
        ),
        Claim(
            "At any safe strength, parameters of low importance move freely.",
            f"at {rates.safe_strength:.3g}, the strength at which the first parameter stops interpolating, the median "
            f"parameter of every layer keeps at least {FREE_FRACTION:g} of its learning rate on average",
            f"{smallest:.3f} in the layer where it is smallest",
            "",
            "holds" if smallest >= FREE_FRACTION else "does not hold",
        ),
    ]


def _depth(context: PaperContext) -> list[Claim]:
    orders: dict[str, list[float]] = {}
    for methods in train_regularizers(context).values():
        for name, results in methods.items():
            order = depth_correlation(relative_to_mean(results))
            orders.setdefault(name, []).extend([] if order is None or math.isnan(order) else [order])
    si = orders.pop("si")
    others = [order for values in orders.values() for order in values]
    return [
        claim_on_count(
            "Deeper layers get less importance.",
            "mean importance after all tasks decreases with depth (rank correlation < 0) for ewc, mas and rwalk on "
            "every data set",
            sum(order < 0 for order in others),
            len(others),
        ),
        claim_on_count(
            "SI is the exception: its importance does not decrease with depth.",
            "rank correlation of its mean importance after all tasks with depth >= 0 on every data set",
            sum(order >= 0 for order in si),
            len(si),
        ),
    ]


def _balance(context: PaperContext) -> list[Claim]:
    runs = train_balanced(context).values()
    plain = [methods[name] for methods in runs for name in REGULARIZERS]
    balanced = [methods[f"balanced-{name}"] for methods in runs for name in REGULARIZERS]
    plain_cka, balanced_cka = ([list(map(deep_cka, results)) for results in form] for form in (plain, balanced))
    plain_early = [list(map(shallow_cka, results)) for results in plain]
    return [
        claim_on_difference(
            "Penalties let deep layers change more than early ones.",
            "mean difference in CKA to the model after the first task, first minus deeper half of the layers > 0",
            _difference(plain_early, plain_cka),
            spec="+.4f",
        ),
        claim_on_difference(
            "Balanced importance preserves the representations of deep layers.",
            "mean difference in CKA of the deeper half of the layers, balanced minus plain form > 0",
            _difference(balanced_cka, plain_cka),
            spec="+.4f",
        ),
        claim_on_difference(
            "Balanced importance forgets less.",
            "mean difference in forgetting, plain minus balanced form > 0",
            _difference(*([metric_values(r, "forgetting") for r in form] for form in (plain, balanced))),
        ),
        claim_on_difference(
            "Balanced importance is comparable in accuracy.",
            f"mean difference in accuracy, balanced minus plain form, is above -{ACCURACY_TOLERANCE:g}",
            _difference(*([metric_values(r, "accuracy") for r in form] for form in (balanced, plain))),
            "comparable",
            low=-ACCURACY_TOLERANCE,
        ),
    ]


def _difference(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Interval | None:
    return mean_difference(*zip(first, second, strict=True))


def _roots(context: PaperContext) -> list[Claim]:
    runs = train_roots(context).values()
    square, cube, ratio = (
        [metric_values(methods[f"{name}{ROOTS[root]}"], "forgetting") for methods in runs for name in EXPLICIT]
        for root in ("square root", "cube root", "plain ratio")
    )
    return [
        claim_on_difference(
            "The square root in R forgets less than the plain ratio.",
            "mean difference in forgetting over definitions and data sets, plain ratio minus square root > 0",
            _difference(ratio, square),
            "about 1 to 2",
        ),
        claim_on_difference(
            "The cube root in R forgets less than the plain ratio.",
            "mean difference in forgetting, plain ratio minus cube root > 0",
            _difference(ratio, cube),
            "similar",
        ),
        claim_on_difference(
            "The choice of the root does not matter.",
            f"mean difference in forgetting, cube root minus square root, is within {FORGETTING_TOLERANCE:g}",
            _difference(cube, square),
            "similar",
            low=-FORGETTING_TOLERANCE,
            high=FORGETTING_TOLERANCE,
        ),
    ]
