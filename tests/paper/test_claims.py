"""The claims about tables and the grid search: verdicts on invented runs, and on the runs of other targets."""

import pytest

from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import summarize
from mooring.lab.study.protocol import choose_settings
from mooring.paper.claims import claims_table, table_claims
from mooring.paper.claims.claim import mean_gain, range_verdict
from mooring.paper.context.scale import EXPLICIT, MINIATURE, PAPER, REGULARIZERS, REPLAY, ROWS
from mooring.paper.published.published_numbers import Setting
from mooring.paper.tables import grid_search
from mooring.paper.targets import TARGETS

CONDITION = MINIATURE.conditions()[0]


def row(method, accuracies, forgotten=0.0, unstable=()):
    """A row of two tasks with this accuracy for each seed."""
    results = []
    for seed, accuracy in enumerate(accuracies):
        spec = RunSpec("digits", "0", method, seed, strength=1.0 if method in REGULARIZERS else None)
        matrix = [[accuracy + forgotten, 10.0], [accuracy - forgotten, accuracy + forgotten]]
        status = "unstable" if seed in unstable else "finished"
        results.append(Result(spec, status, "", [10.0, 10.0], matrix))
    return summarize(results)[0]


def test_gain_is_the_mean_over_pairs_by_seed():
    pairs = [(row("explicit-ewc", [62.0, 63.0]), row("ewc", [60.0, 60.0]))]
    pairs.append((row("explicit-si", [61.0, 64.0]), row("si", [60.0, 61.0])))
    gain = mean_gain(pairs, "accuracy")
    assert (gain.mean, gain.count) == (pytest.approx(2.25), 2)


def test_gain_leaves_out_seeds_that_did_not_finish_everywhere():
    pairs = [(row("explicit-ewc", [62.0, 63.0, 99.0]), row("ewc", [60.0, 60.0, 0.0], unstable=(2,)))]
    assert mean_gain(pairs, "accuracy").count == 2
    assert mean_gain([(row("explicit-ewc", [62.0]), row("ewc", [60.0], unstable=(0,)))], "accuracy") is None
    assert mean_gain([], "accuracy") is None


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ([65.0, 65.1, 64.9], "holds"),
        ([55.0, 55.1, 54.9], "does not hold"),
        ([65.0, 55.0, 61.0], "not decided"),
    ],
)
def test_gains_beyond_chance_are_decided(accuracies, verdict):
    gain = mean_gain([(row("explicit-ewc", accuracies), row("ewc", [60.0] * 3))], "accuracy")
    assert range_verdict(gain) == verdict
    assert range_verdict(None) == "not decided"


BETTER = [row(name, [65.0, 65.2, 64.8], forgotten=0.1) for name in EXPLICIT]
WORSE = [row(name, [60.0, 60.1, 59.9], forgotten=3.0) for name in REGULARIZERS]


def explicit_pairs(rows, condition=CONDITION):
    return table_claims._pairs({condition: rows}, EXPLICIT, REGULARIZERS)


def verdicts(claims):
    return [claim.verdict for claim in claims]


def test_explicit_step_is_compared_with_its_penalty_and_with_replay():
    replay = [row(name, [68.0, 68.1, 67.9], forgotten=1.0) for name in REPLAY]
    better = explicit_pairs([*BETTER, *WORSE])
    assert verdicts(table_claims._explicit_against_penalty(better, "here")) == ["holds"] * 2
    assert verdicts(table_claims._against_replay({CONDITION: [*BETTER, *replay]})) == ["holds"] * 2
    inferior = [row(name, [55.0, 55.1, 54.9], forgotten=9.0) for name in EXPLICIT] + WORSE
    assert verdicts(table_claims._explicit_against_penalty(explicit_pairs(inferior), "here")) == ["does not hold"] * 2
    assert verdicts(table_claims._against_replay({CONDITION: inferior})) == ["not decided"] * 2  # no replay


def test_one_opposite_pair_refutes_consistency():
    assert verdicts(table_claims._every_pair_gains(explicit_pairs([*BETTER, *WORSE]))) == ["holds"] * 2
    opposite = [*BETTER[1:], row(EXPLICIT[0], [50.0, 50.1, 49.9], forgotten=9.0), *WORSE]
    claims = table_claims._every_pair_gains(explicit_pairs(opposite))
    assert verdicts(claims) == ["does not hold"] * 2
    assert claims[0].ours == "significantly better in 3 of 4, significantly worse in 1"


def test_papers_number_is_the_mean_of_its_tables():
    pairs = explicit_pairs([*BETTER, *WORSE], PAPER.conditions()[0])
    accuracy = table_claims._explicit_against_penalty(pairs, "here")[0]
    assert accuracy.papers == "+1.00 by its tables"  # 63.8 - 62.5, 64.0 - 63.9, 63.9 - 61.2, 63.8 - 63.9
    assert table_claims._every_pair_gains(pairs)[0].papers == "in 3 of 4 by its tables"


def test_gains_are_compared_between_data_sets_by_seed():
    cifar, flowers = PAPER.conditions()[:2]
    rows = {cifar: [*BETTER, *WORSE], flowers: [*(row(n, [80.0, 80.2, 79.8]) for n in EXPLICIT), *WORSE]}
    competitive, more = table_claims._long_streams(table_claims._pairs(rows, EXPLICIT, REGULARIZERS))
    assert (competitive.verdict, more.verdict) == ("does not hold", "holds")
    assert more.ours.startswith("+15.00")
    assert not table_claims._long_streams(explicit_pairs([*BETTER, *WORSE]))  # no cifar100


def test_largest_gain_is_named():
    claim = table_claims._largest_gain(explicit_pairs([*BETTER, *WORSE]), MINIATURE)
    assert (claim.verdict, claim.ours) == ("does not hold", "+5.00 [+4.75, +5.25], explicit-ewc on digits")
    assert table_claims._largest_gain([], MINIATURE).verdict == "not decided"


def test_pairs_without_a_common_finished_seed_are_reported():
    broken = [row(name, [60.0] * 3, unstable=(0, 1, 2) if name == "si" else ()) for name in REGULARIZERS]
    pairs = explicit_pairs([*BETTER, *broken])
    largest = table_claims._largest_gain(pairs, MINIATURE)
    assert largest.ours.endswith("; 1 of 4 pairs have no seed that finished in both")
    text = table_claims._describe_gain(pairs, "accuracy")
    assert "over the 3 pairs in which every run finished" in text
    assert text.endswith("; of all 4 pairs, the first method did not finish in 0, the second in 1")


def test_simple_penalties_are_compared_with_the_popular_ones():
    simple = [row(name, [64.0, 64.1, 63.9], forgotten=0.2) for name in ("uniform", "random")]
    rows = {CONDITION: [row("plain", [50.0, 50.1, 49.9], forgotten=9.0), *WORSE, *simple]}
    assert verdicts(table_claims._simple(rows)) == ["holds"] * 3
    assert table_claims._plain_against_ewc(rows, "resnet").verdict == "does not hold"
    assert table_claims._plain_against_ewc({}, "resnet").verdict == "not decided"


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


def test_settings_with_the_same_accuracy_are_named():
    tried = [(0.01, s, "finished", accuracy) for s, accuracy in ((0.1, 60.0), (1.0, 70.0), (10.0, 70.0))]
    (choice,) = search_results(ewc=[*tried, (0.001, 1.0, "unstable", 0.0)])[CONDITION]
    assert choice.best.setting.strength == 1.0
    assert [row.setting.strength for row in choice.as_good] == [10.0]
    assert grid_search._tie(choice) == "ewc: lr 0.01 with strength 1, not lr 0.01 with strength 10"
    (none,) = search_results(ewc=[(0.01, 1.0, "unstable", 0.0)])[CONDITION]
    assert none.as_good == ()


def test_claims_read_the_runs_of_other_targets_and_train_nothing(context):
    needed = [TARGETS[name].run(context) for name in TARGETS["claims"].needs]
    trained = {run.spec.key for result in needed for run in result.results}
    before = len(context.study.results())
    result = claims_table.run(context)
    assert len(context.study.results()) == before
    assert {run.spec.key for run in result.results} <= trained
    assert {run.spec.method for run in result.results} == set(ROWS)
    claims = [row for table in result.tables for row in table.rows]
    assert len({claim["claim"] for claim in claims}) == len(claims)
    assert {claim["verdict"] for claim in claims} <= {"holds", "does not hold", "not decided"}
    assert result.text[0].startswith(f"Of {len(claims)} claims, ")
