"""The figures' claims are decided by counting runs; each test makes runs of which the count is known."""

from dataclasses import replace

import pytest

from mooring.lab.results import Result, Stability
from mooring.lab.spec import RunSpec
from mooring.lab.study import Study
from mooring.paper import claims_of_figures as claims
from mooring.paper.laboratory import Laboratory
from mooring.paper.scale import MINIATURE


def result(method: str, seed: int = 0, *, lost: bool = False, violations: int = 0, below: int = 0, strength=1.0):
    verdict = Stability(1, 0.5, 1.0, 0, 100 - violations - below, violations, below, below)
    spec = RunSpec("digits", "0", method, seed, strength=strength)
    status = "unstable" if lost else "finished"
    return Result(spec, status, "", [10.0], [] if lost else [[90.0]], stability=[verdict])


def test_scores_below_0_count_only_where_positive_ones_are_stable():
    stable = [result("si-absolute"), result("si-signed", lost=True, below=3), result("si-negative", below=1)]
    assert claims._negative_scores(stable).ours == "1 of 2"
    assert claims._negative_scores(stable).verdict == "holds"
    too_strong = [result("si-absolute", lost=True, strength=9.0), result("si-signed", lost=True, below=3, strength=9.0)]
    assert claims._negative_scores(too_strong).verdict == "not decided"
    harmless = [result("si-absolute"), *(result("si-signed", seed, below=1) for seed in range(3))]
    assert claims._negative_scores(harmless).verdict == "does not hold"


def test_instability_before_any_violation_refutes_the_paper():
    after = [result("ewc", lost=True, violations=5), result("clamped-ewc", violations=5)]
    assert [claim.verdict for claim in claims._violations(after)] == ["holds"] * 3
    before = [*after, result("ewc", 1, lost=True)]
    assert claims._violations(before)[0].verdict == "does not hold"
    assert [claim.verdict for claim in claims._violations([result("ewc")])] == ["not decided"] * 3


def test_violations_that_do_no_harm_and_clamps_that_do_not_help_are_counted():
    runs = [result("ewc", seed, violations=2) for seed in range(3)] + [result("ewc", 3, lost=True, violations=9)]
    few = claims._violations([*runs, replace(result("clamped-ewc", 3, lost=True), status="unstable")])
    assert (few[1].ours, few[1].verdict) == ("1 of 4", "does not hold")
    assert (few[2].ours, few[2].verdict) == ("0 of 1", "does not hold")


def test_pairs_are_averaged_seed_by_seed():
    found = claims._by_seed([([1.0, 2.0], [0.0, 0.0]), ([3.0, float("nan")], [0.0, 0.0])])
    assert (found.mean, found.count) == (pytest.approx(2.0), 2)
    assert claims._by_seed([([float("nan")], [1.0])]) is None


def test_in_miniature_all_of_them_are_decided_or_said_to_be_open(tmp_path):
    lab = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None))
    found = claims.claims(lab)
    assert len(found) == 7
    assert len({claim.statement for claim in found}) == 7
    assert {claim.verdict for claim in found} <= {"holds", "does not hold", "not decided"}
