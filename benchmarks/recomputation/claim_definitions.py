"""The definition of every claim, written again: one function for each, registered by the claim's statement."""

import math
import re
from collections.abc import Callable, Iterator, Sequence

from scipy.stats import spearmanr

from recomputation.comparison import Disagreement, printed_numbers, prints_numbers, rounds_to
from recomputation.evidence import Evidence, Pair, Recomputed
from recomputation.run_records import (
    EXPLICIT,
    IMPORTANCES,
    REPLAY,
    Condition,
    Reproduction,
    RunRecord,
    Setting,
    rows_by_setting,
)
from recomputation.seed_intervals import verdict_on_share

PAPER_DATA = ("cifar100", "flowers102", "caltech256")
PAPER_LARGEST_GAIN = 23.0
COMPETITIVE = 2.0
NO_EFFECT = COMPARABLE = 1.0
EQUIVALENT_ROOTS = 0.5
GOOD_SETTING = 5.0
FEW_ITERATIONS = 10
ROUNDING = 1e-10
AT_PAPER_SETTINGS = "at the paper's settings"
FREE = 0.9
SCOPE = re.compile(r"(\d+)(?: of (\d+))? pairs? \(")
"""How a definition says over how many of how many pairs a mean is."""

Definition = Callable[..., Recomputed]
DEFINITIONS: dict[str, Definition] = {}


def claim(statement: str) -> Callable[[Definition], Definition]:
    """Register the definition of the claims whose statement matches a regular expression; its groups are arguments."""

    def register(definition: Definition) -> Definition:
        DEFINITIONS[statement] = definition
        return definition

    return register


# The tables.


def _explicit_pairs(evidence: Evidence, where: str = "") -> list[Pair]:
    reproduction = evidence.reproduction
    preposition, _, name = where.rpartition(" ")
    if preposition == "with the second network,":
        return evidence.pairs(reproduction.second_conditions, EXPLICIT, IMPORTANCES)
    field = {"with": "network", "in": "regime", "on": "data"}.get(preposition, "")
    conditions = [c for c in reproduction.main_conditions if not where or getattr(c, field) == name]
    return evidence.pairs(conditions, EXPLICIT, IMPORTANCES)


def _swapped(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair.swapped for pair in pairs]


@claim(r"The explicit step is more accurate than its penalty (.+)\.")
def _more_accurate(evidence: Evidence, where: str) -> Recomputed:
    return evidence.mean_claim(_explicit_pairs(evidence, where), "accuracy")


@claim(r"The explicit step forgets less than its penalty (.+)\.")
def _forgets_less(evidence: Evidence, where: str) -> Recomputed:
    return evidence.mean_claim(_swapped(_explicit_pairs(evidence, where)), "forgetting")


def _some_pair(
    evidence: Evidence, pairs: Sequence[Pair], low: float, own: tuple[float, Pair] | None, papers: Sequence[float]
) -> Recomputed:
    """Test whether the first method is more accurate by at least `low` in some pair; `own` is the paper's best."""
    looks = [evidence.look([pair], "accuracy", low, to_hold=len(pairs)) for pair in pairs]
    verdicts = [look.verdict for look in looks]
    trained = own is None or str(own[1]) in map(str, pairs)
    complete = trained and all(look.used for look in looks)
    fails = complete and set(verdicts) == {"does not hold"}
    verdict = "holds" if "holds" in verdicts else "does not hold" if fails else "not decided"
    known = [(look.difference, look.used[0]) for look in looks if look.used and look.difference is not None]
    seeds = [look.seeds for look in looks if look.used]
    scopes = [(len(pairs), len(pairs))]
    if not known:
        return Recomputed([], verdict, papers, ["no pair finished"], scopes, seeds)
    largest, pair = max(known, key=lambda difference_and_pair: difference_and_pair[0].mean)
    words = [str(pair), *([] if trained or own is None else [f"{own[1]}, was not trained"])]
    return Recomputed(largest.numbers, verdict, papers, words, scopes, seeds)


def _papers_best(evidence: Evidence, network: str, methods: Sequence[tuple[str, str]]) -> tuple[float, Pair] | None:
    """Return the largest difference in accuracy in the paper's tables, over its data sets, and its pair."""
    conditions = [Condition(network, evidence.reproduction.first_regime, data) for data in PAPER_DATA]
    pairs = [Pair(condition, names, [], []) for condition in conditions for names in methods]
    known = [(value, p) for p in pairs for value in evidence.papers([p], "accuracy") if value is not None]
    return max(known, key=lambda value_and_pair: value_and_pair[0], default=None)


@claim(r"The explicit step gains up to 23 points of accuracy in (.+)\.")
def _largest_gain(evidence: Evidence, regime: str) -> Recomputed:
    methods = list(zip(EXPLICIT, IMPORTANCES, strict=True))
    own = _papers_best(evidence, evidence.reproduction.scale["network"], methods)
    papers = [PAPER_LARGEST_GAIN, *([] if own is None else [own[0]])]
    return _some_pair(evidence, _explicit_pairs(evidence, f"in {regime}"), PAPER_LARGEST_GAIN, own, papers)


@claim(r"With (\S+), plain fine-tuning can be more accurate than EWC\.")
def _plain_against_ewc(evidence: Evidence, network: str) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.second_conditions, ["plain"], ["ewc"])
    known = [value for value in evidence.papers(pairs, "accuracy") if value is not None]
    papers = [sum(value > 0 for value in known), len(known)] if known else []
    return _some_pair(evidence, pairs, 0.0, _papers_best(evidence, network, [("plain", "ewc")]), papers)


@claim(r"The explicit step is consistently (more accurate|less forgetful) than its penalty\.")
def _consistently(evidence: Evidence, better: str) -> Recomputed:
    metric = "accuracy" if better == "more accurate" else "forgetting"
    pairs = _explicit_pairs(evidence)
    pairs = pairs if metric == "accuracy" else _swapped(pairs)
    looks = [evidence.look([pair], metric, to_fail=len(pairs)) for pair in pairs]
    verdicts = [look.verdict for look in looks]
    holds, fails = verdicts.count("holds"), verdicts.count("does not hold")
    verdict = "does not hold" if fails else "holds" if pairs and holds == len(pairs) else "not decided"
    values = evidence.papers([pair for look in looks for pair in look.used], metric)
    known = [value for value in values if value is not None]
    papers = [sum(value > 0 for value in known), len(known)] if known else []
    seeds = [look.seeds for look in looks if look.used]
    return Recomputed([holds, len(pairs), fails], verdict, papers, (), [(len(pairs), len(pairs))], seeds)


@claim(r"On cifar100, penalties are competitive with the explicit step\.")
def _competitive(evidence: Evidence) -> Recomputed:
    return evidence.mean_claim(_explicit_pairs(evidence, "on cifar100"), "accuracy", -math.inf, COMPETITIVE)


@claim(r"The explicit step gains most with unbalanced classes and long streams\.")
def _gains_most(evidence: Evidence) -> Recomputed:
    pairs = _explicit_pairs(evidence)
    cifar, others = ([pair for pair in pairs if (pair.condition.data == "cifar100") is long] for long in (True, False))
    return evidence.mean_claim(others, "accuracy", minus=cifar)


@claim(r"The explicit step preserves the representations of deep layers better than its penalty\.")
def _preserves_deep_layers(evidence: Evidence) -> Recomputed:
    return evidence.mean_claim(_explicit_pairs(evidence), "deep_cka")


@claim(r"The explicit step forgets less than replay\.")
def _less_than_replay(evidence: Evidence) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.main_conditions, REPLAY, EXPLICIT, every=True)
    return evidence.mean_claim(pairs, "forgetting")


@claim(r"Replay is more accurate than the explicit step\.")
def _replay(evidence: Evidence) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.main_conditions, REPLAY, EXPLICIT, every=True)
    return evidence.mean_claim(pairs, "accuracy")


@claim(r"Replay with fresh heads is more accurate than the explicit step\.")
def _fresh_replay(evidence: Evidence) -> Recomputed:
    papers = Evidence(evidence.reproduction, at_paper_settings=True)
    pairs = papers.fresh_replay()
    columns = [[p for p in pairs if p.condition == c] for c in dict.fromkeys(pair.condition for pair in pairs)]
    means = [look.difference.mean for group in columns if (look := papers.look(group, "accuracy")).difference]
    return papers.mean_claim(pairs, "accuracy")._replace(details=means)


@claim(r"Penalties forget less than plain fine-tuning\.")
def _less_than_plain(evidence: Evidence) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.main_conditions, ["plain"], IMPORTANCES, every=True)
    return evidence.mean_claim(pairs, "forgetting")


@claim(r"Uniform or random importance (forgets less|is more accurate) than the popular definitions\.")
def _simple_importance(evidence: Evidence, better: str) -> Recomputed:
    conditions = evidence.reproduction.main_conditions
    pairs = evidence.pairs(conditions, IMPORTANCES, ("uniform", "random"), every=True)
    forgets = better == "forgets less"
    return evidence.mean_claim(pairs if forgets else _swapped(pairs), "forgetting" if forgets else "accuracy")


AT_BOTH_SETTINGS = {definition for definition in DEFINITIONS.values() if definition is not _fresh_replay}
"""The definitions so far: those of claims on the tables, which are also tested at the paper's settings."""


# The grid search.


def _grid_runs(evidence: Evidence, condition: Condition, methods: Sequence[str]) -> list[RunRecord]:
    """Return the runs at learning rates at which plain fine-tuning finishes."""
    grid = evidence.grids[condition]
    lrs = {setting.lr for setting, run in grid["plain"].runs.items() if run.finished}
    return [run for method in methods for setting, run in grid[method].runs.items() if setting.lr in lrs]


def _stable(runs: Sequence[RunRecord]) -> Recomputed:
    stable = sum(run.status != "unstable" for run in runs)
    return Recomputed([stable, len(runs)], verdict_on_share(stable, len(runs)))


@claim(r"The explicit step has no strength to tune and is always stable\.")
def _always_stable(evidence: Evidence) -> Recomputed:
    return _stable([run for condition in evidence.grids for run in _grid_runs(evidence, condition, EXPLICIT)])


@claim(r"Settings that keep lr \* strength \* importance in \(0, 1\) after the first task are stable\.")
def _bound_is_safe(evidence: Evidence) -> Recomputed:
    runs = [run for condition in evidence.grids for run in _grid_runs(evidence, condition, IMPORTANCES)]
    return _stable([run for run in runs if run.status != "rejected"])


@claim(r"Penalties are more sensitive to their hyper-parameters than the explicit step\.")
def _sensitivity(evidence: Evidence) -> Recomputed:
    shares = []
    for methods in (IMPORTANCES, EXPLICIT):
        good = total = 0
        for condition in evidence.grids:
            for method in methods:
                runs = _grid_runs(evidence, condition, [method])
                accuracies = [run.accuracy for run in runs if run.finished]
                good += sum(max(accuracies) - accuracy <= GOOD_SETTING for accuracy in accuracies)
                total += len(runs)
        shares.append((good, total))
    (a, b), (c, d) = shares
    verdict = "not decided" if not b or not d else "holds" if a * d < c * b else "does not hold"
    return Recomputed([a, b, c, d], verdict)


def _setting_pairs(evidence: Evidence) -> list[tuple[Setting, Setting]]:
    """Return our settings and the paper's, where both exist."""
    pairs = []
    for condition, methods in evidence.grids.items():
        for method, cell in methods.items():
            papers = evidence.reproduction.published_setting(condition, method)
            if cell.best is not None and papers is not None:
                pairs.append((cell.best, papers))
    return pairs


def _steps_apart(ours: float, papers: float, decades: float) -> bool:
    """Return whether two values are at most one step of a grid apart, with a tenth more for steps that vary."""
    return abs(math.log10(ours / papers)) < 1.1 * decades


@claim(r"A grid search finds the paper's learning rates\.")
def _same_lrs(evidence: Evidence) -> Recomputed:
    pairs = _setting_pairs(evidence)
    close = sum(_steps_apart(ours.lr, papers.lr, math.log10(10 / 3)) for ours, papers in pairs)
    exact = sum(ours.lr == papers.lr for ours, papers in pairs)
    return Recomputed([close, len(pairs), exact], verdict_on_share(close, len(pairs), 0.5))


@claim(r"A grid search finds the paper's strengths\.")
def _same_strengths(evidence: Evidence) -> Recomputed:
    pairs = [(a, b) for a, b in _setting_pairs(evidence) if a.strength is not None and b.strength is not None]
    close = sum(
        _steps_apart(ours.lr, papers.lr, math.log10(10 / 3)) and _steps_apart(ours.strength, papers.strength, 1.0)
        for ours, papers in pairs
        if ours.strength and papers.strength
    )
    return Recomputed([close, len(pairs), sum(a == b for a, b in pairs)], verdict_on_share(close, len(pairs), 0.5))


# Instability.


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
    return evidence.mean_claim(_swapped(_balanced_pairs(evidence)), "forgetting")


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


def compare_claims(reproduction: Reproduction) -> tuple[int, list[Disagreement]]:
    """Return how many claims were recomputed, and the disagreements with the target `claims`."""
    evidence, count, disagreements = Evidence(reproduction), 0, list[Disagreement]()
    papers = Evidence(reproduction, at_paper_settings=True)
    for row in (row for table in reproduction.findings["claims"]["tables"] for row in table["rows"]):
        matches = [(d, m) for pattern, d in DEFINITIONS.items() if (m := re.fullmatch(pattern, row["claim"]))]
        if len(matches) != 1:
            disagreements.append(Disagreement(row["claim"], row["ours"], "not recomputed"))
            continue
        count += 1
        definition, match = matches[0]
        disagreements += _compare_row(row, definition(evidence, *match.groups()))
        if definition in AT_BOTH_SETTINGS:
            disagreements += _compare_at_paper_settings(row, definition(papers, *match.groups()))
        elif row[AT_PAPER_SETTINGS]:
            disagreements.append(Disagreement(row["claim"], row[AT_PAPER_SETTINGS], "our settings do not matter"))
    return count, disagreements


def _compare_at_paper_settings(row: dict[str, str], expected: Recomputed) -> Iterator[Disagreement]:
    """Yield what the column of the paper's settings has and should not; it is empty if there is nothing to compare."""
    text, _, verdict = row[AT_PAPER_SETTINGS].rpartition(": ")
    numbers = text.partition(";")[0] if expected.scopes else text
    if not any(expected.seeds):
        if row[AT_PAPER_SETTINGS]:
            yield Disagreement(f"{row['claim']} {AT_PAPER_SETTINGS}", row[AT_PAPER_SETTINGS], "nothing to compare")
    elif verdict != expected.verdict or not prints_numbers(numbers, expected.numbers):
        written = row[AT_PAPER_SETTINGS]
        yield Disagreement(f"{row['claim']} {AT_PAPER_SETTINGS}", written, [*expected.numbers, expected.verdict])


def _compare_row(row: dict[str, str], expected: Recomputed) -> Iterator[Disagreement]:
    """Yield what a claim's row has and should not."""
    statement, ours = row["claim"], row["ours"]
    # The pairs that a mean leaves out, and what belongs to other settings, follow the first semicolon of a difference.
    numbers = ours.partition(";")[0] if expected.scopes else ours
    if not prints_numbers(numbers, expected.numbers) or not all(word in ours for word in expected.words):
        yield Disagreement(f"{statement} ours", ours, [*expected.numbers, *expected.words])
    if expected.details and not prints_numbers(ours.rpartition("; ")[2], expected.details):
        yield Disagreement(f"{statement} details", ours, list(expected.details))
    if row["verdict"] != expected.verdict:
        yield Disagreement(f"{statement} verdict", row["verdict"], expected.verdict)
    if expected.papers is not None:
        printed = printed_numbers(row["paper's"])[: len(expected.papers)]
        too_few = len(printed) < len(expected.papers) or (not expected.papers and "by its tables" in row["paper's"])
        if too_few or not all(map(rounds_to, expected.papers, printed)):
            yield Disagreement(f"{statement} paper's", row["paper's"], list(expected.papers))
    scopes = [(int(a), int(b or a)) for a, b in SCOPE.findall(row["holds when"])]
    if scopes != list(expected.scopes):
        yield Disagreement(f"{statement} holds when", row["holds when"], list(expected.scopes))
    seeds = list(dict.fromkeys([min(expected.seeds, default=0), max(expected.seeds, default=0)]))
    if list(map(int, printed_numbers(row["seeds"]))) != [count for count in seeds if count]:
        yield Disagreement(f"{statement} seeds", row["seeds"], list(expected.seeds))
