"""The claims about instability: negative scores, violations of the bound, and clamping."""

import math
from collections import defaultdict
from collections.abc import Sequence

from mooring.lab.model.order import batch_sizes
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row
from mooring.lab.streams.stream import Stream
from mooring.paper.claims.claim import Claim, claim_on_count, claim_on_difference, count_verdict, mean_gain
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.seed_statistics import summarize_seeds
from mooring.paper.figures import negative_importance, violations
from mooring.paper.figures.negative_importance import POSITIVE
from mooring.paper.figures.violations import (
    unstable_under_penalty,
    violated_after_any_task,
    violations_after_first_task,
)

FEW_ITERATIONS = 10
"""Iterations of a task within which the paper sees instability, in general."""

ACCURACY_TOLERANCE = 1.0
"""Points of accuracy within which a penalty has no effect."""

NEGATIVE = "si-flipped"
"""The variant of SI that always has negative scores."""

CLAMPED = "clamped-"
"""The prefix of clamped methods."""


def claims(context: PaperContext) -> list[Claim]:
    """Return the claims; their runs are those of the figures."""
    signs, strengths = negative_importance.run(context).results, violations.run(context).results
    streams = {stream.fingerprint: stream for stream in map(context.main_stream, context.scale.streams)}
    return [
        _negative_scores(signs),
        _positive_scores(signs),
        _weak_penalty(signs),
        *_violations(strengths),
        _early_instability([*signs, *strengths], streams),
        *_clamping(strengths),
    ]


def _negative_scores(results: Sequence[Result]) -> Claim:
    """Compare at the largest strength at which positive scores are stable: a weak penalty has no effect at all."""
    by_data: dict[str, dict[float, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.spec.strength is not None:
            by_data[result.spec.data][result.spec.strength].append(result)
    counts = []
    for strengths in by_data.values():
        positive = {s: [r for r in runs if r.spec.method == POSITIVE] for s, runs in strengths.items()}
        stable = [s for s, runs in positive.items() if runs and all(run.status == "finished" for run in runs)]
        runs = strengths[max(stable)] if stable else []
        negative = [run for run in runs if any(stability.negative for stability in run.stability)]
        if negative:
            counts.append((sum(run.status == "unstable" for run in negative), len(negative)))
    return Claim(
        "Negative importance destabilises training.",
        f"on every data set, at the largest strength at which {POSITIVE} is stable, at least half of the runs with "
        "negative scores are unstable",
        "; ".join(f"{unstable} of {total}" for unstable, total in counts) or "no score was negative",
        "",
        count_verdict(sum(count_verdict(*pair, 0.5) == "holds" for pair in counts), len(counts)),
    )


def _violations(results: Sequence[Result]) -> list[Claim]:
    """Test instability and clamping around the first violation of lr * strength * importance < 1."""
    unclamped = [result for result in results if not result.spec.method.startswith(CLAMPED)]
    unstable = [result for result in unclamped if unstable_under_penalty(result)]
    violated = [result for result in unstable if violated_after_any_task(result)]
    violated_first = [result for result in violated if violations_after_first_task(result)]
    violating = [result for result in unclamped if violations_after_first_task(result)]
    unstable_settings = {_setting(result) for result in unstable}
    unstable_clamped = {
        _setting(result) for result in results if result.spec.method.startswith(CLAMPED) and result.status == "unstable"
    }
    return [
        claim_on_count(
            "Training becomes unstable only after the first violation of lr * strength * importance < 1.",
            "every unstable run had a violation after a task before the one in which it became unstable",
            len(violated),
            len(unstable),
            "all, after the first task",
            details=f", {len(violated_first)} of them already after the first task",
        ),
        claim_on_count(
            "A few violations are sufficient.",
            "at least half of the runs with a violation after the first task are unstable",
            len(violated_first),
            len(violating),
            "all, from 1 to 35 violating parameters on",
            share=0.5,
        ),
        claim_on_count(
            "Clamping prevents the instability.",
            "every setting that is unstable without clamping is stable with it",
            len(unstable_settings - unstable_clamped),
            len(unstable_settings),
        ),
    ]


def _setting(result: Result) -> tuple[str, str, float, float | None]:
    """Return data set, method without clamping, learning rate and strength."""
    return result.spec.data, result.spec.method.removeprefix(CLAMPED), result.spec.lr, result.spec.strength


def _positive_scores(results: Sequence[Result]) -> Claim:
    runs = [result for result in results if result.spec.method == POSITIVE]
    unstable = [result for result in runs if result.status == "unstable"]
    violating = sum(violations_after_first_task(result) > 0 for result in unstable)
    return claim_on_count(
        "Training with only positive scores is always stable.",
        f"every run of {POSITIVE} is stable, at every strength of the grid",
        len(runs) - len(unstable),
        len(runs),
        details=f"; {violating} of the others violate the bound after the first task",
    )


def _weak_penalty(results: Sequence[Result]) -> Claim:
    rows = summarize_seeds(results)
    weakest = min((row.setting.strength for row in rows if row.setting.strength is not None), default=None)
    plain = {row.setting.data: row for row in rows if row.setting.method == "plain"}
    negative = [row for row in rows if row.setting.method == NEGATIVE and row.setting.strength == weakest]
    return claim_on_difference(
        "A strength small enough for negative scores has no more effect than plain fine-tuning.",
        f"at the smallest strength, {NEGATIVE} is within {ACCURACY_TOLERANCE:g} point of plain in accuracy",
        mean_gain([(row, plain[row.setting.data]) for row in negative], "accuracy"),
        "similar",
        low=-ACCURACY_TOLERANCE,
        high=ACCURACY_TOLERANCE,
    )


def _early_instability(results: Sequence[Result], streams: dict[str, Stream]) -> Claim:
    iterations = []
    for result in filter(unstable_under_penalty, {result.spec: result for result in results}.values()):
        finished = streams[result.spec.data].tasks[: len(result.stability)]
        batches = sum(len(batch_sizes(len(task.train), result.spec.batch)) for task in finished)
        iterations.append(result.steps - batches * result.spec.epochs + 1)
    return claim_on_count(
        "Instability appears in the first few iterations of a task.",
        f"at least half of the runs that become unstable do so within {FEW_ITERATIONS} iterations of a task",
        sum(iteration <= FEW_ITERATIONS for iteration in iterations),
        len(iterations),
        "fewer than 10, in general",
        share=0.5,
        details=f", the latest in iteration {max(iterations)}" if iterations else "",
    )


def _clamping(results: Sequence[Result]) -> list[Claim]:
    """Test the accuracy of clamped penalties at unstable strengths, and how well strong ones learn new tasks."""
    sweeps: dict[tuple[str, str, float], dict[float, dict[bool, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in summarize_seeds(results):
        data, method, lr, strength = _setting(row.results[0])
        sweeps[data, method, lr][strength or math.nan][row.setting.method.startswith(CLAMPED)] = row
    pairs, extremes = [], []
    for by_strength in sweeps.values():
        both = {strength: rows for strength, rows in sorted(by_strength.items()) if len(rows) == 2}
        if both:
            clamped = [rows[True] for rows in both.values()]
            unstable = [rows for rows in both.values() if any(map(unstable_under_penalty, rows[False].results))]
            pairs += [(rows[True], clamped[0]) for rows in unstable]
            extremes.append((clamped[0], clamped[-1]))
    return [
        claim_on_difference(
            "Clamped penalties are accurate at strengths that are unstable without clamping.",
            f"mean difference in accuracy over {len(pairs)} unstable strengths, clamped minus the weakest clamped > 0",
            mean_gain(pairs, "accuracy"),
        ),
        claim_on_difference(
            "With clamping, a very large strength makes a model learn less of new tasks.",
            "mean difference in accuracy directly after a task, weakest minus largest strength > 0",
            mean_gain(extremes, "learned"),
        ),
    ]
