"""Claims are decided by runs: what is above 0 beyond chance holds, what is below does not, the rest is open."""

import pytest

from mooring.lab.results import Result
from mooring.lab.spec import RunSpec
from mooring.lab.study import Study
from mooring.lab.summary import Row, summarize
from mooring.paper import claims
from mooring.paper.claim import decided, gain
from mooring.paper.laboratory import Laboratory
from mooring.paper.scale import EXPLICIT, MINIATURE, REGULARIZERS, REPLAY, ROWS
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


def test_explicit_against_its_own_penalty_and_replay_against_both():
    better = [row(name, [65.0, 65.2, 64.8], forgotten=0.1) for name in EXPLICIT]
    worse = [row(name, [60.0, 60.1, 59.9], forgotten=3.0) for name in REGULARIZERS]
    replay = [row(name, [68.0, 68.1, 67.9], forgotten=1.0) for name in REPLAY]
    rows = {CASE: [*better, *worse, *replay]}
    assert [claim.verdict for claim in claims._explicit_beats_penalty(rows, "here")] == ["holds", "holds"]
    assert [claim.verdict for claim in claims._against_replay(rows)] == ["holds", "holds"]
    swapped = {CASE: [row(name, [55.0, 55.1, 54.9], forgotten=9.0) for name in EXPLICIT] + worse}
    assert {claim.verdict for claim in claims._explicit_beats_penalty(swapped, "here")} == {"does not hold"}
    assert {claim.verdict for claim in claims._against_replay(swapped)} == {"not decided"}  # no replay to compare with


def test_the_claims_read_the_runs_of_other_targets_and_train_nothing_more(tmp_path):
    lab = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None))
    trained = {result.spec.key for name in TARGETS["claims"].needs for result in TARGETS[name].run(lab).results}
    before = len(lab.study.results())
    finding = claims.run(lab)
    assert len(lab.study.results()) == before
    assert {result.spec.key for result in finding.results} <= trained
    assert {result.spec.method for result in finding.results} == set(ROWS)
    rows = finding.tables[0].rows
    assert {shown["verdict"] for shown in rows} <= {"holds", "does not hold", "not decided"}
    assert finding.text[0].startswith(f"Of {len(rows)} claims ")
