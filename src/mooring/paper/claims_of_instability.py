"""The claims that the figures' runs decide: what destabilises, what is protected, and what balancing does."""

import math
from collections import defaultdict
from collections.abc import Sequence

from mooring.lab.metrics import Interval, interval
from mooring.lab.results import Result
from mooring.paper import cka, importance, negative, violations
from mooring.paper.claim import Claim, Verdict, decided, told
from mooring.paper.laboratory import Laboratory
from mooring.paper.scale import REGULARIZERS
from mooring.paper.violating import after_first, broke, violations_in

__all__ = ["claims"]


def claims(lab: Laboratory) -> list[Claim]:
    """All of them; their runs are those of the figures."""
    return [
        _negative_scores(negative.run(lab).results),
        *_violations(violations.run(lab).results),
        _depth(lab),
        *_balance(lab),
    ]


def _negative_scores(results: Sequence[Result]) -> Claim:
    """Runs with scores below 0, where the same training with all scores positive is stable."""
    places = defaultdict(list)
    for result in results:
        places[result.spec.data, result.spec.strength].append(result)
    lost = seen = 0
    for runs in places.values():
        if all(run.status == "finished" for run in runs if run.spec.method == negative.POSITIVE):
            below = [run for run in runs if any(verdict.negative for verdict in run.stability)]
            seen, lost = seen + len(below), lost + sum(run.status == "unstable" for run in below)
    return Claim(
        "Importance below 0 destabilises training.",
        f"where {negative.POSITIVE} is stable, at least half of the runs with scores below 0 are unstable",
        f"{lost} of {seen}",
        "",
        _share(lost, seen),
    )


def _violations(results: Sequence[Result]) -> list[Claim]:
    """Instability and clamping around the first violation of lr * strength * importance < 1."""
    free = [result for result in results if not result.spec.method.startswith("clamped-")]
    broken = [result for result in free if broke(result)]
    early = [result for result in broken if not violations_in(after_first(result))]
    violating = [result for result in free if violations_in(after_first(result))]
    lost = {(r.spec.data, r.spec.method, r.spec.lr, r.spec.strength) for r in broken}
    clamped = {
        (r.spec.data, r.spec.method.removeprefix("clamped-"), r.spec.lr, r.spec.strength)
        for r in results
        if r.spec.method.startswith("clamped-") and r.status == "unstable"
    }
    return [
        Claim(
            "Training becomes unstable only after the first violation of lr * strength * importance < 1.",
            "every unstable run had a violation after its first task",
            f"{len(broken) - len(early)} of {len(broken)}",
            "all",
            "not decided" if not broken else "does not hold" if early else "holds",
        ),
        Claim(
            "A few violations are enough.",
            "at least half of the runs with a violation after the first task are unstable",
            f"{len(broken) - len(early)} of {len(violating)}",
            "all, from 1 to 35 violating parameters on",
            _share(len(broken) - len(early), len(violating)),
        ),
        Claim(
            "Clamping cures the instability.",
            "every setting that is unstable without clamping is stable with it",
            f"{len(lost - clamped)} of {len(lost)}",
            "all",
            "not decided" if not lost else "does not hold" if lost & clamped else "holds",
        ),
    ]


def _depth(lab: Laboratory) -> Claim:
    runs = importance.train(lab, {name: name for name in REGULARIZERS})
    orders = []
    for methods in runs.values():
        for results in methods.values():
            means = [found.mean for found in importance.relative(results).values()]
            order = importance.rank_correlation(list(range(len(means))), means)
            orders += [] if order is None or math.isnan(order) else [order]
    falls = sum(order < 0 for order in orders)
    return Claim(
        "Deeper layers get less importance.",
        "mean importance falls with depth (rank correlation < 0) for every definition and data set",
        f"{falls} of {len(orders)}",
        "all",
        "not decided" if not orders else "holds" if falls == len(orders) else "does not hold",
    )


def _balance(lab: Laboratory) -> list[Claim]:
    runs = importance.train(lab, cka.LIKE)
    pairs = [(methods[f"balanced-{name}"], methods[name]) for methods in runs.values() for name in REGULARIZERS]
    alike = _by_seed([([cka.deep(run) for run in a], [cka.deep(run) for run in b]) for a, b in pairs])
    forgotten = _by_seed([(cka.metric(b, "forgetting"), cka.metric(a, "forgetting")) for a, b in pairs])
    return [
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
    ]


def _by_seed(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval | None:
    """The mean over pairs of first minus second, for each seed that finished somewhere in both."""
    apart: dict[int, list[float]] = defaultdict(list)
    for first, second in pairs:
        for seed, (one, other) in enumerate(zip(first, second, strict=True)):
            if math.isfinite(one) and math.isfinite(other):
                apart[seed].append(one - other)
    return interval([math.fsum(each) / len(each) for each in apart.values()]) if apart else None


def _share(found: int, of: int) -> Verdict:
    """Whether it is at least half of them; with none there is nothing to decide."""
    return "not decided" if not of else "holds" if 2 * found >= of else "does not hold"
