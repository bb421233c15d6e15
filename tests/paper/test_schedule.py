"""Targets trained together give the same results as one after the other, in fewer batches."""

import pytest

from mooring_lab.study.study import Study
from mooring_paper.context.paper_context import MissingRuns, PaperContext
from mooring_paper.context.scale import MINIATURE
from mooring_paper.context.target_result import TargetResult
from mooring_paper.published.published_numbers import Setting
from mooring_paper.targets import Target, run_targets, select_targets


@pytest.fixture
def batches(fresh_context, monkeypatch):
    """The runs that were requested together, in order."""
    batches = []
    run = fresh_context.study.run

    def record(specs, *args, **kwargs):
        batches.append([(spec.method, spec.seed, spec.lr) for spec in specs])
        return run(specs, *args, **kwargs)

    monkeypatch.setattr(fresh_context.study, "run", record)
    return batches


def spec(context, method, seed, lr=0.01):
    return context.spec(MINIATURE.conditions()[0], method, seed, Setting(lr, None), search=True)


def target(name, run):
    return Target(name, "", run)


def search_target(context):
    """Two runs decide the learning rate of the third."""
    tried = context.run([spec(context, "plain", 0, lr) for lr in (0.01, 0.02)], decides=True)
    best = max(tried.values(), key=lambda result: result.metrics["accuracy"]).spec
    runs = context.run([spec(context, "plain", 1, best.lr)])
    return TargetResult("search", ["done"], [], list(runs.values()))


def simple_target(context):
    runs = context.run([spec(context, "plain", seed) for seed in (0, 2)])
    return TargetResult("simple", ["done"], [], list(runs.values()))


def test_deciding_runs_are_trained_first_and_the_others_in_one_batch(fresh_context, batches):
    results = run_targets([target("search", search_target), target("simple", simple_target)], fresh_context)
    assert [result.name for result in results] == ["search", "simple"]
    assert batches[0] == [("plain", 0, 0.01), ("plain", 0, 0.02)]
    assert len(batches) == 2
    assert {(method, seed) for method, seed, _ in batches[1]} == {("plain", 1), ("plain", 2)}
    assert len(fresh_context.study.results()) == 4, "the run that both requested was trained once"


def test_results_equal_those_of_each_target_alone(fresh_context, batches, tmp_path):
    targets = select_targets(["fig-importance", "roots"])
    together = run_targets(targets, fresh_context)
    alone = PaperContext(Study(tmp_path / "alone.sqlite"), MINIATURE.with_data(None))
    assert len(batches) == 1
    for result, expected in zip(together, [target.run(alone) for target in targets], strict=True):
        assert (result.name, result.text) == (expected.name, expected.text)
        assert [table.rows for table in result.tables] == [table.rows for table in expected.tables]


def test_context_trains_immediately_after_the_schedule(fresh_context):
    run_targets([target("simple", simple_target)], fresh_context)
    assert simple_target(fresh_context).name == "simple"
    assert spec(fresh_context, "plain", 5) in fresh_context.run([spec(fresh_context, "plain", 5)])


def test_errors_of_a_target_are_raised(fresh_context):
    def broken(context):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        run_targets([target("simple", simple_target), target("broken", broken)], fresh_context)
    assert not fresh_context.defers_training


def test_deferred_context_raises_the_missing_runs(fresh_context):
    fresh_context.defers_training = True
    with pytest.raises(MissingRuns, match="1 run has no result yet"):
        fresh_context.run([spec(fresh_context, "plain", 0)])
