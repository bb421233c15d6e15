"""The paper's protocol: the best setting of the first tasks is trained on the others; rejected ones cost one task."""

import itertools
from dataclasses import replace

import pytest

from mooring.errors import MooringError
from mooring_lab.cli.terminal_tables import print_choices
from mooring_lab.engines import runner
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams.options import StreamOptions, open_stream
from mooring_lab.streams.slices import hold_out, select_tasks
from mooring_lab.streams.stream import Stream
from mooring_lab.study.defaults import LRS, STRENGTHS
from mooring_lab.study.protocol import Tuned, choose_settings, tune
from mooring_lab.study.study import Study

OPTIONS = StreamOptions("digits", tasks=4, limit=30)
STREAM = open_stream(OPTIONS)
SETTINGS = {"network": "mlp", "batch": 10, "epochs": 1, "momentum": 0.0, "dtype": "float64"}
LR, STRENGTH = [0.003, 0.1, 0.03], [0.1, 100.0, 1e9]
STEPS = 3
"""In a task."""


class Counted(Fleet):
    """A fleet that writes down how many steps each run took, and in which task."""

    taken: dict[tuple[str, str], list[int]]

    def _step(self, task, *args):
        for spec in self.specs:
            Counted.taken.setdefault((spec.data, spec.key), []).append(task)
        super()._step(task, *args)


@pytest.fixture(autouse=True)
def _counted(monkeypatch):
    Counted.taken = {}
    monkeypatch.setattr(runner, "Fleet", Counted)


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path / "study.sqlite")


def tuned(study: Study, **overrides) -> Tuned:
    arguments = {"stream": STREAM, "methods": "plain,ewc", "seeds": 2, "lrs": LR, "strengths": STRENGTH, "tasks": 2}
    return tune(study, **{**SETTINGS, **arguments, **overrides})


@pytest.mark.faults
def test_best_is_that_of_all_combinations_by_average_accuracy_on_the_first_tasks(study, tmp_path):
    choices = {choice.method: choice for choice in tuned(study).choices}
    first = select_tasks(STREAM, 0, 2)
    brute = Study(tmp_path / "brute.sqlite")
    for method, strengths in (("plain", [None]), ("ewc", STRENGTH)):
        scores = {}
        for lr, strength in itertools.product(LR, strengths):
            given = {} if strength is None else {"strength": strength}
            (row,) = brute.compare(stream=first, methods=method, seeds=1, lr=lr, **given, **SETTINGS)
            steady = row.results[0].status == "finished" and not any(
                verdict.warning for verdict in row.results[0].stability[:1]
            )
            scores[lr, strength] = sum(row.results[0].matrix[-1]) / 2 if steady else None
        best = choices[method].best
        assert len(choices[method].grid) == len(scores)
        assert best.metrics["accuracy"].mean == pytest.approx(max(s for s in scores.values() if s is not None))
        chosen = scores[best.setting.lr, best.setting.strength]
        assert chosen == pytest.approx(best.metrics["accuracy"].mean)
        dropped = {(row.setting.lr, row.setting.strength) for row in choices[method].dropped}
        assert dropped == {point for point, score in scores.items() if score is None}
    assert len({row.metrics["accuracy"].mean for row in choices["plain"].grid}) > 1, "there was nothing to choose"
    assert choices["ewc"].dropped, "nothing was dropped"


def test_other_tasks_are_trained_at_the_chosen_setting_with_every_seed(study):
    outcome = tuned(study)
    chosen = {choice.method: choice.best.setting for choice in outcome.choices}
    assert [row.setting.method for row in outcome.rows] == ["plain", "ewc"]
    for row in outcome.rows:
        best = chosen[row.setting.method]
        assert (row.setting.lr, row.setting.strength) == (best.lr, best.strength)
        assert [result.spec.seed for result in row.results] == [0, 1]
        assert len(row.results[0].matrix) == 2


def test_what_is_searched_and_what_is_trained_have_no_task_in_common(study):
    outcome = tuned(study)
    first, others = select_tasks(STREAM, 0, 2), select_tasks(STREAM, 2)
    assert {task.classes for task in first.tasks} & {task.classes for task in others.tasks} == set()
    assert {row.setting.data for choice in outcome.choices for row in choice.grid} == {first.fingerprint}
    assert {row.setting.data for row in outcome.rows} == {others.fingerprint}
    assert len(first.tasks) + len(others.tasks) == len(STREAM.tasks)
    assert {data for data, _ in Counted.taken} == {first.fingerprint, others.fingerprint}


def pixel_counts(stream: Stream, split: str) -> set[tuple[int, ...]]:
    """Return the sorted pixels of every image, which a permutation does not change."""
    return {tuple(sorted(image)) for image in getattr(stream, split).images.flatten(1).tolist()}


def test_search_on_permutations_sees_no_image_that_is_scored_later(study):
    stream = open_stream(StreamOptions("digits-permuted", tasks=3, limit=60))
    outcome = tuned(study, stream=stream, methods="plain", seeds=1, lrs=[0.1, 0.03])
    searched = hold_out(select_tasks(stream, 0, 2))
    assert {row.setting.data for row in outcome.choices[0].grid} == {searched.fingerprint}
    assert outcome.choices[0].stream == f"{stream.name}: first 2, searched on held-out training images"
    scored = pixel_counts(select_tasks(stream, 2), "test")
    assert scored.isdisjoint(pixel_counts(searched, "train") | pixel_counts(searched, "test"))
    assert pixel_counts(searched, "train").isdisjoint(pixel_counts(searched, "test"))
    assert len(searched.test) == pytest.approx(0.2 * 2 * 60, abs=4)


def test_settings_that_do_not_interpolate_are_rejected_with_the_reason_at_the_cost_of_one_task(study):
    outcome = tuned(study, methods="ewc,clamped-ewc,proximal-ewc", lrs=[0.03], seeds=1)
    choices = {choice.method: choice for choice in outcome.choices}
    dropped = choices["ewc"].dropped
    assert [row.setting.strength for row in dropped] == [1e9]
    (result,) = dropped[0].results
    assert result.status == "rejected"
    assert result.reason.startswith("after 1 task lr * strength * importance leaves (0, 1) in ")
    (verdict,) = result.stability
    assert verdict.largest >= 1
    assert verdict.extrapolate + verdict.diverge > 0
    assert verdict.safe_strength * verdict.largest / 1e9 == pytest.approx(1)
    assert result.steps == STEPS
    first = select_tasks(STREAM, 0, 2)
    taken = [Counted.taken[first.fingerprint, row.results[0].spec.key] for row in choices["ewc"].grid]
    assert sorted(step for steps in taken for step in steps).count(0) == STEPS  # one of them took the first for all
    for row, steps in zip(choices["ewc"].grid, taken, strict=True):
        assert steps.count(1) == (0 if row.setting.strength == 1e9 else STEPS)
        if row.setting.strength != 1e9:
            assert all(0 < verdict.largest < 1 for verdict in row.results[0].stability)
    for method in ("clamped-ewc", "proximal-ewc"):  # which interpolate at any strength
        assert choices[method].dropped == ()
        assert len(choices[method].grid) == 3


def test_method_without_strength_has_only_learning_rates_to_try(study):
    outcome = tuned(study, methods="plain,explicit-mas,joint", seeds=1)
    for choice in outcome.choices:
        assert [(row.setting.lr, row.setting.strength) for row in choice.grid] == [(lr, None) for lr in LR]


def test_grids_are_the_papers_where_none_are_given(study):
    outcome = tune(study, stream=STREAM, methods="uniform", seeds=1, tasks=1, **SETTINGS)
    grid = {(row.setting.lr, row.setting.strength) for row in outcome.choices[0].grid}
    assert grid == set(itertools.product(LRS, STRENGTHS))


def test_method_whose_every_setting_is_rejected_is_reported_of_and_not_trained(study):
    outcome = tuned(study, strengths=[1e9, 1e10], lrs=[0.03], seeds=1)
    assert [choice.best is None for choice in outcome.choices] == [False, True]
    assert len(outcome.choices[1].dropped) == len(outcome.choices[1].grid) == 2
    assert [row.setting.method for row in outcome.rows] == ["plain"]
    contents = outcome.choices[1].to_json()
    assert contents["best"] is None
    assert [entry["status"] for entry in contents["dropped"]] == ["rejected", "rejected"]


def test_settings_that_are_as_good_as_the_first_are_reported(study, capsys):
    """What is too weak to do anything is as good as what is weaker still."""
    outcome = tuned(study, methods="ewc", strengths=[1e-12, 1e-11], lrs=[0.03], seeds=1)
    (choice,) = outcome.choices
    assert (choice.best.setting.strength, len(choice.as_good)) == (1e-12, 1)
    assert choice.to_json()["as_good"] == [{"lr": 0.03, "strength": 1e-11}]
    print_choices(outcome.choices)
    assert "as good" in capsys.readouterr().out
    print_choices([replace(choice, grid=(choice.best,))])
    assert "as good" not in capsys.readouterr().out


def test_last_bits_of_a_sum_do_not_decide_between_equal_settings():
    """Both settings have 47 correct answers of 90, but the mean of their percentages differs in the last bit."""
    correct = {0.1: [15, 15, 17], 0.01: [15, 16, 16]}  # of 30
    results = [
        Result(RunSpec("digits", "0", "plain", seed, lr=lr), "finished", "", [10.0], [[100 * count / 30]])
        for lr, counts in correct.items()
        for seed, count in enumerate(counts)
    ]
    (choice,) = choose_settings("digits", results, ["plain"])
    first, second = (row.metrics["accuracy"].mean for row in choice.grid)
    assert first < second
    assert choice.best.setting.lr == 0.1
    assert [row.setting.lr for row in choice.as_good] == [0.01]


def test_where_every_setting_of_every_method_is_rejected_there_are_no_rows(study):
    outcome = tuned(study, methods="ewc", strengths=[1e9], lrs=[0.03], seeds=1)
    assert outcome.choices[0].best is None
    assert outcome.rows == ()


def test_baseline_whose_every_setting_is_rejected_does_not_lose_the_others(study):
    outcome = tuned(study, baseline="ewc", strengths=[1e9], lrs=[0.03], seeds=1)
    assert [(row.setting.method, row.difference) for row in outcome.rows] == [("plain", None)]


def test_searching_with_several_seeds_takes_their_mean(study):
    outcome = tuned(study, methods="plain", search_seeds=[3, 4])
    for row in outcome.choices[0].grid:
        assert [result.spec.seed for result in row.results] == [3, 4]
        scores = [result.metrics["accuracy"] for result in row.results]
        assert row.metrics["accuracy"].mean == pytest.approx(sum(scores) / 2)
    best = max(outcome.choices[0].grid, key=lambda row: row.metrics["accuracy"].mean)
    assert outcome.choices[0].best == best


def test_asking_again_trains_nothing_and_returns_the_same(study):
    first = tuned(study)
    Counted.taken = {}
    again = tuned(Study(study.store.path))
    assert Counted.taken == {}
    assert [choice.to_json() for choice in again.choices] == [choice.to_json() for choice in first.choices]
    assert again.rows == first.rows


def test_every_stream_is_searched_for_itself(study):
    outcome = tuned(
        study, stream=[STREAM, StreamOptions("digits-permuted", tasks=3, limit=20)], methods="plain", seeds=1
    )
    assert len({choice.stream for choice in outcome.choices}) == 2
    assert len({row.setting.data for row in outcome.rows}) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks": 4}, "has 4 tasks: search fewer than that, not 4"),
        ({"tasks": 9}, "search fewer"),
        ({"tasks": 0}, "tasks=0"),
        ({"tasks": -1}, "tasks=-1"),
        ({"tasks": "2"}, "tasks='2'"),
        ({"tasks": 1.5}, "tasks=1.5"),
        ({"lrs": []}, "nothing to run"),
        ({"lrs": [-0.1]}, "lr=-0.1"),
        ({"lrs": 0.1}, "lrs"),
        ({"lrs": "0.1"}, "lr"),
        ({"strengths": []}, "nothing to run"),
        ({"strengths": [-1.0]}, "strength=-1.0"),
        ({"strengths": 3.0}, "strengths"),
        ({"search_seeds": 0}, "nothing to run"),
        ({"search_seeds": 1.5}, "seeds"),
        ({"baseline": "er"}, "the baseline 'er' is not among the methods"),
        ({"methods": "plian"}, "did you mean 'plain'?"),
    ],
    ids=str,
)
def test_what_cannot_be_searched_is_refused_in_one_line_before_any_training(tmp_path, wrong, said):
    with pytest.raises(MooringError) as caught:
        tuned(Study(tmp_path / "study.sqlite"), **{"methods": "ewc", **wrong})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Counted.taken == {}
    assert list(tmp_path.iterdir()) == []
