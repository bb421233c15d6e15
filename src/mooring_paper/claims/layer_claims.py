"""The claims about layers and the explicit step: the unrolled form, depth, balanced importance and the root."""

import math
from itertools import chain

from mooring_paper.claims.claim import Claim, claim_on_count, describe_conditions, list_names
from mooring_paper.claims.method_pairs import Evidence, MethodRows
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import EXPLICIT, REGULARIZERS
from mooring_paper.context.target_result import TargetResult
from mooring_paper.figures import effective_lr
from mooring_paper.figures.cka import deep_cka, shallow_cka, train_balanced
from mooring_paper.figures.importance_by_layer import depth_correlation, relative_to_mean, train_regularizers
from mooring_paper.figures.roots import ROOTS, train_roots

FLOAT64_TOLERANCE = 1e-10
"""Relative differences in float64 below this are rounding."""

FREE_FRACTION = 0.9
"""The fraction of its learning rate from which on a parameter moves freely."""

ACCURACY_TOLERANCE = 1.0
"""Points of accuracy within which two forms are comparable."""


def claims(evidence: Evidence) -> list[Claim]:
    """Return the claims; their runs are those of the figures."""
    context = evidence.context
    balanced, roots = (
        evidence.rows({c: chain(*runs[c.data].values()) for c in context.scale.first_conditions()})
        for runs in (train_balanced(context), train_roots(context))
    )
    rates = context.kept_targets.get("effective-lr") or effective_lr.run(context)
    return [*_unrolled(rates), *_depth(context), *_balance(evidence, balanced), *_roots(evidence, roots)]


def _unrolled(result: TargetResult) -> list[Claim]:
    """Test the tables of the effective learning rate."""
    by_pull, at_safe_strength = result.tables
    condition, safe_strength = at_safe_strength.title.split(effective_lr.AT_SAFE_STRENGTH)
    penalty, *_ = (row["pull"] for row in by_pull.rows)
    largest = max(float(row["largest relative difference"]) for row in by_pull.rows)
    smallest = min(row["left in the mean, median"] for row in at_safe_strength.rows)
    return [
        Claim(
            "A penalty interpolates at every iteration: unrolled, it is an effective learning rate for each gradient.",
            f"for ewc, as a penalty of strength {penalty.split()[1]} and as explicit step, the unrolled form and the "
            f"iterates differ by less than {FLOAT64_TOLERANCE:g} of the movement of a layer, in float64, in the second "
            f"task of {condition}",
            f"{largest:.1e}",
            "equal",
            "holds" if largest < FLOAT64_TOLERANCE else "does not hold",
        ),
        Claim(
            "At any safe strength, parameters of low importance move freely.",
            f"under ewc with {float(safe_strength):.3g}, the strength at which the first parameter stops "
            f"interpolating, the median parameter of every layer keeps at least {FREE_FRACTION:g} of its learning "
            f"rate, averaged over the iterations of the second task of {condition}",
            f"{smallest:.3f} in the layer where it is smallest",
            "",
            "holds" if smallest >= FREE_FRACTION else "does not hold",
        ),
    ]


def _depth(context: PaperContext) -> list[Claim]:
    orders: dict[str, list[float]] = {}
    by_data, when = train_regularizers(context)
    runs = by_data.values()
    for methods in runs:
        for name, results in methods.items():
            order = depth_correlation(relative_to_mean(results))
            orders.setdefault(name, []).extend([] if order is None or math.isnan(order) else [order])
    si, where = orders.pop("si"), describe_conditions(context.scale.first_conditions())
    others = [order for values in orders.values() for order in values]
    return [
        claim_on_count(
            "Deeper layers get less importance.",
            f"mean importance {when} decreases with depth (rank correlation < 0) for each of "
            f"{list_names(list(orders))} on every data set ({where})",
            sum(order < 0 for order in others),
            len(others),
            missing=len(orders) * len(runs) - len(others),
        ),
        claim_on_count(
            "SI is the exception: its importance does not decrease with depth.",
            f"rank correlation of its mean importance {when} with depth >= 0 on every data set ({where})",
            sum(order >= 0 for order in si),
            len(si),
            missing=len(runs) - len(si),
        ),
    ]


def _balance(evidence: Evidence, rows: MethodRows) -> list[Claim]:
    same, balanced = (
        evidence.pairs(rows, [(f"{prefix}{name}", name) for name in REGULARIZERS]) for prefix in ("", "balanced-")
    )
    return [
        same.mean(
            "Penalties let deep layers change more than early ones.",
            "CKA to the model after the first task, first minus deeper half of the layers, with "
            f"{list_names(REGULARIZERS)}",
            shallow_cka,
            second_metric=deep_cka,
            spec="+.4f",
        ),
        balanced.mean(
            "Balanced importance preserves the representations of deep layers.",
            "CKA of the deeper half of the layers, balanced minus plain form of the same penalty",
            deep_cka,
            spec="+.4f",
        ),
        balanced.swapped.mean(
            "Balanced importance forgets less.",
            "forgetting, plain minus balanced form of the same penalty",
            "forgetting",
        ),
        balanced.mean(
            "Balanced importance is comparable in accuracy.",
            "accuracy, balanced minus plain form of the same penalty",
            "accuracy",
            papers="comparable",
            low=-ACCURACY_TOLERANCE,
        ),
    ]


ROOT_CLAIMS = (
    ("The square root in R forgets less than the plain ratio.", "plain ratio", "square root", 0.0, math.inf),
    ("The cube root in R forgets less than the plain ratio.", "plain ratio", "cube root", 0.0, math.inf),
    ("The choice of the root does not matter.", "cube root", "square root", -0.5, 0.5),
)
"""Statements, the two roots, and the bounds of their difference in forgetting."""


def _roots(evidence: Evidence, rows: MethodRows) -> list[Claim]:
    claims = []
    for statement, first, second, low, high in ROOT_CLAIMS:
        pairs = evidence.pairs(rows, [(f"{name}{ROOTS[first]}", f"{name}{ROOTS[second]}") for name in EXPLICIT])
        papers = "about 1 to 2 in its text" if (first, second) == ("plain ratio", "square root") else "similar"
        measure = f"forgetting of the explicit step, {first} minus {second}"
        claims.append(pairs.mean(statement, measure, "forgetting", papers=papers, low=low, high=high))
    return claims
