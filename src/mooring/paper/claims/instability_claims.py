"""The claims about instability: scores below 0, violations of the bound, and clamping."""

import math
from collections import defaultdict
from collections.abc import Sequence

from mooring.lab.model.order import batch_sizes
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row
from mooring.lab.streams.stream import Stream
from mooring.paper.claims.claim import Claim, decided, every, gain, share, told, within
from mooring.paper.context.context import Laboratory
from mooring.paper.context.seed_rows import over_seeds
from mooring.paper.figures import negative_importance as negative
from mooring.paper.figures import violations
from mooring.paper.figures.violation_metrics import after_first, broke, violated, violations_in

__all__ = ["claims"]

SOON = 10
"""Iterations of a task within which the paper sees instability, in general."""

CLOSE = 1.0
"""Points of accuracy within which a penalty does as much as none."""

NEGATIVE = "si-flipped"
"""The form of SI that surely has scores below 0."""


def claims(lab: Laboratory) -> list[Claim]:
    """All of them; their runs are those of the figures."""
    signs, strengths = negative.run(lab).results, violations.run(lab).results
    streams = {lab.trained(data).fingerprint: lab.trained(data) for data in lab.scale.streams}
    return [
        _negative_scores(signs),
        _positive_scores(signs),
        _weak_penalty(signs),
        *_violations(strengths),
        _soon([*signs, *strengths], streams),
        *_clamped(strengths),
    ]


def _negative_scores(results: Sequence[Result]) -> Claim:
    """Runs with scores below 0, at the largest strength at which the same training with all scores positive is stable.

    At small ones a penalty does nothing, whatever its sign.
    """
    places: dict[str, dict[float, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.spec.strength is not None:
            places[result.spec.data][result.spec.strength].append(result)
    counts = []
    for strengths in places.values():
        positive = {s: [r for r in runs if r.spec.method == negative.POSITIVE] for s, runs in strengths.items()}
        stable = [s for s, runs in positive.items() if runs and all(run.status == "finished" for run in runs)]
        found = strengths[max(stable)] if stable else []
        below = [run for run in found if any(verdict.negative for verdict in run.stability)]
        if below:
            counts.append((sum(run.status == "unstable" for run in below), len(below)))
    return Claim(
        "Importance below 0 destabilises training.",
        f"on every data set, at the largest strength at which {negative.POSITIVE} is stable, at least half of the runs "
        "with scores below 0 are unstable",
        "; ".join(f"{lost} of {seen}" for lost, seen in counts) or "no score was below 0",
        "",
        every(sum(share(*each) == "holds" for each in counts), len(counts)),
    )


def _violations(results: Sequence[Result]) -> list[Claim]:
    """Instability and clamping around the first violation of lr * strength * importance < 1."""
    free = [result for result in results if not result.spec.method.startswith("clamped-")]
    broken = [result for result in free if broke(result)]
    after = [result for result in broken if violated(result)]
    soon = [result for result in after if violations_in(after_first(result))]
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
            "every unstable run had a violation after a task before the one in which it broke",
            f"{len(after)} of {len(broken)}, {len(soon)} of them after the first task already",
            "all, after the first task",
            every(len(after), len(broken)),
        ),
        Claim(
            "A few violations are enough.",
            "at least half of the runs with a violation after the first task are unstable",
            f"{len(soon)} of {len(violating)}",
            "all, from 1 to 35 violating parameters on",
            share(len(soon), len(violating)),
        ),
        Claim(
            "Clamping cures the instability.",
            "every setting that is unstable without clamping is stable with it",
            f"{len(lost - clamped)} of {len(lost)}",
            "all",
            every(len(lost - clamped), len(lost)),
        ),
    ]


def _positive_scores(results: Sequence[Result]) -> Claim:
    runs = [result for result in results if result.spec.method == negative.POSITIVE]
    lost = [result for result in runs if result.status == "unstable"]
    violating = sum(violations_in(after_first(result)) > 0 for result in lost)
    return Claim(
        "With positive scores alone training is always stable.",
        f"every run of {negative.POSITIVE} is stable, at every strength of the grid",
        f"{len(runs) - len(lost)} of {len(runs)}; {violating} of the others violate the bound after the first task",
        "all",
        every(len(runs) - len(lost), len(runs)),
    )


def _weak_penalty(results: Sequence[Result]) -> Claim:
    """At a small strength scores below 0 do no harm, and no good."""
    rows = over_seeds(results)
    weakest = min((row.setting.strength for row in rows if row.setting.strength is not None), default=None)
    plain = {row.setting.data: row for row in rows if row.setting.method == "plain"}
    below = [row for row in rows if row.setting.method == NEGATIVE and row.setting.strength == weakest]
    found = gain([(row, plain[row.setting.data]) for row in below], "accuracy")
    return Claim(
        "A strength small enough for scores below 0 does no more than plain fine-tuning.",
        f"at the smallest strength {NEGATIVE} is within {CLOSE:g} point of plain in accuracy",
        told(found),
        "similar",
        within(found, -CLOSE, CLOSE),
    )


def _soon(results: Sequence[Result], streams: dict[str, Stream]) -> Claim:
    """How long into a task training breaks, where it does."""
    ages = []
    for result in filter(broke, {result.spec: result for result in results}.values()):
        done = streams[result.spec.data].tasks[: len(result.stability)]
        before = sum(len(batch_sizes(len(task.train), result.spec.batch)) for task in done) * result.spec.epochs
        ages.append(result.steps - before + 1)
    soon = sum(age <= SOON for age in ages)
    latest = f", the last in iteration {max(ages)}" if ages else ""
    return Claim(
        "Instability shows in the first few iterations of a task.",
        f"at least half of the runs that become unstable do so within {SOON} iterations of a task",
        f"{soon} of {len(ages)}{latest}",
        "fewer than 10, in general",
        share(soon, len(ages)),
    )


def _clamped(results: Sequence[Result]) -> list[Claim]:
    """What clamping leaves of a penalty: accuracy where it would have broken, and too little to learn when strong."""
    families: dict[tuple[str, str, float], dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in over_seeds(results):
        setting = row.setting
        name = setting.method.removeprefix("clamped-")
        families[setting.data, name, setting.lr][setting.strength or math.nan].append(row)
    pairs, ends = [], []
    for strengths in families.values():
        both = {s: {row.setting.method.startswith("clamped-"): row for row in rows} for s, rows in strengths.items()}
        full = sorted(strength for strength, rows in both.items() if len(rows) == 2)
        if full:
            weakest, strongest = (both[strength][True] for strength in (full[0], full[-1]))
            broken = [s for s in full if any(map(broke, both[s][False].results))]
            pairs += [(both[strength][True], weakest) for strength in broken]
            ends.append((weakest, strongest))
    accurate, learned = gain(pairs, "accuracy"), gain(ends, "learned")
    return [
        Claim(
            "Clamped penalties are accurate where they would have broken without.",
            f"mean difference in accuracy over {len(pairs)} unstable strengths, clamped minus the weakest clamped > 0",
            told(accurate),
            "",
            decided(accurate),
        ),
        Claim(
            "Clamped at an overly large strength a model learns less of new tasks.",
            "mean difference in accuracy right after a task, at the weakest strength minus the largest > 0",
            told(learned),
            "",
            decided(learned),
        ),
    ]
