"""The claims that the grid search decides: what is sensitive to hyper-parameters, and what the bound is good for."""

import math
from collections.abc import Mapping, Sequence

from mooring.lab.model.metrics import SCORE_TOLERANCE
from mooring.lab.model.results import Result
from mooring.lab.study.protocol import Choice
from mooring.paper.claims.claim import Claim, every, share
from mooring.paper.context.scale import EXPLICIT, REGULARIZERS, Case
from mooring.paper.published.published_numbers import Setting, published_setting
from mooring.paper.tables.grid_search import found_settings

__all__ = ["claims"]

CLOSE = 5.0
"""Points of accuracy below its best within which a method is at a good setting."""

Found = Mapping[Case, Sequence[Choice]]


def claims(found: Found) -> list[Claim]:
    """All of them, from what the search tried in every case."""
    return [_stable(found), _bound(found), _sensitive(found), *_the_papers(found)]


def _tried(found: Found, methods: Sequence[str]) -> list[Result]:
    """Runs of the grid at learning rates at which plain fine-tuning finished: the rate is not to blame."""
    runs = []
    for choices in found.values():
        grid = {choice.method: [run for row in choice.grid for run in row.results] for choice in choices}
        rates = {run.spec.lr for run in grid.get("plain", []) if run.status == "finished"}
        runs += [run for method in methods for run in grid.get(method, []) if run.spec.lr in rates]
    return runs


def _stable(found: Found) -> Claim:
    runs = _tried(found, EXPLICIT)
    lost = sum(run.status == "unstable" for run in runs)
    return Claim(
        "The explicit step has no strength to tune and is always stable.",
        "at every learning rate of the grid at which plain fine-tuning is stable, so is every explicit step",
        f"{len(runs) - lost} of {len(runs)}",
        "all",
        every(len(runs) - lost, len(runs)),
    )


def _bound(found: Found) -> Claim:
    """The paper's advice: reject settings by 0 < lr * strength * importance < 1."""
    kept = [run for run in _tried(found, REGULARIZERS) if run.status != "rejected"]
    lost = sum(run.status == "unstable" for run in kept)
    return Claim(
        "Settings that keep lr * strength * importance in (0, 1) after the first task are stable.",
        "every penalty of the grid that the bound does not reject is stable where plain fine-tuning is",
        f"{len(kept) - lost} of {len(kept)}",
        "all",
        every(len(kept) - lost, len(kept)),
    )


def _sensitive(found: Found) -> Claim:
    penalties, explicit = (_good(found, methods) for methods in (REGULARIZERS, EXPLICIT))
    shares = [good / of if of else math.nan for good, of in (penalties, explicit)]
    known = all(map(math.isfinite, shares))
    return Claim(
        "Penalties are more sensitive to their hyper-parameters than the explicit step.",
        f"a smaller share of their grid, where plain is stable, is within {CLOSE:g} points of the method's best",
        f"{penalties[0]} of {penalties[1]} against {explicit[0]} of {explicit[1]}",
        "",
        "not decided" if not known else "holds" if shares[0] < shares[1] else "does not hold",
    )


def _good(found: Found, methods: Sequence[str]) -> tuple[int, int]:
    """Settings near the method's best, and all that were tried."""
    good = of = 0
    for case, choices in found.items():
        for method in methods:
            runs = _tried({case: choices}, (method,))
            best = max((run.metrics["accuracy"] for run in runs if run.status == "finished"), default=math.nan)
            enough = best - CLOSE - SCORE_TOLERANCE
            good += sum(run.status == "finished" and run.metrics["accuracy"] >= enough for run in runs)
            of += len(runs)
    return good, of


def _the_papers(found: Found) -> list[Claim]:
    """Whether our search ends near where theirs did; strengths apart, of which there is most to find."""
    pairs = []
    for case, choices in found.items():
        for method, ours in found_settings(choices).items():
            theirs = published_setting(case.network, case.regime.name, case.data, method)
            if theirs is not None:
                pairs.append((ours, theirs))
    strong = [(a, b) for a, b in pairs if a.strength is not None and b.strength is not None]
    rates, both = sum(_near_rate(*pair) for pair in pairs), sum(_near(*pair) for pair in strong)
    return [
        Claim(
            "A grid search finds the paper's learning rates.",
            "in at least half of the cells the learning rate is no more than one step of the grid from theirs",
            f"{rates} of {len(pairs)}, {sum(a.lr == b.lr for a, b in pairs)} of them exactly",
            "all",
            share(rates, len(pairs)),
        ),
        Claim(
            "A grid search finds the paper's strengths.",
            "in at least half of the cells with a strength it and the learning rate are no more than one step of the "
            "grid from theirs",
            f"{both} of {len(strong)}, {sum(a == b for a, b in strong)} of them exactly",
            "all",
            share(both, len(strong)),
        ),
    ]


def _near_rate(ours: Setting, theirs: Setting) -> bool:
    """Within a step: the learning rates are about half a decade apart."""
    return abs(math.log10(ours.lr / theirs.lr)) < 0.6


def _near(ours: Setting, theirs: Setting) -> bool:
    """The same, and within a step of the strengths, which are a decade apart."""
    steps = math.log10((ours.strength or math.nan) / (theirs.strength or math.nan))
    return _near_rate(ours, theirs) and abs(steps) < 1.1
