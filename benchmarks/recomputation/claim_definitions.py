"""The definition of every claim, written again: one function for each, registered by the claim's statement."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from scipy.stats import spearmanr

from recomputation.comparison import Disagreement, printed_numbers, prints_numbers, rounds_to
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
from recomputation.seed_intervals import SeedInterval, interval, verdict_on_range, verdict_on_share
from recomputation.table_cells import GridCell, grid_cells

PAPER_LARGEST_GAIN = 23.0
COMPETITIVE = 2.0
NO_EFFECT = COMPARABLE = 1.0
EQUIVALENT_ROOTS = 0.5
GOOD_SETTING = 5.0
FEW_ITERATIONS = 10
ROUNDING = 1e-10
FREE = 0.9


class Recomputed(NamedTuple):
    """What a claim's row must say.

    Attributes:
        numbers: the numbers of the column "ours", in order.
        verdict: the verdict.
        papers: the first numbers of the column "paper's"; None if they are quoted from the paper's text.
        words: names that "ours" must contain.
    """

    numbers: Sequence[float]
    verdict: str
    papers: Sequence[float] | None = None
    words: Sequence[str] = ()


Definition = Callable[..., Recomputed]
DEFINITIONS: dict[str, Definition] = {}


def claim(statement: str) -> Callable[[Definition], Definition]:
    """Register the definition of the claims whose statement matches a regular expression; its groups are arguments."""

    def register(definition: Definition) -> Definition:
        DEFINITIONS[statement] = definition
        return definition

    return register


@dataclass(frozen=True)
class Pair:
    """The seeds of two methods under a condition."""

    condition: Condition
    first: Sequence[RunRecord]
    second: Sequence[RunRecord]

    @property
    def all_finished(self) -> bool:
        """Whether every run finished."""
        return all(run.finished for run in (*self.first, *self.second))


class Evidence:
    """The runs behind the claims, and the differences between them."""

    def __init__(self, reproduction: Reproduction) -> None:
        self.reproduction = reproduction

    @cached_property
    def grids(self) -> dict[Condition, dict[str, GridCell]]:
        """The grid search."""
        return grid_cells(self.reproduction)

    @cached_property
    def table(self) -> dict[tuple[Condition, str], Sequence[RunRecord]]:
        """The seeds of each method at our setting, by condition and method."""
        runs = [run for run in self.reproduction.runs_of("claims") if run.part == "trained"]
        rows = rows_by_setting(runs)
        chosen = {(c, m): cell.best for c, methods in self.grids.items() for m, cell in methods.items()}
        return {(c, m): rows[c, m, s] for (c, m), s in chosen.items() if s is not None and (c, m, s) in rows}

    def pairs(
        self, conditions: Sequence[Condition], first: Sequence[str], second: Sequence[str], *, every: bool = False
    ) -> list[Pair]:
        """Return pairs of methods that were both trained: one by one, or every first with every second."""
        names = [(a, b) for a in first for b in second] if every else list(zip(first, second, strict=True))
        known = self.table
        return [
            Pair(c, known[c, a], known[c, b]) for c in conditions for a, b in names if {(c, a), (c, b)} <= known.keys()
        ]

    def gain_claim(self, pairs: Sequence[Pair], metric: str, low: float = 0.0, high: float = math.inf) -> Recomputed:
        """Test whether the mean of first minus second lies between bounds, over pairs in which every run finished."""
        used = [pair for pair in pairs if pair.all_finished] or list(pairs)
        gain = interval(list(gains(used, metric).values()))
        numbers = [] if gain is None else gain.numbers
        if len(used) < len(pairs):
            unfinished = [sum(not all(run.finished for run in side(p)) for p in pairs) for side in (_first, _second)]
            numbers = [*numbers, len(used), len(pairs), *unfinished]
        known = self.papers(used, metric)
        papers = [math.fsum(known) / len(known)] if known else None
        return Recomputed(numbers, verdict_on_range(gain, low, high), papers)

    def papers(self, pairs: Sequence[Pair], metric: str) -> list[float]:
        """Return the differences between the means of the paper's tables, where it has both."""
        differences = []
        for pair in pairs:
            cells = [
                self.reproduction.published_cell(pair.condition, side[0].method) for side in (pair.first, pair.second)
            ]
            if all(metric in cell for cell in cells):
                differences.append(cells[0][metric] - cells[1][metric])
        return differences

    def violations(self, run: RunRecord) -> list[int]:
        """Return after each task how many parameters have lr * strength * importance >= 1."""
        return [s["extrapolate"] + s["diverge"] - s["negative"] for s in self.reproduction.stability_of(run)]

    def broke_under_penalty(self, run: RunRecord) -> bool:
        """Return whether a run became unstable after the first task, when a penalty acts."""
        return run.status == "unstable" and bool(self.reproduction.stability_of(run))


def _first(pair: Pair) -> Sequence[RunRecord]:
    return pair.first


def _second(pair: Pair) -> Sequence[RunRecord]:
    return pair.second


def gains(pairs: Sequence[Pair], metric: str) -> dict[int, Any]:
    """Return by seed the mean over pairs of first minus second; only seeds that finished everywhere."""
    sides = [({r.seed: r for r in p.first if r.finished}, {r.seed: r for r in p.second if r.finished}) for p in pairs]
    seeds = sorted(set.intersection(*(set(side) for both in sides for side in both))) if sides else []
    return {
        seed: sum(getattr(a[seed], metric) - getattr(b[seed], metric) for a, b in sides) / len(sides) for seed in seeds
    }


def mean_over_known(pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> SeedInterval | None:
    """Return the mean over seeds of first minus second, each seed averaged over the pairs in which it has both."""
    by_seed: dict[int, list[Any]] = {}
    for first, second in pairs:
        for seed, (a, b) in enumerate(zip(first, second, strict=True)):
            if a is not None and b is not None:
                by_seed.setdefault(seed, []).append(a - b)
    return interval([sum(values) / len(values) for values in by_seed.values()])


def _on_range(value: SeedInterval | None, low: float = 0.0, high: float = math.inf) -> Recomputed:
    return Recomputed([] if value is None else value.numbers, verdict_on_range(value, low, high))


# The tables.


def _explicit_pairs(evidence: Evidence, where: str) -> list[Pair]:
    reproduction = evidence.reproduction
    preposition, name = where.rsplit(" ", 1)
    if preposition == "with the second network,":
        return evidence.pairs(reproduction.second_conditions, EXPLICIT, IMPORTANCES)
    field = {"with": "network", "in": "regime", "on": "data"}[preposition]
    conditions = [condition for condition in reproduction.main_conditions if getattr(condition, field) == name]
    return evidence.pairs(conditions, EXPLICIT, IMPORTANCES)


def _swapped(pairs: Sequence[Pair]) -> list[Pair]:
    return [Pair(pair.condition, pair.second, pair.first) for pair in pairs]


@claim(r"The explicit step is more accurate than its penalty (.+)\.")
def _more_accurate(evidence: Evidence, where: str) -> Recomputed:
    return evidence.gain_claim(_explicit_pairs(evidence, where), "accuracy")


@claim(r"The explicit step forgets less than its penalty (.+)\.")
def _forgets_less(evidence: Evidence, where: str) -> Recomputed:
    return evidence.gain_claim(_swapped(_explicit_pairs(evidence, where)), "forgetting")


@claim(r"The explicit step gains up to 23 points of accuracy in (.+)\.")
def _largest_gain(evidence: Evidence, regime: str) -> Recomputed:
    pairs = _explicit_pairs(evidence, f"in {regime}")
    known = [(gain, p) for p in pairs if (gain := interval(list(gains([p], "accuracy").values()))) is not None]
    if not known:
        return Recomputed([0 if pairs else len(pairs), len(pairs)] if pairs else [], "not decided")
    largest, pair = max(known, key=lambda entry: entry[0].mean)
    missing = [len(pairs) - len(known), len(pairs)] if len(known) < len(pairs) else []
    verdict = verdict_on_range(largest, PAPER_LARGEST_GAIN)
    return Recomputed([*largest.numbers, *missing], verdict, words=(pair.first[0].method, pair.condition.data))


@claim(r"The explicit step is consistently (more accurate|less forgetful) than its penalty\.")
def _consistently(evidence: Evidence, better: str) -> Recomputed:
    metric = "accuracy" if better == "more accurate" else "forgetting"
    pairs = evidence.pairs(evidence.reproduction.main_conditions, EXPLICIT, IMPORTANCES)
    pairs = pairs if metric == "accuracy" else _swapped(pairs)
    verdicts = [verdict_on_range(interval(list(gains([pair], metric).values()))) for pair in pairs]
    holds, fails = verdicts.count("holds"), verdicts.count("does not hold")
    verdict = "does not hold" if fails else "holds" if pairs and holds == len(pairs) else "not decided"
    known = evidence.papers(pairs, metric)
    return Recomputed(
        [holds, len(pairs), fails], verdict, [sum(value > 0 for value in known), len(known)] if known else None
    )


@claim(r"On cifar100, penalties are competitive with the explicit step\.")
def _competitive(evidence: Evidence) -> Recomputed:
    return evidence.gain_claim(_explicit_pairs(evidence, "on cifar100"), "accuracy", -math.inf, COMPETITIVE)


@claim(r"The explicit step gains most with unbalanced classes and long streams\.")
def _gains_most(evidence: Evidence) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.main_conditions, EXPLICIT, IMPORTANCES)
    groups = [[pair for pair in pairs if (pair.condition.data == "cifar100") is cifar] for cifar in (True, False)]
    cifar, others = (gains([p for p in group if p.all_finished] or group, "accuracy") for group in groups)
    return _on_range(interval([others[seed] - cifar[seed] for seed in cifar if seed in others]))


@claim(r"The explicit step preserves the representations of deep layers, and its penalty does not\.")
def _preserves_deep_layers(evidence: Evidence) -> Recomputed:
    return evidence.gain_claim(evidence.pairs(evidence.reproduction.main_conditions, EXPLICIT, IMPORTANCES), "deep_cka")


@claim(r"The explicit step forgets less than replay\.")
def _less_than_replay(evidence: Evidence) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.main_conditions, REPLAY, EXPLICIT, every=True)
    return evidence.gain_claim(pairs, "forgetting")


@claim(r"Replay is more accurate than the explicit step\.")
def _replay(evidence: Evidence) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.main_conditions, REPLAY, EXPLICIT, every=True)
    return evidence.gain_claim(pairs, "accuracy")


@claim(r"Penalties forget less than plain fine-tuning\.")
def _less_than_plain(evidence: Evidence) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.main_conditions, ["plain"], IMPORTANCES, every=True)
    return evidence.gain_claim(pairs, "forgetting")


@claim(r"Uniform or random importance (forgets less|is more accurate) than the popular definitions\.")
def _simple_importance(evidence: Evidence, better: str) -> Recomputed:
    conditions = evidence.reproduction.main_conditions
    pairs = evidence.pairs(conditions, IMPORTANCES, ("uniform", "random"), every=True)
    forgets = better == "forgets less"
    return evidence.gain_claim(pairs if forgets else _swapped(pairs), "forgetting" if forgets else "accuracy")


@claim(r"With (\S+), plain fine-tuning can be more accurate than EWC\.")
def _plain_against_ewc(evidence: Evidence, network: str) -> Recomputed:
    pairs = evidence.pairs(evidence.reproduction.second_conditions, ["plain"], ["ewc"])
    differences = [interval(list(gains([pair], "accuracy").values())) for pair in pairs]
    verdicts = [verdict_on_range(difference) for difference in differences]
    decided = bool(verdicts) and "not decided" not in verdicts
    verdict = "holds" if "holds" in verdicts else "does not hold" if decided else "not decided"
    known = evidence.papers(pairs, "accuracy")
    papers = [sum(value > 0 for value in known), len(known)] if known else None
    return Recomputed([n for d in differences if d is not None for n in d.numbers], verdict, papers)


# The grid search.


def _grid_runs(evidence: Evidence, condition: Condition, methods: Sequence[str]) -> list[RunRecord]:
    """Return the runs at learning rates at which plain fine-tuning finishes."""
    grid = evidence.grids[condition]
    lrs = {run.setting.lr for seeds in grid["plain"].settings.values() for run in seeds if run.finished}
    runs = [run for method in methods for seeds in grid[method].settings.values() for run in seeds]
    return [run for run in runs if run.setting.lr in lrs]


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
        stable = [strength for run in positive if (strength := run.setting.strength) not in broken]
        if not stable:
            continue
        at_largest = [run for run in here if run.setting.strength == max(stable)]
        negative = [r for r in at_largest if any(s["negative"] for s in evidence.reproduction.stability_of(r))]
        if negative:
            counts.append((sum(run.status == "unstable" for run in negative), len(negative)))
    holds = sum(2 * unstable >= total for unstable, total in counts)
    return Recomputed([n for pair in counts for n in pair], verdict_on_share(holds, len(counts)))


@claim(r"Training with only positive scores is always stable\.")
def _positive_scores(evidence: Evidence) -> Recomputed:
    runs = [run for run in evidence.reproduction.runs_of("fig-negative") if run.method == "si-absolute"]
    unstable = [run for run in runs if run.status == "unstable"]
    violating = sum(evidence.violations(run)[:1] not in ([], [0]) for run in unstable)
    stable = len(runs) - len(unstable)
    return Recomputed([stable, len(runs), violating], verdict_on_share(stable, len(runs)))


@claim(r"A strength small enough for negative scores has no more effect than plain fine-tuning\.")
def _weak_penalty(evidence: Evidence) -> Recomputed:
    rows = rows_by_setting(evidence.reproduction.runs_of("fig-negative"))
    weakest = min(setting.strength for _, _, setting in rows if setting.strength is not None)
    plain = {condition: runs for (condition, method, _), runs in rows.items() if method == "plain"}
    pairs = [
        Pair(condition, runs, plain[condition])
        for (condition, method, setting), runs in rows.items()
        if method == "si-flipped" and setting.strength == weakest
    ]
    return _on_range(interval(list(gains(pairs, "accuracy").values())), -NO_EFFECT, NO_EFFECT)


def _sweep(evidence: Evidence, *, clamped: bool) -> list[RunRecord]:
    runs = evidence.reproduction.runs_of("fig-violations")
    return [run for run in runs if run.method.startswith("clamped-") is clamped]


def _unclamped(run: RunRecord) -> tuple[Condition, str, Setting]:
    return run.condition, run.method.removeprefix("clamped-"), run.setting


@claim(r"Training becomes unstable only after the first violation of lr \* strength \* importance < 1\.")
def _violation_first(evidence: Evidence) -> Recomputed:
    counts = [evidence.violations(r) for r in _sweep(evidence, clamped=False) if evidence.broke_under_penalty(r)]
    violated, at_once = sum(map(any, counts)), sum(tasks[0] > 0 for tasks in counts)
    return Recomputed([violated, len(counts), at_once], verdict_on_share(violated, len(counts)))


@claim(r"A few violations are sufficient\.")
def _few_violations(evidence: Evidence) -> Recomputed:
    violating = [run for run in _sweep(evidence, clamped=False) if any(evidence.violations(run)[:1])]
    unstable = sum(map(evidence.broke_under_penalty, violating))
    return Recomputed([unstable, len(violating)], verdict_on_share(unstable, len(violating), 0.5))


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


def _clamped_sweeps(evidence: Evidence) -> Iterator[list[tuple[Sequence[RunRecord], Sequence[RunRecord]]]]:
    """Yield for each data set, method and learning rate: plain and clamped seeds of each strength that has both."""
    plain, clamped = (rows_by_setting(_sweep(evidence, clamped=form)) for form in (False, True))
    strengths: dict[tuple[Condition, str, float], list[float]] = {}
    for condition, method, setting in clamped:
        original = (condition, method.removeprefix("clamped-"), setting)
        if original in plain:
            strengths.setdefault((*original[:2], setting.lr), []).append(setting.strength or 0.0)
    for (condition, method, lr), values in strengths.items():
        settings = [Setting(lr, strength) for strength in sorted(values)]
        yield [(plain[condition, method, s], clamped[condition, f"clamped-{method}", s]) for s in settings]


@claim(r"Clamped penalties are accurate at strengths that are unstable without clamping\.")
def _clamped_accuracy(evidence: Evidence) -> Recomputed:
    pairs = []
    for sweep in _clamped_sweeps(evidence):
        weakest = sweep[0][1]
        unstable = [clamped for plain, clamped in sweep if any(map(evidence.broke_under_penalty, plain))]
        pairs += [Pair(weakest[0].condition, clamped, weakest) for clamped in unstable]
    return _on_range(interval(list(gains(pairs, "accuracy").values())))


@claim(r"With clamping, a very large strength makes a model learn less of new tasks\.")
def _clamped_learning(evidence: Evidence) -> Recomputed:
    pairs = [Pair(sweep[0][1][0].condition, sweep[0][1], sweep[-1][1]) for sweep in _clamped_sweeps(evidence)]
    return _on_range(interval(list(gains(pairs, "learned").values())))


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


@claim(r"Deeper layers get less importance\.")
def _less_importance(evidence: Evidence) -> Recomputed:
    found = _depth_correlations(evidence, [name for name in IMPORTANCES if name != "si"])
    falling = sum(value < 0 for value in found)
    return Recomputed([falling, len(found)], verdict_on_share(falling, len(found)))


@claim(r"SI is the exception: its importance does not decrease with depth\.")
def _si_exception(evidence: Evidence) -> Recomputed:
    found = _depth_correlations(evidence, ["si"])
    rising = sum(value >= 0 for value in found)
    return Recomputed([rising, len(found)], verdict_on_share(rising, len(found)))


def _by_method(evidence: Evidence, target: str, method: str, metric: str) -> list[list[Any]]:
    """Return a metric of every seed, one list for each data set; None where a run did not finish."""
    runs = sorted(evidence.reproduction.runs_of(target), key=lambda run: run.seed)
    return [
        [run.metric(metric) for run in runs if run.method == method and run.condition.data == data]
        for data in evidence.reproduction.scale["data"]
    ]


def _balance(evidence: Evidence, first: tuple[str, str], second: tuple[str, str]) -> SeedInterval | None:
    """Return a mean difference over importances and data sets; each side is a prefix of the method, and a metric."""
    pairs = []
    for name in IMPORTANCES:
        sides = [_by_method(evidence, "fig-cka", f"{prefix}{name}", metric) for prefix, metric in (first, second)]
        pairs += list(zip(*sides, strict=True))
    return mean_over_known(pairs)


@claim(r"Penalties let deep layers change more than early ones\.")
def _deep_layers_change(evidence: Evidence) -> Recomputed:
    return _on_range(_balance(evidence, ("", "early_cka"), ("", "deep_cka")))


@claim(r"Balanced importance preserves the representations of deep layers\.")
def _balance_preserves(evidence: Evidence) -> Recomputed:
    return _on_range(_balance(evidence, ("balanced-", "deep_cka"), ("", "deep_cka")))


@claim(r"Balanced importance forgets less\.")
def _balance_forgets(evidence: Evidence) -> Recomputed:
    return _on_range(_balance(evidence, ("", "forgetting"), ("balanced-", "forgetting")))


@claim(r"Balanced importance is comparable in accuracy\.")
def _balance_accuracy(evidence: Evidence) -> Recomputed:
    return _on_range(_balance(evidence, ("balanced-", "accuracy"), ("", "accuracy")), -COMPARABLE)


def _roots(evidence: Evidence, first: str, second: str) -> SeedInterval | None:
    pairs = []
    for name in EXPLICIT:
        sides = [_by_method(evidence, "roots", f"{name}{root}", "forgetting") for root in (first, second)]
        pairs += list(zip(*sides, strict=True))
    return mean_over_known(pairs)


@claim(r"The square root in R forgets less than the plain ratio\.")
def _square_root(evidence: Evidence) -> Recomputed:
    return _on_range(_roots(evidence, "-ratio", ""))


@claim(r"The cube root in R forgets less than the plain ratio\.")
def _cube_root(evidence: Evidence) -> Recomputed:
    return _on_range(_roots(evidence, "-ratio", "-cube"))


@claim(r"The choice of the root does not matter\.")
def _which_root(evidence: Evidence) -> Recomputed:
    return _on_range(_roots(evidence, "-cube", ""), -EQUIVALENT_ROOTS, EQUIVALENT_ROOTS)


def compare_claims(reproduction: Reproduction) -> tuple[int, list[Disagreement]]:
    """Return how many claims were recomputed, and the disagreements with the target `claims`."""
    evidence, count, disagreements = Evidence(reproduction), 0, list[Disagreement]()
    for row in (row for table in reproduction.findings["claims"]["tables"] for row in table["rows"]):
        statement = row["claim"]
        matches = [(d, m) for pattern, d in DEFINITIONS.items() if (m := re.fullmatch(pattern, statement))]
        if len(matches) != 1:
            disagreements.append(Disagreement(statement, row["ours"], "not recomputed"))
            continue
        count += 1
        definition, match = matches[0]
        expected = definition(evidence, *match.groups())
        ours = row["ours"]
        if not prints_numbers(ours, expected.numbers) or not all(word in ours for word in expected.words):
            disagreements.append(Disagreement(f"{statement} ours", ours, [*expected.numbers, *expected.words]))
        if row["verdict"] != expected.verdict:
            disagreements.append(Disagreement(f"{statement} verdict", row["verdict"], expected.verdict))
        if expected.papers is not None:
            printed = printed_numbers(row["paper's"])[: len(expected.papers)]
            if len(printed) < len(expected.papers) or not all(map(rounds_to, expected.papers, printed)):
                disagreements.append(Disagreement(f"{statement} paper's", row["paper's"], list(expected.papers)))
    return count, disagreements
