"""The claims about instability are decided by counting runs; the counts of these invented runs are known."""

from dataclasses import replace

from mooring_lab.model.results import Result, Stability
from mooring_lab.model.spec import RunSpec
from mooring_paper.claims import instability_claims as claims
from mooring_paper.claims.method_pairs import Evidence
from mooring_paper.claims.sequential_verdict import LookSchedule
from mooring_paper.context.scale import MINIATURE, PAPER
from mooring_paper.context.seed_statistics import summarize_seeds
from mooring_paper.figures.negative_importance import VARIANTS, SignSweep
from mooring_paper.figures.violations import ViolationSweep

CONDITION = MINIATURE.conditions()[0]
CONDITIONS = {"0": CONDITION, "1": replace(CONDITION, data="others")}
EVIDENCE = Evidence(None, LookSchedule((2,)))
"""No seeds were added."""


def signs(runs):
    """The sweeps of `fig-negative`, one for each data set."""
    sweeps = []
    for data in dict.fromkeys(run.spec.data for run in runs):
        rows = summarize_seeds(run for run in runs if run.spec.data == data)
        by_variant = {name: [row for row in rows if row.setting.method == name] for name in VARIANTS}
        plain = next((row for row in rows if row.setting.method == "plain"), None)
        sweeps.append(SignSweep(CONDITIONS[data], plain, by_variant))
    return sweeps


def sweeps(runs):
    """The sweep of EWC over the strengths."""
    rows = sorted(summarize_seeds(runs), key=lambda row: row.setting.strength)
    groups = [[row for row in rows if row.setting.method == name] for name in ("ewc", "clamped-ewc")]
    return [ViolationSweep(CONDITION, "ewc", *groups)] if runs else []


def stability(violations=0, negative=0):
    return Stability(1, 0.5, 1.0, 0, 100 - violations - negative, violations, negative, negative)


def run(method, seed=0, *, unstable=False, violations=0, negative=0, strength=1.0):
    spec = RunSpec("digits", "0", method, seed, strength=strength)
    matrix = [] if unstable else [[90.0]]
    status = "unstable" if unstable else "finished"
    return Result(spec, status, "", [10.0], matrix, stability=[stability(violations, negative)])


def test_negative_scores_count_only_where_positive_scores_are_stable():
    stable = [run("si-absolute"), run("si-signed", unstable=True, negative=3), run("si-negative", negative=1)]
    assert claims._negative_scores(signs(stable), "").ours == "1 of 2 on digits"
    assert claims._negative_scores(signs(stable), "").verdict == "holds"
    too_strong = [
        run("si-absolute", unstable=True, strength=9.0),
        run("si-signed", unstable=True, negative=3, strength=9.0),
    ]
    assert claims._negative_scores(signs(too_strong), "").verdict == "not decided"
    harmless = [run("si-absolute"), *(run("si-signed", seed, negative=1) for seed in range(3))]
    assert claims._negative_scores(signs(harmless), "").verdict == "does not hold"


def test_negative_scores_are_judged_at_the_largest_stable_strength_of_every_data_set():
    weak = [run("si-absolute", strength=s) for s in (1e-5, 1e-4)]
    weak += [run("si-flipped", negative=1, strength=s) for s in (1e-5, 1e-4)]
    strong = [run("si-absolute", strength=10.0), run("si-flipped", unstable=True, negative=1, strength=10.0)]
    claim = claims._negative_scores(signs([*weak, *strong]), "")
    assert (claim.ours, claim.verdict) == ("1 of 1 on digits", "holds")
    other_data = [replace(result, spec=replace(result.spec, data="1")) for result in weak]
    claim = claims._negative_scores(signs([*weak, *strong, *other_data]), "")
    assert (claim.ours, claim.verdict) == ("1 of 1 on digits; 0 of 1 on others", "does not hold")


def test_instability_without_a_violation_after_the_first_task_refutes_the_claim():
    violated = [run("ewc", unstable=True, violations=5), run("clamped-ewc", violations=5)]
    assert [claim.verdict for claim in claims._violations([*CONDITIONS.values()], violated)] == ["holds"] * 3
    without = [*violated, run("ewc", 1, unstable=True)]
    assert claims._violations([*CONDITIONS.values()], without)[0].verdict == "does not hold"
    later = [*violated, replace(without[-1], stability=[stability(), stability(violations=2)])]
    claim = claims._violations([*CONDITIONS.values()], later)[0]
    elsewhere = "2 had one after some task before the one in which they became unstable"
    assert (claim.ours, claim.verdict) == (f"1 of 2; {elsewhere}", "does not hold")
    assert [claim.verdict for claim in claims._violations([*CONDITIONS.values()], [run("ewc")])] == ["not decided"] * 3


def test_stable_violations_and_unstable_clamped_runs_are_counted():
    runs = [run("ewc", seed, violations=2) for seed in range(3)] + [run("ewc", 3, unstable=True, violations=9)]
    _, few, clamping = claims._violations([*CONDITIONS.values()], [*runs, run("clamped-ewc", 3, unstable=True)])
    assert (few.ours, few.verdict) == ("1 of 4", "does not hold")
    assert (clamping.ours, clamping.verdict) == ("0 of 1", "does not hold")


def test_unstable_positive_scores_are_reported_with_their_violations():
    runs = [run("si-absolute"), run("si-absolute", 1, unstable=True, violations=2)]
    claim = claims._positive_scores(signs(runs), "")
    assert claim.ours.startswith("1 of 2; 1 of the others violate")
    assert claim.verdict == "does not hold"


def test_smallest_strength_is_compared_with_plain():
    runs = [run("plain", seed, strength=None) for seed in (0, 1)]
    runs += [run("si-flipped", seed, strength=strength, negative=1) for seed in (0, 1) for strength in (0.1, 10.0)]
    assert claims._weak_penalty(signs(runs), EVIDENCE).verdict == "holds"
    assert claims._weak_penalty([], EVIDENCE).verdict == "not decided"


def test_iterations_are_counted_from_the_start_of_the_unstable_task(fresh_context):
    stream = fresh_context.main_stream("digits")
    batches = -(-len(stream.tasks[0].train) // 10)
    result = run("ewc", unstable=True)
    spec = replace(result.spec, data=stream.fingerprint, batch=10, epochs=1)
    result = replace(result, spec=spec, steps=batches + 3)
    claim = claims._early_instability([result, result], [stream], "")
    assert claim.ours == "1 of 1, the latest in iteration 4"


def test_clamped_runs_are_compared_with_the_weakest():
    def pair(strength, accuracy, unstable=False):
        runs = [run("ewc", seed, unstable=unstable, violations=1, strength=strength) for seed in (0, 1)]
        clamped = [run("clamped-ewc", seed, strength=strength) for seed in (0, 1)]
        return [*runs, *(replace(result, matrix=[[accuracy + result.spec.seed]]) for result in clamped)]

    runs = [*pair(1.0, 80.0), *pair(10.0, 90.0, unstable=True), *pair(100.0, 70.0)]
    accurate, learned = claims._clamping(sweeps(runs), EVIDENCE)
    assert (accurate.ours, accurate.verdict) == ("+10.00 [+10.00, +10.00] over 1 of 1 pair", "holds")
    assert learned.ours == "+10.00 [+10.00, +10.00] over 1 of 1 pair"
    assert [claim.verdict for claim in claims._clamping([], EVIDENCE)] == ["not decided"] * 2


def test_added_seeds_are_those_of_clamped_runs():
    base = [run("ewc", seed, unstable=True, violations=1, strength=10.0) for seed in (0, 1)]
    base += [run("ewc", seed, strength=1.0) for seed in (0, 1)]
    clamped = [
        replace(
            run("clamped-ewc", 0), spec=replace(run("clamped-ewc", seed).spec, strength=s), matrix=[[90.0 + seed * s]]
        )
        for s in (1.0, 10.0)
        for seed in (0, 1)
    ]
    accurate, _ = claims._clamping(sweeps([*base, *clamped]), Evidence(None, LookSchedule((2, 4))))
    assert accurate.verdict == "not decided"
    assert {(row.setting.method, row.setting.strength, seeds) for row, seeds in accurate.wanted} == {
        ("clamped-ewc", 10.0, 4),
        ("clamped-ewc", 1.0, 4),
    }


def test_papers_violations_are_those_of_our_data_sets():
    violated = [run("ewc", unstable=True, violations=5)]
    cifar, _, caltech = PAPER.first_conditions()
    assert claims._violations([cifar], violated)[1].papers == "all, from 5 to 31 violating parameters on"
    assert claims._violations([caltech], violated)[1].papers == "all, from 1 to 6 violating parameters on"
    assert claims._violations([*CONDITIONS.values()], violated)[1].papers == "all"


def test_data_set_without_negative_scores_keeps_the_claim_from_holding():
    runs = [run("si-absolute"), run("si-signed", unstable=True, negative=3)]
    other = [replace(result, spec=replace(result.spec, data="1")) for result in (run("si-absolute"), run("si-signed"))]
    assert claims._negative_scores(signs(runs), "").verdict == "holds"
    claim = claims._negative_scores(signs([*runs, *other]), "")
    assert (claim.ours, claim.verdict) == ("1 of 1 on digits; 0 of 0 on others", "not decided")
