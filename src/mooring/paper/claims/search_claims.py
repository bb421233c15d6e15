"""The claims that the grid search tests: stability, the bound, and sensitivity to hyper-parameters."""

import math
from collections.abc import Mapping, Sequence

from mooring.lab.model.metrics import SCORE_TOLERANCE
from mooring.lab.model.results import Result
from mooring.lab.study.protocol import Choice
from mooring.paper.claims.claim import Claim, claim_on_count
from mooring.paper.context.scale import EXPLICIT, REGULARIZERS, Condition
from mooring.paper.published.published_numbers import Setting, published_setting
from mooring.paper.tables.grid_search import best_settings

__all__ = ["claims"]

ACCURACY_TOLERANCE = 5.0
"""Points of accuracy below its best within which a setting of a method is good."""

LR_STEP = 0.6
"""A bit more than a step of the learning rates, which are about half a decade apart, in log10."""

STRENGTH_STEP = 1.1
"""A bit more than a step of the strengths, which are a decade apart, in log10."""

SearchResults = Mapping[Condition, Sequence[Choice]]


def claims(results: SearchResults) -> list[Claim]:
    """Return the claims, from the grids of all conditions."""
    return [_explicit_is_stable(results), _bound_is_safe(results), _sensitivity(results), *_same_settings(results)]


def _grid_runs(results: SearchResults, methods: Sequence[str]) -> list[Result]:
    """Return the runs at learning rates at which plain fine-tuning finished: the rate alone is not the cause."""
    runs = []
    for choices in results.values():
        grid = {choice.method: [run for row in choice.grid for run in row.results] for choice in choices}
        lrs = {run.spec.lr for run in grid.get("plain", []) if run.status == "finished"}
        runs += [run for method in methods for run in grid.get(method, []) if run.spec.lr in lrs]
    return runs


def _stable_claim(statement: str, definition: str, runs: Sequence[Result]) -> Claim:
    stable = sum(run.status != "unstable" for run in runs)
    return claim_on_count(statement, definition, stable, len(runs))


def _explicit_is_stable(results: SearchResults) -> Claim:
    return _stable_claim(
        "The explicit step has no strength to tune and is always stable.",
        "every explicit step is stable at every learning rate of the grid at which plain fine-tuning is",
        _grid_runs(results, EXPLICIT),
    )


def _bound_is_safe(results: SearchResults) -> Claim:
    """Test the paper's advice to reject settings outside 0 < lr * strength * importance < 1."""
    return _stable_claim(
        "Settings that keep lr * strength * importance in (0, 1) after the first task are stable.",
        "every penalty of the grid that the bound does not reject is stable where plain fine-tuning is",
        [run for run in _grid_runs(results, REGULARIZERS) if run.status != "rejected"],
    )


def _sensitivity(results: SearchResults) -> Claim:
    penalties, explicit = (_good_settings(results, methods) for methods in (REGULARIZERS, EXPLICIT))
    penalty_share, explicit_share = (good / total if total else math.nan for good, total in (penalties, explicit))
    known = math.isfinite(penalty_share) and math.isfinite(explicit_share)
    return Claim(
        "Penalties are more sensitive to their hyper-parameters than the explicit step.",
        "a smaller share of their grid, where plain is stable, is within "
        f"{ACCURACY_TOLERANCE:g} points of the best setting of the method",
        f"{penalties[0]} of {penalties[1]} against {explicit[0]} of {explicit[1]}",
        "",
        "not decided" if not known else "holds" if penalty_share < explicit_share else "does not hold",
    )


def _good_settings(results: SearchResults, methods: Sequence[str]) -> tuple[int, int]:
    """Return how many settings are close to the best of their method, and how many were tried."""
    good = total = 0
    for condition, choices in results.items():
        for method in methods:
            runs = _grid_runs({condition: choices}, (method,))
            accuracies = [run.metrics["accuracy"] for run in runs if run.status == "finished"]
            threshold = max(accuracies, default=math.nan) - ACCURACY_TOLERANCE - SCORE_TOLERANCE
            good += sum(accuracy >= threshold for accuracy in accuracies)
            total += len(runs)
    return good, total


def _same_settings(results: SearchResults) -> list[Claim]:
    """Compare our settings with the paper's; strengths separately, because methods without one are easier to match."""
    pairs = []
    for condition, choices in results.items():
        for method, ours in best_settings(choices).items():
            theirs = published_setting(condition.network, condition.regime.name, condition.data, method)
            if theirs is not None:
                pairs.append((ours, theirs))
    with_strength = [(a, b) for a, b in pairs if a.strength is not None and b.strength is not None]
    return [
        claim_on_count(
            "A grid search finds the paper's learning rates.",
            "in at least half of the cells the learning rate is at most one step of the grid from the paper's",
            sum(_is_close_lr(*pair) for pair in pairs),
            len(pairs),
            share=0.5,
            details=f", {sum(a.lr == b.lr for a, b in pairs)} of them exactly",
        ),
        claim_on_count(
            "A grid search finds the paper's strengths.",
            "in at least half of the cells with a strength, both it and the learning rate are at most one step of the "
            "grid from the paper's",
            sum(_is_close(*pair) for pair in with_strength),
            len(with_strength),
            share=0.5,
            details=f", {sum(a == b for a, b in with_strength)} of them exactly",
        ),
    ]


def _is_close_lr(ours: Setting, theirs: Setting) -> bool:
    return abs(math.log10(ours.lr / theirs.lr)) < LR_STEP


def _is_close(ours: Setting, theirs: Setting) -> bool:
    ratio = (ours.strength or math.nan) / (theirs.strength or math.nan)
    return _is_close_lr(ours, theirs) and abs(math.log10(ratio)) < STRENGTH_STEP
