"""The claims about layers and the explicit step itself: depth, balance, the root, and the unrolled form."""

import math

from mooring.lab.model.results import Result
from mooring.paper.claims.claim import Claim, by_seed, decided, every, told, within
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import EXPLICIT, REGULARIZERS
from mooring.paper.figures import cka, effective_lr, roots
from mooring.paper.figures import importance_by_layer as importance

__all__ = ["claims"]

EXACT = 1e-10
"""Up to here a difference in float64 is rounding."""

CLOSE = 1.0
"""Points of accuracy within which two forms are comparable."""

ALIKE = 0.5
"""Points of forgetting within which two roots are alike."""


def claims(lab: Laboratory) -> list[Claim]:
    """All of them; their runs are those of the figures."""
    return [*_unrolled(lab), *_depth(lab), *_balance(lab), *_roots(lab)]


def _unrolled(lab: Laboratory) -> list[Claim]:
    found = effective_lr.measure(lab)
    worst = max(value for each in found.pulls.values() for value in each.difference.values())
    least = min(float(spread[1]) for spread in found.at_safe.values())
    return [
        Claim(
            "A penalty is an interpolation at every iteration: unrolled, an effective learning rate for each gradient.",
            f"the unrolled form and the iterates differ by less than {EXACT:g} of how far a layer moved, in float64",
            f"{worst:.1e}",
            "equal",
            "holds" if worst < EXACT else "does not hold",
        ),
        Claim(
            "At a safe strength parameters of little importance move freely, however large it is.",
            f"at {found.safe:.3g}, the strength at which the first parameter does not move freely at all, the median "
            "parameter of every layer keeps at least 0.9 of its learning rate in the mean",
            f"{least:.3f} in the layer where it is least",
            "",
            "holds" if least >= 0.9 else "does not hold",
        ),
    ]


def _depth(lab: Laboratory) -> list[Claim]:
    runs = importance.train(lab, {name: name for name in REGULARIZERS})
    orders: dict[str, list[float]] = {}
    for methods in runs.values():
        for name, results in methods.items():
            means = [found.mean for found in importance.relative(results).values()]
            order = importance.rank_correlation(list(range(len(means))), means)
            orders.setdefault(name, []).extend([] if order is None or math.isnan(order) else [order])
    falling = [order for name, some in orders.items() if name != "si" for order in some]
    falls, rises = sum(order < 0 for order in falling), sum(order >= 0 for order in orders["si"])
    return [
        Claim(
            "Deeper layers get less importance.",
            "mean importance after all tasks falls with depth (rank correlation < 0) for ewc, mas and rwalk on every "
            "data set",
            f"{falls} of {len(falling)}",
            "all",
            every(falls, len(falling)),
        ),
        Claim(
            "SI is the exception: its importance does not fall with depth.",
            "rank correlation of its mean importance after all tasks with depth >= 0 on every data set",
            f"{rises} of {len(orders['si'])}",
            "all",
            every(rises, len(orders["si"])),
        ),
    ]


def _balance(lab: Laboratory) -> list[Claim]:
    runs = cka.runs_of(lab)
    pairs = [(methods[f"balanced-{name}"], methods[name]) for methods in runs.values() for name in REGULARIZERS]
    unbalanced = [results for _, results in pairs]
    drift = by_seed([([_shallow(run) for run in some], [cka.deep(run) for run in some]) for some in unbalanced])
    alike = by_seed([([cka.deep(run) for run in a], [cka.deep(run) for run in b]) for a, b in pairs])
    forgotten = by_seed([(cka.metric(b, "forgetting"), cka.metric(a, "forgetting")) for a, b in pairs])
    accurate = by_seed([(cka.metric(a, "accuracy"), cka.metric(b, "accuracy")) for a, b in pairs])
    return [
        Claim(
            "Penalties let deep layers change more than early ones.",
            "mean difference in CKA to the model after the first task, first minus deeper half of the layers > 0",
            told(drift, "+.4f"),
            "",
            decided(drift),
        ),
        Claim(
            "Balanced importance keeps the representations of deep layers.",
            "mean difference in CKA of the deeper half of the layers, balanced minus plain form > 0",
            told(alike, "+.4f"),
            "",
            decided(alike),
        ),
        Claim(
            "Balanced importance forgets less.",
            "mean difference in forgetting, plain minus balanced form > 0",
            told(forgotten),
            "",
            decided(forgotten),
        ),
        Claim(
            "Balanced importance is comparable in accuracy.",
            f"mean difference in accuracy, balanced minus plain form, is above -{CLOSE:g}",
            told(accurate),
            "comparable",
            within(accurate, -CLOSE, math.inf),
        ),
    ]


def _shallow(result: Result) -> float:
    """Mean CKA over the layers that `cka.deep` leaves out; not a number where a run did not finish."""
    values = list(result.cka.values()) if result.status == "finished" else []
    kept = values[: math.ceil(len(values) / 2)]
    return math.fsum(kept) / len(kept) if kept else math.nan


def _roots(lab: Laboratory) -> list[Claim]:
    runs = importance.train(lab, roots.LIKE)
    forgetting = {
        root: [cka.metric(methods[f"{name}{ending}"], "forgetting") for methods in runs.values() for name in EXPLICIT]
        for root, ending in roots.ROOTS.items()
    }
    square, cube, ratio = (forgetting[root] for root in ("square root", "cube root", "plain ratio"))
    better = by_seed(list(zip(ratio, square, strict=True)))
    also = by_seed(list(zip(ratio, cube, strict=True)))
    alike = by_seed(list(zip(cube, square, strict=True)))
    return [
        Claim(
            "The square root in R forgets less than the plain ratio.",
            "mean difference in forgetting over definitions and data sets, plain ratio minus square root > 0",
            told(better),
            "about 1 to 2",
            decided(better),
        ),
        Claim(
            "The cube root in R forgets less than the plain ratio.",
            "mean difference in forgetting, plain ratio minus cube root > 0",
            told(also),
            "similar",
            decided(also),
        ),
        Claim(
            "Which root is taken does not matter.",
            f"mean difference in forgetting, cube root minus square root, is within {ALIKE:g}",
            told(alike),
            "similar",
            within(alike, -ALIKE, ALIKE),
        ),
    ]
