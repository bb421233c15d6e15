"""The definitions of the claims that the tables and the grid search test, written again."""

import math
from collections.abc import Sequence

from recomputation.claim_registry import DEFINITIONS, claim, swapped
from recomputation.evidence import Evidence, Pair, Recomputed
from recomputation.run_records import EXPLICIT, IMPORTANCES, REPLAY, Condition, RunRecord, Setting
from recomputation.seed_intervals import verdict_on_share

PAPER_DATA = ("cifar100", "flowers102", "caltech256")
PAPER_LARGEST_GAIN = 23.0
COMPETITIVE = 2.0
GOOD_SETTING = 5.0


def _explicit_pairs(evidence: Evidence, where: str = "") -> list[Pair]:
    reproduction = evidence.reproduction
    preposition, _, name = where.rpartition(" ")
    if preposition == "with the second network,":
        return evidence.pairs(reproduction.second_conditions, EXPLICIT, IMPORTANCES)
    field = {"with": "network", "in": "regime", "on": "data"}.get(preposition, "")
    conditions = [c for c in evidence.conditions if not where or getattr(c, field) == name]
    return evidence.pairs(conditions, EXPLICIT, IMPORTANCES)


@claim(r"The explicit step is more accurate than its penalty (.+)\.")
def _more_accurate(evidence: Evidence, where: str) -> Recomputed:
    return evidence.mean_claim(_explicit_pairs(evidence, where), "accuracy")


@claim(r"The explicit step forgets less than its penalty (.+)\.")
def _forgets_less(evidence: Evidence, where: str) -> Recomputed:
    return evidence.mean_claim(swapped(_explicit_pairs(evidence, where)), "forgetting")


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
    pairs = pairs if metric == "accuracy" else swapped(pairs)
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
    pairs = evidence.pairs(evidence.conditions, REPLAY, EXPLICIT, every=True)
    return evidence.mean_claim(pairs, "forgetting")


@claim(r"Replay is more accurate than the explicit step\.")
def _replay(evidence: Evidence) -> Recomputed:
    pairs = evidence.pairs(evidence.conditions, REPLAY, EXPLICIT, every=True)
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
    pairs = evidence.pairs(evidence.conditions, ["plain"], IMPORTANCES, every=True)
    return evidence.mean_claim(pairs, "forgetting")


@claim(r"Uniform or random importance (forgets less|is more accurate) than the popular definitions\.")
def _simple_importance(evidence: Evidence, better: str) -> Recomputed:
    conditions = evidence.conditions
    pairs = evidence.pairs(conditions, IMPORTANCES, ("uniform", "random"), every=True)
    forgets = better == "forgets less"
    return evidence.mean_claim(pairs if forgets else swapped(pairs), "forgetting" if forgets else "accuracy")


@claim(
    r"Uniform or random importance preserves the representations of deep layers better than the popular definitions\."
)
def _simple_representations(evidence: Evidence) -> Recomputed:
    conditions = evidence.conditions
    return evidence.mean_claim(evidence.pairs(conditions, ("uniform", "random"), IMPORTANCES, every=True), "deep_cka")


@claim(r"The explicit step gains more on \S+ than with balanced classes\.")
def _more_than_balanced(evidence: Evidence) -> Recomputed:
    balanced = [c for c in evidence.reproduction.main_conditions if c.data == "cifar100"]
    pairs = evidence.pairs(balanced, EXPLICIT, IMPORTANCES)
    return evidence.mean_claim(_explicit_pairs(evidence), "accuracy", minus=pairs)


ONE_SETTING = (_fresh_replay, _more_than_balanced)
AT_BOTH_SETTINGS = {d for d in DEFINITIONS.values() if d.__module__ == __name__ and d not in ONE_SETTING}
"""The definitions of this module so far, of claims that are also tested at the paper's settings."""


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
