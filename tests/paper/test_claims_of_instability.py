"""The figures' claims are decided by counting runs; each test makes runs of which the count is known."""

from dataclasses import replace

from mooring.lab.model.results import Result, Stability
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.study import Study
from mooring.paper.claims import instability_claims as claims
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import MINIATURE


def result(method: str, seed: int = 0, *, lost: bool = False, violations: int = 0, below: int = 0, strength=1.0):
    verdict = after(violations, below)
    spec = RunSpec("digits", "0", method, seed, strength=strength)
    status = "unstable" if lost else "finished"
    return Result(spec, status, "", [10.0], [] if lost else [[90.0]], stability=[verdict])


def after(violations: int = 0, below: int = 0) -> Stability:
    return Stability(1, 0.5, 1.0, 0, 100 - violations - below, violations, below, below)


def test_scores_below_0_count_only_where_positive_ones_are_stable():
    stable = [result("si-absolute"), result("si-signed", lost=True, below=3), result("si-negative", below=1)]
    assert claims._negative_scores(stable).ours == "1 of 2"
    assert claims._negative_scores(stable).verdict == "holds"
    too_strong = [result("si-absolute", lost=True, strength=9.0), result("si-signed", lost=True, below=3, strength=9.0)]
    assert claims._negative_scores(too_strong).verdict == "not decided"
    harmless = [result("si-absolute"), *(result("si-signed", seed, below=1) for seed in range(3))]
    assert claims._negative_scores(harmless).verdict == "does not hold"


def test_scores_below_0_are_judged_where_a_penalty_does_something():
    """However many weak strengths a grid has; and on every data set."""
    weak = [result("si-absolute", strength=s) for s in (1e-5, 1e-4)]
    weak += [result("si-flipped", below=1, strength=s) for s in (1e-5, 1e-4)]
    strong = [result("si-absolute", strength=10.0), result("si-flipped", lost=True, below=1, strength=10.0)]
    found = claims._negative_scores([*weak, *strong])
    assert (found.ours, found.verdict) == ("1 of 1", "holds")
    elsewhere = [replace(run, spec=replace(run.spec, data="1")) for run in weak]
    found = claims._negative_scores([*weak, *strong, *elsewhere])
    assert (found.ours, found.verdict) == ("1 of 1; 0 of 1", "does not hold")


def test_instability_before_any_violation_refutes_the_paper():
    found = [result("ewc", lost=True, violations=5), result("clamped-ewc", violations=5)]
    assert [claim.verdict for claim in claims._violations(found)] == ["holds"] * 3
    before = [*found, result("ewc", 1, lost=True)]
    assert claims._violations(before)[0].verdict == "does not hold"
    later = [*found, replace(before[-1], stability=[after(), after(violations=2)])]
    told = claims._violations(later)[0]
    assert (told.ours, told.verdict) == ("2 of 2, 1 of them after the first task already", "holds")
    assert [claim.verdict for claim in claims._violations([result("ewc")])] == ["not decided"] * 3


def test_violations_that_do_no_harm_and_clamps_that_do_not_help_are_counted():
    runs = [result("ewc", seed, violations=2) for seed in range(3)] + [result("ewc", 3, lost=True, violations=9)]
    few = claims._violations([*runs, replace(result("clamped-ewc", 3, lost=True), status="unstable")])
    assert (few[1].ours, few[1].verdict) == ("1 of 4", "does not hold")
    assert (few[2].ours, few[2].verdict) == ("0 of 1", "does not hold")


def test_positive_scores_that_break_are_told_with_what_violates():
    runs = [result("si-absolute"), result("si-absolute", 1, lost=True, violations=2)]
    found = claims._positive_scores(runs)
    assert found.ours.startswith("1 of 2; 1 of the others violate")
    assert found.verdict == "does not hold"


def test_the_weakest_strength_is_compared_with_plain():
    runs = [result("plain", seed, strength=None) for seed in (0, 1)]
    runs += [result("si-flipped", seed, strength=strength, below=1) for seed in (0, 1) for strength in (0.1, 10.0)]
    assert claims._weak_penalty(runs).verdict == "holds"
    assert claims._weak_penalty([]).verdict == "not decided"


def test_iterations_are_counted_from_the_start_of_the_task_that_broke(tmp_path):
    lab = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None))
    stream = lab.trained("digits")
    batches = -(-len(stream.tasks[0].train) // 10)
    run = result("ewc", lost=True)
    run = replace(run, spec=replace(run.spec, data=stream.fingerprint, batch=10, epochs=1), steps=batches + 3)
    found = claims._soon([run, run], {stream.fingerprint: stream})
    assert found.ours == "1 of 1, the last in iteration 4"


def test_clamped_runs_are_compared_with_the_weakest():
    def pair(strength, accuracy, lost=False):
        runs = [result("ewc", s, lost=lost, violations=1, strength=strength) for s in (0, 1)]
        clamped = [result("clamped-ewc", s, strength=strength) for s in (0, 1)]
        return [*runs, *(replace(run, matrix=[[accuracy + run.spec.seed]]) for run in clamped)]

    accurate, learned = claims._clamped([*pair(1.0, 80.0), *pair(10.0, 90.0, lost=True), *pair(100.0, 70.0)])
    assert (accurate.ours, accurate.verdict) == ("+10.00 [+10.00, +10.00]", "holds")
    assert learned.ours == "+10.00 [+10.00, +10.00]"
    assert [claim.verdict for claim in claims._clamped([])] == ["not decided"] * 2
