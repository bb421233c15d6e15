"""Claims are decided by runs: what is above 0 beyond chance holds, what is below does not, the rest is open."""

import pytest

from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import Row, summarize
from mooring.lab.study.protocol import choices_of
from mooring.lab.study.study import Study
from mooring.paper.claims import claims_table as claims
from mooring.paper.claims import search_claims as claims_of_search
from mooring.paper.claims import table_claims as claims_of_tables
from mooring.paper.claims.claim import decided, gain
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import EXPLICIT, MINIATURE, PAPER, REGULARIZERS, REPLAY, ROWS
from mooring.paper.published.published_numbers import Setting
from mooring.paper.tables import grid_search as grids
from mooring.paper.targets import TARGETS

CASE = MINIATURE.cases()[0]


def row(method: str, accuracies: list[float], forgotten: float = 0.0, lost: tuple[int, ...] = ()) -> Row:
    """A row of two tasks with this accuracy for each seed."""
    results = []
    for seed, accuracy in enumerate(accuracies):
        spec = RunSpec("digits", "0", method, seed, strength=1.0 if method in REGULARIZERS else None)
        matrix = [[accuracy + forgotten, 10.0], [accuracy - forgotten, accuracy + forgotten]]
        status = "unstable" if seed in lost else "finished"
        results.append(Result(spec, status, "", [10.0, 10.0], matrix))
    return summarize(results)[0]


def test_a_gain_is_the_mean_over_pairs_taken_seed_by_seed():
    pairs = [(row("explicit-ewc", [62.0, 63.0]), row("ewc", [60.0, 60.0]))]
    pairs.append((row("explicit-si", [61.0, 64.0]), row("si", [60.0, 61.0])))
    found = gain(pairs, "accuracy")
    assert (found.mean, found.count) == (pytest.approx(2.25), 2)


def test_seeds_that_did_not_finish_everywhere_are_left_out():
    pairs = [(row("explicit-ewc", [62.0, 63.0, 99.0]), row("ewc", [60.0, 60.0, 0.0], lost=(2,)))]
    assert gain(pairs, "accuracy").count == 2
    assert gain([(row("explicit-ewc", [62.0]), row("ewc", [60.0], lost=(0,)))], "accuracy") is None
    assert gain([], "accuracy") is None


def test_what_is_beyond_chance_is_decided():
    above = gain([(row("explicit-ewc", [65.0, 65.1, 64.9]), row("ewc", [60.0] * 3))], "accuracy")
    below = gain([(row("explicit-ewc", [55.0, 55.1, 54.9]), row("ewc", [60.0] * 3))], "accuracy")
    mixed = gain([(row("explicit-ewc", [65.0, 55.0, 61.0]), row("ewc", [60.0] * 3))], "accuracy")
    assert [decided(found) for found in (above, below, mixed, None)] == [
        "holds",
        "does not hold",
        "not decided",
        "not decided",
    ]


BETTER = [row(name, [65.0, 65.2, 64.8], forgotten=0.1) for name in EXPLICIT]
WORSE = [row(name, [60.0, 60.1, 59.9], forgotten=3.0) for name in REGULARIZERS]


def against(rows):
    return claims_of_tables._pairs({CASE: rows}, EXPLICIT, REGULARIZERS)


def test_explicit_against_its_own_penalty_and_replay_against_both():
    replay = [row(name, [68.0, 68.1, 67.9], forgotten=1.0) for name in REPLAY]
    assert [claim.verdict for claim in claims_of_tables._better(against([*BETTER, *WORSE]), "here")] == ["holds"] * 2
    both = claims_of_tables._against_replay({CASE: [*BETTER, *replay]})
    assert [claim.verdict for claim in both] == ["holds", "holds"]
    swapped = [row(name, [55.0, 55.1, 54.9], forgotten=9.0) for name in EXPLICIT] + WORSE
    assert {claim.verdict for claim in claims_of_tables._better(against(swapped), "here")} == {"does not hold"}
    lone = claims_of_tables._against_replay({CASE: swapped})
    assert {claim.verdict for claim in lone} == {"not decided"}  # no replay to compare with


def test_one_pair_the_other_way_round_is_not_consistent():
    assert [claim.verdict for claim in claims_of_tables._everywhere(against([*BETTER, *WORSE]))] == ["holds"] * 2
    one = [*BETTER[1:], row(EXPLICIT[0], [50.0, 50.1, 49.9], forgotten=9.0), *WORSE]
    found = claims_of_tables._everywhere(against(one))
    assert [claim.verdict for claim in found] == ["does not hold"] * 2
    assert found[0].ours == "surely in 3 of 4, surely not in 1"


def test_the_papers_side_is_the_mean_of_its_tables():
    pairs = claims_of_tables._pairs({PAPER.cases()[0]: [*BETTER, *WORSE]}, EXPLICIT, REGULARIZERS)
    accuracy = claims_of_tables._better(pairs, "here")[0]
    assert accuracy.papers == "+1.00 by its tables"  # 63.8 - 62.5, 64.0 - 63.9, 63.9 - 61.2, 63.8 - 63.9
    assert claims_of_tables._everywhere(pairs)[0].papers == "in 3 of 4 by its tables"


def test_gains_are_compared_between_data_sets_seed_by_seed():
    cifar, flowers = PAPER.cases()[:2]
    rows = {cifar: [*BETTER, *WORSE], flowers: [*(row(n, [80.0, 80.2, 79.8]) for n in EXPLICIT), *WORSE]}
    competitive, more = claims_of_tables._long_streams(claims_of_tables._pairs(rows, EXPLICIT, REGULARIZERS))
    assert (competitive.verdict, more.verdict) == ("does not hold", "holds")
    assert more.ours.startswith("+15.00")
    assert not claims_of_tables._long_streams(against([*BETTER, *WORSE]))  # no cifar100


def test_the_largest_gain_is_named():
    found = claims_of_tables._largest(against([*BETTER, *WORSE]), MINIATURE)
    assert (found.verdict, found.ours) == ("does not hold", "+5.00 [+4.75, +5.25], explicit-ewc on digits")
    assert claims_of_tables._largest([], MINIATURE).verdict == "not decided"


def test_pairs_without_a_seed_that_finished_are_told():
    broken = [row(name, [60.0] * 3, lost=(0, 1, 2) if name == "si" else ()) for name in REGULARIZERS]
    found = claims_of_tables._largest(against([*BETTER, *broken]), MINIATURE)
    assert found.ours.endswith("; 1 of 4 pairs have no seed that finished in both")
    told = claims_of_tables._told(against([*BETTER, *broken]), "accuracy")
    assert "over the 3 pairs in which every run finished" in told
    assert told.endswith("; of all 4 the first did not in 0, the second in 1")


def test_penalties_without_importance_against_those_with():
    simple = [row(name, [64.0, 64.1, 63.9], forgotten=0.2) for name in ("uniform", "random")]
    rows = {CASE: [row("plain", [50.0, 50.1, 49.9], forgotten=9.0), *WORSE, *simple]}
    assert [claim.verdict for claim in claims_of_tables._simple(rows)] == ["holds"] * 3
    assert claims_of_tables._plain_against_ewc(rows, "resnet").verdict == "does not hold"
    assert claims_of_tables._plain_against_ewc({}, "resnet").verdict == "not decided"


# The grid search


def choices(**grids: list[tuple[float, float | None, str, float]]) -> dict:
    """A case in which methods were tried at (lr, strength) with this outcome."""
    told = []
    for name, tried in grids.items():
        results = []
        for lr, strength, status, accuracy in tried:
            spec = RunSpec("digits", "0", name.replace("_", "-"), 0, lr=lr, strength=strength)
            results.append(Result(spec, status, "", [10.0], [[accuracy]] if status == "finished" else []))
        told += choices_of("digits", results, [name.replace("_", "-")])
    return {CASE: told}


PLAIN = [(0.1, None, "unstable", 0.0), (0.01, None, "finished", 60.0)]


def test_what_breaks_where_plain_breaks_is_not_held_against_a_method():
    found = choices(plain=PLAIN, explicit_ewc=PLAIN)
    assert claims_of_search._stable(found).verdict == "holds"
    lost = choices(plain=PLAIN, explicit_ewc=[(0.01, None, "unstable", 0.0)])
    assert claims_of_search._stable(lost).verdict == "does not hold"


def test_the_bound_is_judged_by_what_it_lets_through():
    tried = [(0.01, 1.0, "finished", 61.0), (0.01, 10.0, "rejected", 0.0)]
    assert claims_of_search._bound(choices(plain=PLAIN, ewc=tried)).ours == "1 of 1"
    through = choices(plain=PLAIN, ewc=[*tried, (0.01, 2.0, "unstable", 0.0)])
    assert claims_of_search._bound(through).verdict == "does not hold"


def test_sensitivity_is_the_share_of_the_grid_near_the_best():
    tried = [(0.01, 1.0, "finished", 61.0), (0.01, 10.0, "rejected", 0.0), (0.01, 0.1, "finished", 50.0)]
    found = claims_of_search._sensitive(choices(plain=PLAIN, ewc=tried, explicit_ewc=PLAIN))
    assert (found.ours, found.verdict) == ("1 of 3 against 1 of 1", "holds")
    assert claims_of_search._sensitive(choices(plain=PLAIN, ewc=tried)).verdict == "not decided"


def test_hyper_parameters_a_step_away_are_near():
    assert claims_of_search._near(Setting(0.001, 1e3), Setting(0.003, 1e2))
    assert not claims_of_search._near(Setting(0.001, 1e3), Setting(0.01, 1e3))
    assert not claims_of_search._near(Setting(0.001, 1e3), Setting(0.001, 10.0))
    assert claims_of_search._near_rate(Setting(0.001, None), Setting(0.003, None))
    assert not claims_of_search._near_rate(Setting(0.001, None), Setting(0.01, None))


def test_strengths_are_judged_without_those_that_have_none():
    case = PAPER.cases()[0]  # where the paper has 0.001 for both, and a strength of 1000 for ewc
    (found,) = choices(ewc=[(0.001, 1.0, "finished", 60.0)], explicit_ewc=[(0.001, None, "finished", 60.0)]).values()
    rates, strengths = claims_of_search._the_papers({case: found})
    assert (rates.ours, rates.verdict) == ("2 of 2, 2 of them exactly", "holds")
    assert (strengths.ours, strengths.verdict) == ("0 of 1, 0 of them exactly", "does not hold")


def test_within_five_points_is_judged_without_rounding():
    tried = [(0.01, 1.0, "finished", 300 / 9), (0.01, 0.1, "finished", 255 / 9)]
    assert 255 / 9 < 300 / 9 - 5  # they are 5 apart, and floats say a bit more
    assert claims_of_search._good(choices(plain=PLAIN, ewc=tried), ["ewc"]) == (2, 2)


def test_what_was_as_good_as_what_was_chosen_is_named():
    tried = [(0.01, s, "finished", accuracy) for s, accuracy in ((0.1, 60.0), (1.0, 70.0), (10.0, 70.0))]
    (choice,) = choices(ewc=[*tried, (0.001, 1.0, "unstable", 0.0)])[CASE]
    assert choice.best.setting.strength == 1.0
    assert [row.setting.strength for row in choice.as_good] == [10.0]
    assert grids._tie(choice) == "ewc: lr 0.01 with strength 1, not lr 0.01 with strength 10"
    (none,) = choices(ewc=[(0.01, 1.0, "unstable", 0.0)])[CASE]
    assert none.as_good == ()


def test_the_claims_read_the_runs_of_other_targets_and_train_nothing_more(tmp_path):
    lab = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None))
    trained = {result.spec.key for name in TARGETS["claims"].needs for result in TARGETS[name].run(lab).results}
    before = len(lab.study.results())
    finding = claims.run(lab)
    assert len(lab.study.results()) == before
    assert {result.spec.key for result in finding.results} <= trained
    assert {result.spec.method for result in finding.results} == set(ROWS)
    rows = [shown for table in finding.tables for shown in table.rows]
    assert len({shown["claim"] for shown in rows}) == len(rows)
    assert {shown["verdict"] for shown in rows} <= {"holds", "does not hold", "not decided"}
    assert finding.text[0].startswith(f"Of {len(rows)} claims ")
