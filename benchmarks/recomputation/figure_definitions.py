"""The definitions of the claims that the figures test, written again: instability, layers, and the step itself."""

import math
from collections.abc import Iterator, Sequence

from scipy.stats import spearmanr

from recomputation.claim_registry import claim, swapped
from recomputation.evidence import Evidence, Pair, Recomputed
from recomputation.run_records import EXPLICIT, IMPORTANCES, Condition, RunRecord, Setting, rows_by_setting
from recomputation.seed_intervals import verdict_on_share

NO_EFFECT = 1.0
COMPARABLE = 1.0
EQUIVALENT_ROOTS = 0.5
FEW_ITERATIONS = 10
ROUNDING = 1e-10
FREE = 0.9


@claim(r"Negative importance destabilises training\.")
def _negative_scores(evidence: Evidence) -> Recomputed:
    runs = [run for run in evidence.reproduction.runs_of("fig-negative") if run.setting.strength is not None]
    counts = []
    for data in dict.fromkeys(run.condition.data for run in runs):
        here = [run for run in runs if run.condition.data == data]
        positive = [run for run in here if run.method == "si-absolute"]
        broken = {run.setting.strength for run in positive if not run.finished}
        stable = [run.setting.strength or 0.0 for run in positive if run.setting.strength not in broken]
        at_largest = [run for run in here if stable and run.setting.strength == max(stable)]
        negative = [r for r in at_largest if any(s["negative"] for s in evidence.reproduction.stability_of(r))]
        counts.append((sum(run.status == "unstable" for run in negative), len(negative)))
    verdicts = {verdict_on_share(*pair, 0.5) for pair in counts}
    verdict = "holds" if verdicts == {"holds"} else "not decided"
    return Recomputed([n for pair in counts for n in pair], "does not hold" if "does not hold" in verdicts else verdict)


@claim(r"Training with only positive scores is always stable\.")
def _positive_scores(evidence: Evidence) -> Recomputed:
    runs = [run for run in evidence.reproduction.runs_of("fig-negative") if run.method == "si-absolute"]
    unstable = [run for run in runs if run.status == "unstable"]
    violating = sum(evidence.violations(run)[:1] not in ([], [0]) for run in unstable)
    stable = len(runs) - len(unstable)
    return Recomputed([stable, len(runs), violating], verdict_on_share(stable, len(runs)))


@claim(r"A strength small enough for negative scores has no more effect than plain fine-tuning\.")
def _weak_penalty(evidence: Evidence) -> Recomputed:
    rows = evidence.rows_of("fig-negative")
    weakest = min(setting.strength for _, _, setting in rows if setting.strength is not None)
    plain = {condition: runs for (condition, method, _), runs in rows.items() if method == "plain"}
    pairs = [
        Pair(condition, (method, "plain"), runs, plain[condition])
        for (condition, method, setting), runs in rows.items()
        if method == "si-flipped" and setting.strength == weakest
    ]
    return evidence.mean_claim(pairs, "accuracy", -NO_EFFECT, NO_EFFECT)


def _sweep(evidence: Evidence, *, clamped: bool) -> list[RunRecord]:
    runs = evidence.reproduction.runs_of("fig-violations")
    return [run for run in runs if run.method.startswith("clamped-") is clamped]


def _unclamped(run: RunRecord) -> tuple[Condition, str, Setting]:
    return run.condition, run.method.removeprefix("clamped-"), run.setting


@claim(r"Training becomes unstable only after the first violation of lr \* strength \* importance < 1\.")
def _violation_first(evidence: Evidence) -> Recomputed:
    counts = [evidence.violations(r) for r in _sweep(evidence, clamped=False) if evidence.broke_under_penalty(r)]
    violated, at_once = sum(map(any, counts)), sum(tasks[0] > 0 for tasks in counts)
    return Recomputed([at_once, len(counts), violated], verdict_on_share(at_once, len(counts)))


@claim(r"A few violations are sufficient\.")
def _few_violations(evidence: Evidence) -> Recomputed:
    violating = [run for run in _sweep(evidence, clamped=False) if any(evidence.violations(run)[:1])]
    unstable = sum(map(evidence.broke_under_penalty, violating))
    reproduction = evidence.reproduction
    counts = [reproduction.published_violations(d, m) for d in reproduction.scale["streams"] for m in IMPORTANCES]
    known = [count for count in counts if count is not None]
    papers = [min(known), max(known)] if known else None
    return Recomputed([unstable, len(violating)], verdict_on_share(unstable, len(violating), 0.5), papers)


@claim(r"Clamping prevents the instability\.")
def _clamping_prevents(evidence: Evidence) -> Recomputed:
    broken = {_unclamped(run) for run in _sweep(evidence, clamped=False) if evidence.broke_under_penalty(run)}
    still = {_unclamped(run) for run in _sweep(evidence, clamped=True) if run.status == "unstable"}
    return Recomputed([len(broken - still), len(broken)], verdict_on_share(len(broken - still), len(broken)))


@claim(r"Instability appears in the first few iterations of a task\.")
def _early_instability(evidence: Evidence) -> Recomputed:
    runs = {r.row["key"]: r for name in ("fig-negative", "fig-violations") for r in evidence.reproduction.runs_of(name)}
    iterations = []
    for run in filter(evidence.broke_under_penalty, runs.values()):
        tasks = len(evidence.reproduction.stability_of(run))
        steps = sum(math.ceil(images / run.row["batch"]) * run.row["epochs"] for images in run.train[:tasks])
        iterations.append(run.row["steps"] - steps + 1)
    early = sum(iteration <= FEW_ITERATIONS for iteration in iterations)
    numbers = [early, len(iterations), *([max(iterations)] if iterations else [])]
    return Recomputed(numbers, verdict_on_share(early, len(iterations), 0.5))


def _clamped_sweeps(evidence: Evidence) -> Iterator[list[tuple[bool, Sequence[RunRecord]]]]:
    """Yield for each data set, method and learning rate: whether each strength is unstable, and its clamped runs."""
    plain, clamped = rows_by_setting(_sweep(evidence, clamped=False)), evidence.rows_of("fig-violations")
    strengths: dict[tuple[Condition, str, float], list[float]] = {}
    for condition, method, setting in clamped:
        original = method.removeprefix("clamped-")
        if original != method and (condition, original, setting) in plain:
            strengths.setdefault((condition, original, setting.lr), []).append(setting.strength or 0.0)
    for (condition, method, lr), values in strengths.items():
        settings = [Setting(lr, strength) for strength in sorted(values)]
        yield [
            (
                any(map(evidence.broke_under_penalty, plain[condition, method, setting])),
                clamped[condition, f"clamped-{method}", setting],
            )
            for setting in settings
        ]


def _clamped_pair(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> Pair:
    return Pair(first[0].condition, (first[0].method, second[0].method), first, second)


@claim(r"Clamped penalties are accurate at strengths that are unstable without clamping\.")
def _clamped_accuracy(evidence: Evidence) -> Recomputed:
    pairs = [
        _clamped_pair(clamped, sweep[0][1]) for sweep in _clamped_sweeps(evidence) for broke, clamped in sweep if broke
    ]
    return evidence.mean_claim(pairs, "accuracy")


@claim(r"With clamping, a very large strength makes a model learn less of new tasks\.")
def _clamped_learning(evidence: Evidence) -> Recomputed:
    pairs = [_clamped_pair(sweep[0][1], sweep[-1][1]) for sweep in _clamped_sweeps(evidence)]
    return evidence.mean_claim(pairs, "learned")


# Layers, and the step itself. Equation 4 is tested by a training of its own, which has no row in `runs.json`: these two
# claims follow from the tables of the target `effective-lr`.


def _effective_values(evidence: Evidence, column: str, *, at_safe_strength: bool) -> list[float]:
    tables = evidence.reproduction.findings["effective-lr"]["tables"]
    rows = [row for table in tables if ("safe strength" in table["title"]) is at_safe_strength for row in table["rows"]]
    return [float(row[column]) for row in rows]


@claim(r"A penalty interpolates at every iteration: unrolled, it is an effective learning rate for each gradient\.")
def _unrolled(evidence: Evidence) -> Recomputed:
    largest = max(_effective_values(evidence, "largest relative difference", at_safe_strength=False))
    return Recomputed([largest], "holds" if largest < ROUNDING else "does not hold")


@claim(r"At any safe strength, parameters of low importance move freely\.")
def _move_freely(evidence: Evidence) -> Recomputed:
    smallest = min(_effective_values(evidence, "left in the mean, median", at_safe_strength=True))
    return Recomputed([smallest], "holds" if smallest >= FREE else "does not hold")


def _depth_correlations(evidence: Evidence, methods: Sequence[str]) -> list[float]:
    """Return Spearman's correlation of depth and mean log importance, relative to the mean layer of each run."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for run in evidence.reproduction.runs_of("fig-importance"):
        if run.method in methods and run.finished:
            groups.setdefault((run.condition.data, run.method), []).append(run)
    correlations = []
    for runs in groups.values():
        logs: dict[int, list[float]] = {}
        for run in runs:
            values = [math.inf if value is None else value for value in run.layer_values("importance")]
            mean = math.fsum(values) / len(values) if values else 0.0
            for depth, value in enumerate(values):
                if value > 0 and 0 < mean < math.inf:
                    logs.setdefault(depth, []).append(math.log10(value / mean))
        means = [math.fsum(logs[depth]) / len(logs[depth]) for depth in sorted(logs)]
        if len(set(means)) > 1:
            correlations.append(float(spearmanr(range(len(means)), means).statistic))
    return correlations


def _on_every_correlation(evidence: Evidence, methods: Sequence[str], *, falling: bool) -> Recomputed:
    found = _depth_correlations(evidence, methods)
    count = sum((value < 0) is falling for value in found)
    verdict = verdict_on_share(count, len(found))
    if missing := len(methods) * len(evidence.reproduction.scale["streams"]) - len(found):
        return Recomputed([count, len(found), missing], "not decided" if verdict == "holds" else verdict)
    return Recomputed([count, len(found)], verdict)


@claim(r"Deeper layers get less importance\.")
def _less_importance(evidence: Evidence) -> Recomputed:
    return _on_every_correlation(evidence, [name for name in IMPORTANCES if name != "si"], falling=True)


@claim(r"SI is the exception: its importance does not decrease with depth\.")
def _si_exception(evidence: Evidence) -> Recomputed:
    return _on_every_correlation(evidence, ["si"], falling=False)


def _figure_pairs(evidence: Evidence, target: str, methods: Sequence[tuple[str, str]]) -> list[Pair]:
    """Return pairs of methods of a figure, which has one setting of each, on every data set."""
    rows = {(condition, method): runs for (condition, method, _), runs in evidence.rows_of(target).items()}
    conditions = dict.fromkeys(condition for condition, _ in rows)
    return [Pair(c, (a, b), rows.get((c, a), []), rows.get((c, b), [])) for c in conditions for a, b in methods]


def _balanced_pairs(evidence: Evidence) -> list[Pair]:
    return _figure_pairs(evidence, "fig-cka", [(f"balanced-{name}", name) for name in IMPORTANCES])


@claim(r"Penalties let deep layers change more than early ones\.")
def _deep_layers_change(evidence: Evidence) -> Recomputed:
    pairs = _figure_pairs(evidence, "fig-cka", [(name, name) for name in IMPORTANCES])
    return evidence.mean_claim(pairs, "early_cka", second_metric="deep_cka")


@claim(r"Balanced importance preserves the representations of deep layers\.")
def _balance_preserves(evidence: Evidence) -> Recomputed:
    return evidence.mean_claim(_balanced_pairs(evidence), "deep_cka")


@claim(r"Balanced importance forgets less\.")
def _balance_forgets(evidence: Evidence) -> Recomputed:
    return evidence.mean_claim(swapped(_balanced_pairs(evidence)), "forgetting")


@claim(r"Balanced importance is comparable in accuracy\.")
def _balance_accuracy(evidence: Evidence) -> Recomputed:
    return evidence.mean_claim(_balanced_pairs(evidence), "accuracy", -COMPARABLE)


def _root_pairs(evidence: Evidence, first: str, second: str) -> list[Pair]:
    return _figure_pairs(evidence, "roots", [(f"{name}{first}", f"{name}{second}") for name in EXPLICIT])


@claim(r"The square root in R forgets less than the plain ratio\.")
def _square_root(evidence: Evidence) -> Recomputed:
    return evidence.mean_claim(_root_pairs(evidence, "-ratio", ""), "forgetting")


@claim(r"The cube root in R forgets less than the plain ratio\.")
def _cube_root(evidence: Evidence) -> Recomputed:
    return evidence.mean_claim(_root_pairs(evidence, "-ratio", "-cube"), "forgetting")


@claim(r"The choice of the root does not matter\.")
def _which_root(evidence: Evidence) -> Recomputed:
    return evidence.mean_claim(_root_pairs(evidence, "-cube", ""), "forgetting", -EQUIVALENT_ROOTS, EQUIVALENT_ROOTS)
