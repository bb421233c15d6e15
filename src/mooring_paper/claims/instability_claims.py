"""The claims about instability: negative scores, violations of the bound, and clamping."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from mooring_lab.model.order import batch_sizes
from mooring_lab.model.results import Result
from mooring_lab.model.summary import Row
from mooring_lab.streams.stream import Stream
from mooring_paper.claims.claim import Claim, claim_on_count, count_verdict, describe_conditions, list_names
from mooring_paper.claims.method_pairs import MethodPair, PairGroup
from mooring_paper.claims.sequential_verdict import LookSchedule, Verdict
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import REGULARIZERS, Condition
from mooring_paper.context.seed_statistics import summarize_seeds
from mooring_paper.figures import negative_importance, violations
from mooring_paper.figures.negative_importance import POSITIVE
from mooring_paper.figures.violations import (
    CLAMPED,
    unstable_under_penalty,
    violated_after_any_task,
    violations_after_first_task,
)
from mooring_paper.published.published_numbers import published_violations

Conditions = Mapping[str, Condition]
"""Conditions by the fingerprint of their stream."""

FEW_ITERATIONS = 10
"""Iterations of a task within which the paper sees instability, in general."""

ACCURACY_TOLERANCE = 1.0
"""Points of accuracy within which a penalty has no effect."""

NEGATIVE = "si-flipped"
"""The variant of SI that always has negative scores."""


def claims(context: PaperContext, looks: LookSchedule, extend: Callable[[Row], Row]) -> list[Claim]:
    """Return the claims; their runs are those of the figures.

    Args:
        context: trains the runs.
        looks: the numbers of seeds.
        extend: returns a row with the seeds that were added to it.
    """
    signs, strengths = negative_importance.run(context).results, violations.run(context).results
    first = context.scale.first_conditions()
    streams = {stream.fingerprint: stream for stream in (context.main_stream(c.data) for c in first)}
    conditions = dict(zip(streams, first, strict=True))
    return [
        _negative_scores(signs, conditions),
        _positive_scores(signs, conditions),
        _weak_penalty(signs, conditions, looks, extend),
        *_violations(strengths, conditions),
        _early_instability([*signs, *strengths], streams, conditions),
        *_clamping(strengths, conditions, looks, extend),
    ]


def _negative_scores(results: Sequence[Result], conditions: Conditions) -> Claim:
    """Compare at the largest strength at which positive scores are stable: a weak penalty has no effect at all."""
    by_data: dict[str, dict[float, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.spec.strength is not None:
            by_data[result.spec.data][result.spec.strength].append(result)
    counts = {}
    for data, strengths in by_data.items():
        positive = {s: [r for r in runs if r.spec.method == POSITIVE] for s, runs in strengths.items()}
        stable = [s for s, runs in positive.items() if runs and all(run.status == "finished" for run in runs)]
        runs = strengths[max(stable)] if stable else []
        negative = [run for run in runs if any(stability.negative for stability in run.stability)]
        counts[conditions[data].data] = (sum(run.status == "unstable" for run in negative), len(negative))
    verdicts = {count_verdict(*pair, 0.5) for pair in counts.values()}
    verdict: Verdict = "holds" if verdicts == {"holds"} else "not decided"
    return Claim(
        "Negative importance destabilises training.",
        f"on every data set, at the largest strength at which {POSITIVE} is stable, at least half of the runs with "
        f"negative scores are unstable ({_where(conditions)})",
        "; ".join(f"{unstable} of {total} on {data}" for data, (unstable, total) in counts.items()) or "no runs",
        "",
        "does not hold" if "does not hold" in verdicts else verdict,
    )


def _violations(results: Sequence[Result], conditions: Conditions) -> list[Claim]:
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
    where = f"({list_names(REGULARIZERS)}; {_where(conditions)})"
    known = [published_violations(c.data, method) for c in conditions.values() for method in REGULARIZERS]
    fewest = [count for count in known if count is not None]
    paper = f"all, from {min(fewest)} to {max(fewest)} violating parameters on" if fewest else "all"
    return [
        claim_on_count(
            "Training becomes unstable only after the first violation of lr * strength * importance < 1.",
            f"every unstable run had a violation after a task before the one in which it became unstable {where}",
            len(violated),
            len(unstable),
            "all, after the first task",
            details=f", {len(violated_first)} of them already after the first task",
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
    return result.spec.data, result.spec.method.removeprefix(CLAMPED), result.spec.lr, result.spec.strength


def _positive_scores(results: Sequence[Result], conditions: Conditions) -> Claim:
    runs = [result for result in results if result.spec.method == POSITIVE]
    unstable = [result for result in runs if result.status == "unstable"]
    violating = sum(violations_after_first_task(result) > 0 for result in unstable)
    return claim_on_count(
        "Training with only positive scores is always stable.",
        f"every run of {POSITIVE} is stable, at every strength of the grid ({_where(conditions)})",
        len(runs) - len(unstable),
        len(runs),
        details=f"; {violating} of the others violate the bound after the first task",
    )


def _weak_penalty(
    results: Sequence[Result], conditions: Conditions, looks: LookSchedule, extend: Callable[[Row], Row]
) -> Claim:
    rows = summarize_seeds(results)
    weakest = min((row.setting.strength for row in rows if row.setting.strength is not None), default=None)
    plain = {row.setting.data: row for row in rows if row.setting.method == "plain"}
    negative = [row for row in rows if row.setting.method == NEGATIVE and row.setting.strength == weakest]
    pairs = tuple(_pair(row, plain[row.setting.data], conditions, extend) for row in negative)
    return PairGroup(pairs, looks).mean(
        "A strength small enough for negative scores has no more effect than plain fine-tuning.",
        f"accuracy, {NEGATIVE} with the smallest strength of the grid minus plain",
        "accuracy",
        papers="similar",
        low=-ACCURACY_TOLERANCE,
        high=ACCURACY_TOLERANCE,
    )


def _pair(first: Row, second: Row, conditions: Conditions, extend: Callable[[Row], Row]) -> MethodPair:
    return MethodPair(conditions[first.setting.data], (first.label, second.label), (extend(first), extend(second)))


def _where(conditions: Conditions) -> str:
    return describe_conditions(list(conditions.values()))


def _early_instability(results: Sequence[Result], streams: Mapping[str, Stream], conditions: Conditions) -> Claim:
    iterations = []
    for result in filter(unstable_under_penalty, {result.spec: result for result in results}.values()):
        finished = streams[result.spec.data].tasks[: len(result.stability)]
        batches = sum(len(batch_sizes(len(task.train), result.spec.batch)) for task in finished)
        iterations.append(result.steps - batches * result.spec.epochs + 1)
    return claim_on_count(
        "Instability appears in the first few iterations of a task.",
        f"at least half of the runs of both sweeps over strengths that become unstable under a penalty do so within "
        f"{FEW_ITERATIONS} iterations of a task ({_where(conditions)})",
        sum(iteration <= FEW_ITERATIONS for iteration in iterations),
        len(iterations),
        "fewer than 10, in general",
        share=0.5,
        details=f", the latest in iteration {max(iterations)}" if iterations else "",
    )


def _clamping(
    results: Sequence[Result], conditions: Conditions, looks: LookSchedule, extend: Callable[[Row], Row]
) -> list[Claim]:
    """Test the accuracy of clamped penalties at unstable strengths, and how well strong ones learn new tasks.

    Which strengths are unstable is decided by the seeds of the figure; only clamped runs get more seeds.
    """
    sweeps: dict[tuple[str, str, float], dict[float, dict[bool, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in summarize_seeds(results):
        data, method, lr, strength = _setting(row.results[0])
        sweeps[data, method, lr][strength or 0.0][row.setting.method.startswith(CLAMPED)] = row
    pairs, extremes = [], []
    for by_strength in sweeps.values():
        both = {strength: rows for strength, rows in sorted(by_strength.items()) if len(rows) == 2}
        if both:
            clamped = [rows[True] for rows in both.values()]
            unstable = [rows for rows in both.values() if any(map(unstable_under_penalty, rows[False].results))]
            pairs += [_pair(rows[True], clamped[0], conditions, extend) for rows in unstable]
            extremes.append(_pair(clamped[0], clamped[-1], conditions, extend))
    return [
        PairGroup(tuple(pairs), looks).mean(
            "Clamped penalties are accurate at strengths that are unstable without clamping.",
            "accuracy, clamped at each strength that is unstable without clamping minus clamped at the weakest "
            "strength of the same sweep",
            "accuracy",
        ),
        PairGroup(tuple(extremes), looks).mean(
            "With clamping, a very large strength makes a model learn less of new tasks.",
            "accuracy directly after a task, clamped at the weakest strength minus clamped at the largest of the same "
            "sweep",
            "learned",
        ),
    ]
