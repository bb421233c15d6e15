"""The claims about tables and the grid search: verdicts on invented runs, and on the runs of other targets."""

from dataclasses import replace

import numpy as np
import pytest

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import summarize
from mooring_lab.study.protocol import choose_settings
from mooring_paper.claims import claims_table, table_claims
from mooring_paper.claims.method_pairs import Evidence, MethodPair, PairGroup, decide_pairs
from mooring_paper.claims.sequential_verdict import LookSchedule, decide
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import EXPLICIT, MINIATURE, PAPER, REGULARIZERS, REPLAY
from mooring_paper.context.seed_statistics import summarize_seeds
from mooring_paper.published.published_numbers import Setting
from mooring_paper.tables import grid_search
from mooring_paper.targets import TARGETS

CONDITION = MINIATURE.conditions()[0]
LOOKS = LookSchedule((3,))
"""One look at three seeds, at 95 %."""

EVIDENCE = Evidence(None, LOOKS)


def row(method, accuracies, forgotten=0.0, unstable=()):
    """A row of two tasks with this accuracy for each seed."""
    results = []
    for seed, accuracy in enumerate(accuracies):
        spec = RunSpec("digits", "0", method, seed, strength=1.0 if method in REGULARIZERS else None)
        matrix = [[accuracy + forgotten, 10.0], [accuracy - forgotten, accuracy + forgotten]]
        status = "unstable" if seed in unstable else "finished"
        results.append(Result(spec, status, "", [10.0, 10.0], matrix))
    return summarize(results)[0]


def pair(first, second, condition=CONDITION):
    return MethodPair(condition, (first.setting.method, second.setting.method), (first, second))


def test_difference_is_the_mean_over_pairs_by_seed():
    pairs = [pair(row("explicit-ewc", [62.0, 63.0]), row("ewc", [60.0, 60.0]))]
    pairs.append(pair(row("explicit-si", [61.0, 64.0]), row("si", [60.0, 61.0])))
    difference = decide_pairs(pairs, "accuracy", LOOKS).decision.difference
    assert (difference.mean, difference.count) == (pytest.approx(2.25), 2)


def test_pairs_with_a_run_that_did_not_finish_are_left_out():
    complete = pair(row("explicit-si", [61.0, 62.0, 63.0]), row("si", [60.0] * 3))
    broken = pair(row("explicit-ewc", [62.0, 63.0, 99.0]), row("ewc", [60.0, 60.0, 0.0], unstable=(2,)))
    tested = decide_pairs([complete, broken], "accuracy", LOOKS)
    assert tested.used == (complete,)
    assert tested.decision.difference.mean == pytest.approx(2.0)
    assert decide_pairs([broken], "accuracy", LOOKS).decision.difference is None
    assert decide_pairs([], "accuracy", LOOKS).decision.verdict == "not decided"


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ([65.0, 65.1, 64.9], "holds"),
        ([55.0, 55.1, 54.9], "does not hold"),
        ([65.0, 55.0, 61.0], "not decided"),
        ([65.0], "not decided"),
    ],
)
def test_gains_beyond_chance_are_decided(accuracies, verdict):
    pairs = [pair(row("explicit-ewc", accuracies), row("ewc", [60.0] * len(accuracies)))]
    assert decide_pairs(pairs, "accuracy", LOOKS).decision.verdict == verdict


BETTER = [row(name, [65.0, 65.2, 64.8], forgotten=0.1) for name in EXPLICIT]
WORSE = [row(name, [60.0, 60.1, 59.9], forgotten=3.0) for name in REGULARIZERS]
BROKEN = [row(name, [60.0] * 3, unstable=(0, 1, 2) if name == "si" else ()) for name in REGULARIZERS]


def by_method(rows):
    return {row.setting.method: row for row in rows}


def explicit_pairs(rows, condition=CONDITION):
    return EVIDENCE.pairs({condition: by_method(rows)}, table_claims.EXPLICIT_PAIRS)


def verdicts(claims):
    return [claim.verdict for claim in claims]


def test_explicit_step_is_compared_with_its_penalty_and_with_replay():
    replay = [row(name, [68.0, 68.1, 67.9], forgotten=1.0) for name in REPLAY]
    better = explicit_pairs([*BETTER, *WORSE])
    assert verdicts(table_claims._explicit_against_penalty(better, "here")) == ["holds"] * 2
    assert verdicts(table_claims._against_replay(EVIDENCE, {CONDITION: by_method([*BETTER, *replay])})) == ["holds"] * 2
    inferior = [row(name, [55.0, 55.1, 54.9], forgotten=9.0) for name in EXPLICIT] + WORSE
    claims = table_claims._explicit_against_penalty(explicit_pairs(inferior), "here")
    assert verdicts(claims) == ["does not hold"] * 2
    without_replay = table_claims._against_replay(EVIDENCE, {CONDITION: by_method(inferior)})
    assert verdicts(without_replay) == ["not decided"] * 2
    assert "over 0 of 8 pairs (mlp, 1-epoch, digits)" in without_replay[0].definition


def test_one_opposite_pair_refutes_consistency():
    assert verdicts(table_claims._every_pair_gains(explicit_pairs([*BETTER, *WORSE]))) == ["holds"] * 2
    opposite = [*BETTER[1:], row(EXPLICIT[0], [50.0, 50.1, 49.9], forgotten=9.0), *WORSE]
    claims = table_claims._every_pair_gains(explicit_pairs(opposite))
    assert verdicts(claims) == ["does not hold"] * 2
    assert claims[0].ours == "better in 3 of 4 pairs, worse in 1"


def test_refutation_by_one_of_several_pairs_is_corrected_for_their_number():
    """A pair that is worse at 95 % alone is no exception among four."""
    slightly_worse = row(EXPLICIT[0], [59.0, 59.4, 58.6])
    alone = PairGroup((pair(slightly_worse, row("ewc", [60.0] * 3)),), LOOKS)
    assert table_claims._every_pair_gains(alone)[0].verdict == "does not hold"
    among = PairGroup((*explicit_pairs([*BETTER[1:], *WORSE]).pairs[1:], *alone.pairs), LOOKS)
    assert table_claims._every_pair_gains(among)[0].verdict == "not decided"


def test_consistency_is_not_decided_if_a_pair_is_missing():
    claim = table_claims._every_pair_gains(explicit_pairs([*BETTER, *BROKEN]))[0]
    assert (claim.verdict, claim.papers) == ("not decided", "")
    assert claim.ours == "better in 3 of 4 pairs, worse in 0; 1 left out, with unstable runs"


def test_papers_number_is_the_mean_of_its_tables_over_the_same_pairs():
    condition = PAPER.conditions()[0]
    accuracy = table_claims._explicit_against_penalty(explicit_pairs([*BETTER, *WORSE], condition), "here")[0]
    # 63.8 - 62.5, 64.0 - 63.9, 63.9 - 61.2, 63.8 - 63.9
    assert accuracy.papers == "+1.00 by its tables over the same pairs"
    assert "over 4 pairs (cnn6, 1-epoch, cifar100)" in accuracy.definition
    pairs = explicit_pairs([*BETTER, *BROKEN], condition)
    accuracy, forgetting = table_claims._explicit_against_penalty(pairs, "here")
    assert accuracy.papers == "+0.43 by its tables over the same pairs"  # without 63.9 - 61.2
    # 2.07 - 0.08, 0.56 - 0.06, 0.54 - 0.09
    assert forgetting.papers == "+0.98 by its tables over the same pairs"
    assert "over 3 of 4 pairs (cnn6, 1-epoch, cifar100)" in accuracy.definition
    assert accuracy.ours.endswith(" over 3 of 4 pairs; 1 left out, with unstable runs")
    assert table_claims._every_pair_gains(pairs)[0].papers == "in 2 of the same 3 by its tables"


def test_methods_without_a_setting_count_as_missing_pairs():
    claim = table_claims._explicit_against_penalty(explicit_pairs([*BETTER, *WORSE[:3]]), "here")[0]
    assert "over 3 of 4 pairs" in claim.definition
    assert claim.ours.endswith(" over 3 of 4 pairs; 1 left out, without a setting that finished the search")


def test_pairs_are_left_out_for_several_reasons():
    claim = table_claims._explicit_against_penalty(explicit_pairs([*BETTER, *BROKEN[:3]]), "here")[0]
    reasons = "; 2 left out, 1 with unstable runs, 1 without a setting that finished the search"
    assert claim.ours.endswith(f" over 2 of 4 pairs{reasons}")


def test_claims_on_the_tables_are_tested_at_both_settings():
    ours, papers = (
        table_claims._explicit_against_penalty(explicit_pairs([*BETTER, *others]), "here") for others in (BROKEN, WORSE)
    )
    accuracy, _ = table_claims.at_both_settings(ours, papers)
    assert (accuracy.ours, accuracy.verdict) == (ours[0].ours, "holds")
    assert accuracy.at_paper_settings == f"{papers[0].ours}: holds"
    assert accuracy.at_paper_settings.endswith(" over 4 of 4 pairs: holds")
    assert accuracy.to_row()["at the paper's settings"] == accuracy.at_paper_settings
    empty = table_claims._explicit_against_penalty(explicit_pairs([]), "here")
    assert [claim.at_paper_settings for claim in table_claims.at_both_settings(ours, empty)] == ["", ""]


def test_replay_with_fresh_heads_is_compared_by_column():
    cifar, flowers = PAPER.conditions()[:2]
    replay = [row(name, [70.0, 70.2, 69.8]) for name in REPLAY]
    higher = [row(name, [80.0, 80.2, 79.8]) for name in REPLAY]
    rows = {cifar: by_method([*BETTER, *replay]), flowers: by_method([*BETTER, *higher])}
    claim = table_claims.fresh_replay_claim(EVIDENCE, rows)
    assert claim.verdict == "holds"
    assert claim.ours.startswith("+10.00")
    assert claim.ours.endswith(" over 16 of 16 pairs; +5.00 on cifar100 in 1-epoch, +15.00 on flowers102 in 1-epoch")
    assert claim.wanted == ()


def test_gains_are_compared_between_data_sets_by_seed():
    cifar, flowers = PAPER.conditions()[:2]
    better = [row(name, [80.0, 80.2, 79.8]) for name in EXPLICIT]
    rows = {cifar: by_method([*BETTER, *WORSE]), flowers: by_method([*better, *WORSE])}
    competitive, more = table_claims._long_streams(EVIDENCE.pairs(rows, table_claims.EXPLICIT_PAIRS))
    assert (competitive.verdict, more.verdict) == ("does not hold", "holds")
    assert more.ours.startswith("+15.00")
    # 60.0 - 41.3, 59.6 - 57.5, 59.9 - 36.2 and 59.4 - 44.9 on average, less the 1.00 on cifar100
    assert more.papers == "+13.75 by its tables over the same pairs"
    assert not table_claims._long_streams(explicit_pairs([*BETTER, *WORSE]))  # no cifar100


# The largest gain


def largest_gain(rows, condition=CONDITION, scale=MINIATURE):
    return table_claims._largest_gain(explicit_pairs(rows, condition), scale)


def test_largest_gain_is_named():
    claim = largest_gain([*BETTER, *WORSE])
    assert claim.verdict == "does not hold"
    assert claim.ours == "at most +5.00 [+4.75, +5.25], explicit-ewc against ewc on digits in 1-epoch"
    assert table_claims._largest_gain(PairGroup((), LOOKS), MINIATURE).verdict == "not decided"


def test_largest_gain_is_not_refuted_without_the_papers_own_pair():
    """The paper's largest gain is that of SI on Flowers-102."""
    _, flowers = PAPER.conditions()[:2]
    assert largest_gain([*BETTER, *WORSE], condition=flowers, scale=PAPER).verdict == "does not hold"
    claim = largest_gain([*BETTER, *BROKEN], condition=flowers, scale=PAPER)
    assert claim.verdict == "not decided"
    assert claim.ours.endswith("; 1 left out, with unstable runs")
    assert claim.papers == "23 in its text, +23.70 by its tables for explicit-si against si on flowers102 in 1-epoch"


def test_largest_gain_is_not_refuted_if_the_papers_own_pair_is_not_trained():
    cifar = PAPER.conditions()[0]
    claim = largest_gain([*BETTER, *WORSE], condition=cifar, scale=PAPER)
    assert claim.verdict == "not decided"
    assert "the paper's own pair, explicit-si against si on flowers102 in 1-epoch, was not trained" in claim.ours


def test_largest_gain_holds_although_another_pair_is_missing():
    large = [*BETTER[:3], row("explicit-rwalk", [90.0, 90.1, 89.9])]
    assert largest_gain([*large, *BROKEN]).verdict == "holds"


def test_plain_is_not_inferior_to_ewc_without_the_papers_own_pair():
    """In the paper, plain gains most on Caltech-256."""
    cifar, _, caltech = PAPER.second_conditions()

    def claim(rows):
        tables = {condition: by_method(table) for condition, table in rows.items()}
        return table_claims._plain_against_ewc(EVIDENCE.pairs(tables, [("plain", "ewc")]), PAPER)

    inferior = [row("plain", [50.0, 50.1, 49.9]), *WORSE]
    untrained = claim({cifar: inferior})
    assert (untrained.verdict, untrained.papers) == ("not decided", "in 1 of the same 1 by its tables")
    assert "plain against ewc on caltech256 in 1-epoch, was not trained" in untrained.ours
    assert claim({cifar: inferior, caltech: inferior}).verdict == "does not hold"
    assert claim({cifar: [row("plain", [70.0, 70.1, 69.9]), *WORSE]}).verdict == "holds"
    assert claim({}).verdict == "not decided"


def test_simple_penalties_are_compared_with_the_popular_ones():
    simple = [row(name, [64.0, 64.1, 63.9], forgotten=0.2) for name in ("uniform", "random")]
    rows = {CONDITION: by_method([row("plain", [50.0, 50.1, 49.9], forgotten=9.0), *WORSE, *simple])}
    *compared, representations = table_claims._against_simple(EVIDENCE, rows)
    assert verdicts(compared) == ["holds"] * 3
    assert representations.verdict == "not decided"  # these runs have no CKA
    similar = {
        m: replace(r, results=tuple(map(with_cka(m in ("uniform", "random")), r.results)))
        for m, r in rows[CONDITION].items()
    }
    *_, representations = table_claims._against_simple(EVIDENCE, {CONDITION: similar})
    assert representations.verdict == "holds"
    assert representations.ours.startswith("+0.4000")


def with_cka(high):
    return lambda run: replace(run, cka={"first": 1.0, "last": 0.9 if high else 0.5})


# More seeds


FOUR_LOOKS = LookSchedule.between(5, 20)
NOISE = [4.0, -3.0, 5.0, -2.0, 3.0, 1.0, 1.1, 0.9, 1.0, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.0, 1.0, 1.1, 0.9]


def noisy_pair(seeds):
    """A pair whose first five seeds do not decide."""
    return pair(row("explicit-ewc", [60.0 + gain for gain in NOISE[:seeds]]), row("ewc", [60.0] * seeds))


def test_undecided_pairs_want_the_seeds_of_the_next_look():
    tested = decide_pairs([noisy_pair(5)], "accuracy", FOUR_LOOKS)
    assert (tested.decision.verdict, tested.seeds) == ("not decided", 5)
    assert [(r.setting.method, seeds) for r, seeds in tested.wanted] == [("explicit-ewc", 10), ("ewc", 10)]
    assert not decide_pairs([noisy_pair(5)], "accuracy", LookSchedule((5,))).wanted


def test_seeds_are_added_until_the_interval_decides():
    decided = [decide_pairs([noisy_pair(seeds)], "accuracy", FOUR_LOOKS) for seeds in (5, 10, 15, 20)]
    assert [tested.decision.verdict for tested in decided] == ["not decided", "not decided", "not decided", "holds"]
    assert [tested.seeds for tested in decided] == [5, 10, 15, 20]
    assert not decided[-1].wanted


def test_decided_pairs_ignore_later_seeds():
    """Other claims may have needed them."""
    first, second = row("explicit-ewc", [65.0, 65.1, 64.9, 65.0, 65.0, *[0.0] * 5]), row("ewc", [60.0] * 10)
    tested = decide_pairs([pair(first, second)], "accuracy", FOUR_LOOKS)
    assert (tested.decision.verdict, tested.seeds, tested.wanted) == ("holds", 5, ())


def test_undecided_pairs_stop_at_the_last_look():
    pairs = [pair(row("explicit-ewc", [61.0, 59.0] * 10), row("ewc", [60.0] * 20))]
    tested = decide_pairs(pairs, "accuracy", FOUR_LOOKS)
    assert (tested.decision.verdict, tested.seeds, tested.wanted) == ("not decided", 20, ())


def test_only_undecided_pairs_of_a_claim_want_more_seeds():
    clear = pair(row("explicit-si", [65.0, 65.1, 64.9, 65.0, 65.0]), row("si", [60.0] * 5))
    claim = PairGroup((clear, noisy_pair(5)), FOUR_LOOKS).in_each("", "", "accuracy")
    assert {r.setting.method for r, _ in claim.wanted} == {"explicit-ewc", "ewc"}
    claim = PairGroup((clear, noisy_pair(20)), FOUR_LOOKS).in_each("", "", "accuracy")
    assert (claim.verdict, claim.wanted, claim.to_row()["seeds"]) == ("holds", (), "5 to 20")


def test_more_seeds_are_not_wanted_for_a_verdict_out_of_reach():
    """A missing pair can not be made up for: the noisy pair would have to be worse to refute the claim."""
    broken = pair(row("explicit-si", [65.0] * 5), row("si", [60.0] * 5, unstable=(3,)))
    claim = PairGroup((broken, noisy_pair(5)), FOUR_LOOKS).in_each("", "", "accuracy")
    assert (claim.verdict, claim.wanted) == ("not decided", ())
    claim = PairGroup((broken, PairGroup((noisy_pair(5),), FOUR_LOOKS).swapped.pairs[0]), FOUR_LOOKS).in_each(
        "", "", "accuracy"
    )
    assert {r.setting.method for r, _ in claim.wanted} == {"explicit-ewc", "ewc"}


def decided_share(looks, cases=4000):
    """How often a true difference of 0 is decided, over simulated cases."""
    random = np.random.default_rng(0)
    differences = random.normal(size=(cases, looks.seeds[-1]))
    return np.mean([decide(lambda n, v=v: v[:n].tolist(), looks).verdict != "not decided" for v in differences])


def test_looks_together_decide_by_chance_in_at_most_five_percent_of_cases():
    three_deviations = 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert decided_share(LookSchedule((5,))) == pytest.approx(0.05, abs=three_deviations)
    assert decided_share(FOUR_LOOKS) <= 0.05 + three_deviations


def test_repeated_looks_at_95_percent_would_decide_by_chance_more_often(monkeypatch):
    monkeypatch.setattr(LookSchedule, "confidence", lambda self, comparisons=1: 0.95)
    assert decided_share(FOUR_LOOKS) > 0.1


def test_claims_over_many_pairs_are_refuted_by_chance_in_at_most_five_percent_of_cases():
    """Eight pairs without a difference, of which one that seems worse refutes."""
    random, cases, pairs = np.random.default_rng(1), 1000, 8
    refuted = 0
    for case in random.normal(size=(cases, pairs, 20)):
        decisions = [decide(lambda n, v=v: v[:n].tolist(), FOUR_LOOKS, comparisons_to_fail=pairs) for v in case]
        refuted += any(decision.verdict == "does not hold" for decision in decisions)
    assert refuted / cases <= 0.05 + 3 * (0.05 * 0.95 / cases) ** 0.5


# The grid search


def search_results(**grids):
    """One condition in which methods were tried at (lr, strength) with this status and accuracy."""
    choices = []
    for name, tried in grids.items():
        method = name.replace("_", "-")
        results = []
        for lr, strength, status, accuracy in tried:
            spec = RunSpec("digits", "0", method, 0, lr=lr, strength=strength)
            results.append(Result(spec, status, "", [10.0], [[accuracy]] if status == "finished" else []))
        choices += choose_settings("digits", results, [method])
    return {CONDITION: choices}


PLAIN = [(0.1, None, "unstable", 0.0), (0.01, None, "finished", 60.0)]


def test_instability_does_not_count_where_plain_is_unstable():
    stable = search_results(plain=PLAIN, explicit_ewc=PLAIN)
    assert table_claims._explicit_is_stable(stable).verdict == "holds"
    unstable = search_results(plain=PLAIN, explicit_ewc=[(0.01, None, "unstable", 0.0)])
    assert table_claims._explicit_is_stable(unstable).verdict == "does not hold"


def test_bound_is_judged_by_the_settings_that_it_accepts():
    tried = [(0.01, 1.0, "finished", 61.0), (0.01, 10.0, "rejected", 0.0)]
    assert table_claims._bound_is_safe(search_results(plain=PLAIN, ewc=tried)).ours == "1 of 1"
    unstable = search_results(plain=PLAIN, ewc=[*tried, (0.01, 2.0, "unstable", 0.0)])
    assert table_claims._bound_is_safe(unstable).verdict == "does not hold"


def test_sensitivity_is_the_share_of_the_grid_close_to_the_best():
    tried = [(0.01, 1.0, "finished", 61.0), (0.01, 10.0, "rejected", 0.0), (0.01, 0.1, "finished", 50.0)]
    claim = table_claims._sensitivity(search_results(plain=PLAIN, ewc=tried, explicit_ewc=PLAIN))
    assert (claim.ours, claim.verdict) == ("1 of 3 against 1 of 1", "holds")
    assert table_claims._sensitivity(search_results(plain=PLAIN, ewc=tried)).verdict == "not decided"


def test_settings_one_step_apart_are_close():
    assert table_claims._is_close(Setting(0.001, 1e3), Setting(0.003, 1e2))
    assert not table_claims._is_close(Setting(0.001, 1e3), Setting(0.01, 1e3))
    assert not table_claims._is_close(Setting(0.001, 1e3), Setting(0.001, 10.0))
    assert table_claims._is_close_lr(Setting(0.001, None), Setting(0.003, None))
    assert not table_claims._is_close_lr(Setting(0.001, None), Setting(0.01, None))


def test_strengths_are_judged_without_methods_that_have_none():
    tried = search_results(ewc=[(0.001, 1.0, "finished", 60.0)], explicit_ewc=[(0.001, None, "finished", 60.0)])
    (choices,) = tried.values()
    # The paper has learning rate 0.001 for both here, and strength 1000 for ewc.
    lrs, strengths = table_claims._same_settings({PAPER.conditions()[0]: choices})
    assert (lrs.ours, lrs.verdict) == ("2 of 2, 2 of them exactly", "holds")
    assert (strengths.ours, strengths.verdict) == ("0 of 1, 0 of them exactly", "does not hold")


def test_five_points_of_accuracy_are_judged_without_rounding_errors():
    tried = [(0.01, 1.0, "finished", 300 / 9), (0.01, 0.1, "finished", 255 / 9)]
    assert 255 / 9 < 300 / 9 - 5  # they are 5 apart, but floats give a bit more
    assert table_claims._good_settings(search_results(plain=PLAIN, ewc=tried), ["ewc"]) == (2, 2)


def test_settings_with_the_same_accuracy_are_counted():
    tried = [(0.01, s, "finished", accuracy) for s, accuracy in ((0.1, 60.0), (1.0, 70.0), (10.0, 70.0))]
    (choice,) = search_results(ewc=[*tried, (0.001, 1.0, "unstable", 0.0)])[CONDITION]
    row = grid_search._row(CONDITION, choice)
    assert (row["lr"], row["strength"], row["as good"], row["tried"], row["dropped"]) == ("0.01", "1", 1, 4, 1)
    (none,) = search_results(ewc=[(0.01, 1.0, "unstable", 0.0)])[CONDITION]
    row = grid_search._row(CONDITION, none)
    assert row["lr"] is row["strength"] is row["as good"] is None


@pytest.mark.faults
def test_claims_read_the_runs_of_other_targets_and_train_only_added_seeds(context):
    needed = [TARGETS[name].run(context) for name in TARGETS["claims"].needs]
    trained = {run.spec.key for result in needed for run in result.results}
    seeds = context.scale.seeds
    without = PaperContext(context.study, replace(context.scale, max_seeds=seeds))
    before = len(context.study.results())
    assert {row["seeds"] for table in claims_table.run(without).tables for row in table.rows} <= {"", "2"}
    assert len(context.study.results()) == before
    result = claims_table.run(context)
    added = {run.spec for run in result.results if run.spec.key not in trained}
    assert added
    assert {spec.seed for spec in added} == set(range(seeds, context.scale.max_seeds))
    assert len(context.study.results()) == before + len(added)
    claims = [row for table in result.tables for row in table.rows]
    assert len({claim["claim"] for claim in claims}) == len(claims)
    assert {claim["verdict"] for claim in claims} <= {"holds", "does not hold", "not decided"}
    assert {claim["seeds"] for claim in claims} == {"", "2", "2 to 3", "3"}
    assert "each interval is at 97.5 %" in result.text[0]
    for claim in claims:
        undecided = claim["verdict"] == "not decided" and claim["seeds"]
        assert not undecided or claim["seeds"].endswith("3"), claim


def test_added_seeds_take_the_backbones_in_turn(fresh_context, monkeypatch):
    monkeypatch.setattr(fresh_context, "backbones", {"mlp": ["a", "b"]})
    specs = [fresh_context.spec(CONDITION, "plain", seed, Setting(0.01, None)) for seed in range(2)]
    results = {spec: Result(spec, "finished", "", [10.0], [[90.0]]) for spec in specs}
    monkeypatch.setattr(
        fresh_context,
        "run",
        lambda specs, **_: {s: results.get(s) or Result(s, "finished", "", [1.0], [[9.0]]) for s in specs},
    )
    extended = Evidence(fresh_context, LOOKS)
    (base,) = summarize_seeds(results.values())
    extended.add([(base, 3), (base, 4)])
    assert [run.spec.init for run in extended(base).results] == ["a", "b", "a", "b"]
    assert [run.spec.seed for run in extended.results] == [0, 1, 2, 3]
    assert extended(base).results[:2] == tuple(results.values())
