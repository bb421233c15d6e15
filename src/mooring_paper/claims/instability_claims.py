"""The claims about instability: negative scores, violations of the bound, and clamping."""

from collections.abc import Sequence

from mooring_lab.model.order import batch_sizes
from mooring_lab.model.results import Result
from mooring_lab.streams.stream import Stream
from mooring_paper.claims.claim import Claim, claim_on_count, count_verdict, describe_conditions, list_names
from mooring_paper.claims.method_pairs import Evidence
from mooring_paper.claims.sequential_verdict import Verdict
from mooring_paper.context.scale import REGULARIZERS, Condition
from mooring_paper.figures import negative_importance, violations
from mooring_paper.figures.negative_importance import POSITIVE, SignSweep
from mooring_paper.published.published_numbers import published_violations

FEW_ITERATIONS = 10
"""Iterations of a task within which the paper sees instability, in general."""

ACCURACY_TOLERANCE = 1.0
"""Points of accuracy within which a penalty has no effect."""

NEGATIVE = "si-flipped"
"""The variant of SI that always has negative scores."""


def claims(evidence: Evidence) -> list[Claim]:
    """Return the claims; their runs are those of the figures."""
    context = evidence.context
    signs, (sweeps, runs) = negative_importance.measure(context), violations.measure(context)
    streams = [context.main_stream(condition.data) for condition in sweeps]
    where = describe_conditions(list(sweeps))
    sign_runs = [run for sweep in signs for rows in sweep.rows.values() for row in rows for run in row.results]
    return [
        _negative_scores(signs, where),
        _positive_scores(signs, where),
        _weak_penalty(signs, evidence),
        *_violations(list(sweeps), runs),
        _early_instability([*sign_runs, *runs], streams, where),
        *_clamping([sweep for group in sweeps.values() for sweep in group], evidence),
    ]


def _negative_scores(sweeps: Sequence[SignSweep], where: str) -> Claim:
    """Compare at the largest strength at which positive scores are stable: a weak penalty has no effect at all."""
    counts = {}
    for sweep in sweeps:
        stable = [row.setting.strength or 0.0 for row in sweep.rows[POSITIVE] if not row.unfinished]
        rows = [row for rows in sweep.rows.values() for row in rows if stable and row.setting.strength == max(stable)]
        runs = [run for row in rows for run in row.results if any(stability.negative for stability in run.stability)]
        counts[sweep.condition.data] = (sum(run.status == "unstable" for run in runs), len(runs))
    verdicts = {count_verdict(*pair, 0.5) for pair in counts.values()}
    verdict: Verdict = "holds" if verdicts == {"holds"} else "not decided"
    return Claim(
        "Negative importance destabilises training.",
        f"on every data set, at the largest strength at which {POSITIVE} is stable, at least half of the runs with "
        f"negative scores are unstable ({where})",
        "; ".join(f"{unstable} of {total} on {data}" for data, (unstable, total) in counts.items()) or "no runs",
        "",
        "does not hold" if "does not hold" in verdicts else verdict,
    )


def _violations(conditions: Sequence[Condition], results: Sequence[Result]) -> list[Claim]:
    """Test instability and clamping around the first violation of lr * strength * importance < 1."""
    unclamped = [result for result in results if not result.spec.method.startswith(violations.CLAMPED)]
    unstable = [result for result in unclamped if violations.unstable_under_penalty(result)]
    violated = [result for result in unstable if violations.violated_after_any_task(result)]
    violated_first = [result for result in violated if violations.violations_after_first_task(result)]
    violating = [result for result in unclamped if violations.violations_after_first_task(result)]
    unstable_settings = {_setting(result) for result in unstable}
    unstable_clamped = {
        _setting(result)
        for result in results
        if result.spec.method.startswith(violations.CLAMPED) and result.status == "unstable"
    }
    where = f"({list_names(REGULARIZERS)}; {describe_conditions(conditions)})"
    known = [published_violations(c.data, method) for c in conditions for method in REGULARIZERS]
    fewest = [count for count in known if count is not None]
    paper = f"all, from {min(fewest)} to {max(fewest)} violating parameters on" if fewest else "all"
    return [
        claim_on_count(
            "Training becomes unstable only after the first violation of lr * strength * importance < 1.",
            f"every unstable run had a violation after the first task, where the paper counts them {where}",
            len(violated_first),
            len(unstable),
            "all, after the first task",
            details=f"; {len(violated)} had one after some task before the one in which they became unstable",
        ),
        claim_on_count(
            "A few violations are sufficient.",
            f"at least half of the runs with a violation after the first task are unstable, at strengths around the "
            f"first violation {where}",
            len(violated_first),
            len(violating),
            paper,
            share=0.5,
        ),
        claim_on_count(
            "Clamping prevents the instability.",
            f"every setting that is unstable without clamping is stable with it {where}",
            len(unstable_settings - unstable_clamped),
            len(unstable_settings),
        ),
    ]


def _setting(result: Result) -> tuple[str, str, float, float | None]:
    """Return data set, method without clamping, learning rate and strength."""
    return result.spec.data, result.spec.method.removeprefix(violations.CLAMPED), result.spec.lr, result.spec.strength


def _positive_scores(sweeps: Sequence[SignSweep], where: str) -> Claim:
    runs = [run for sweep in sweeps for row in sweep.rows[POSITIVE] for run in row.results]
    unstable = [result for result in runs if result.status == "unstable"]
    violating = sum(violations.violations_after_first_task(result) > 0 for result in unstable)
    return claim_on_count(
        "Training with only positive scores is always stable.",
        f"every run of {POSITIVE} is stable, at every strength of the grid ({where})",
        len(runs) - len(unstable),
        len(runs),
        details=f"; {violating} of the others violate the bound after the first task",
    )


def _weak_penalty(sweeps: Sequence[SignSweep], evidence: Evidence) -> Claim:
    pairs = evidence.row_pairs((sweep.condition, sweep.rows[NEGATIVE][0], sweep.plain) for sweep in sweeps)
    return pairs.mean(
        "A strength small enough for negative scores has no more effect than plain fine-tuning.",
        f"accuracy, {NEGATIVE} with the smallest strength of the grid minus plain",
        "accuracy",
        papers="similar",
        low=-ACCURACY_TOLERANCE,
        high=ACCURACY_TOLERANCE,
    )


def _early_instability(results: Sequence[Result], streams: Sequence[Stream], where: str) -> Claim:
    tasks = {stream.fingerprint: stream.tasks for stream in streams}
    iterations = []
    for result in filter(violations.unstable_under_penalty, {result.spec: result for result in results}.values()):
        finished = tasks[result.spec.data][: len(result.stability)]
        batches = sum(len(batch_sizes(len(task.train), result.spec.batch)) for task in finished)
        iterations.append(result.steps - batches * result.spec.epochs + 1)
    return claim_on_count(
        "Instability appears in the first few iterations of a task.",
        f"at least half of the runs of both sweeps over strengths that become unstable under a penalty do so within "
        f"{FEW_ITERATIONS} iterations of a task ({where})",
        sum(iteration <= FEW_ITERATIONS for iteration in iterations),
        len(iterations),
        "fewer than 10, in general",
        share=0.5,
        details=f", the latest in iteration {max(iterations)}" if iterations else "",
    )


def _clamping(sweeps: Sequence[violations.ViolationSweep], evidence: Evidence) -> list[Claim]:
    """Test the accuracy of clamped penalties at unstable strengths, and how well strong ones learn new tasks.

    Which strengths are unstable is decided by the seeds of the figure; only clamped runs get more seeds.
    """
    pairs = [
        (sweep.condition, clamped, sweep.clamped[0])
        for sweep in sweeps
        for row, clamped in zip(sweep.rows, sweep.clamped, strict=True)
        if any(map(violations.unstable_under_penalty, row.results))
    ]
    extremes = [(sweep.condition, sweep.clamped[0], sweep.clamped[-1]) for sweep in sweeps]
    return [
        evidence.row_pairs(pairs).mean(
            "Clamped penalties are accurate at strengths that are unstable without clamping.",
            "accuracy, clamped at each strength that is unstable without clamping minus clamped at the weakest "
            "strength of the same sweep",
            "accuracy",
        ),
        evidence.row_pairs(extremes).mean(
            "With clamping, a very large strength makes a model learn less of new tasks.",
            "accuracy directly after a task, clamped at the weakest strength minus clamped at the largest of the same "
            "sweep",
            "learned",
        ),
    ]
