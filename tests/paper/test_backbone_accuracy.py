"""Forgetting against the backbone's accuracy: runs, sentences, the paper's cells and the figure."""

import math

import pytest

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams.options import open_stream
from mooring_paper.backbone_plan import plan_backbones
from mooring_paper.context.paper_context import PaperContext, paper_setting
from mooring_paper.context.scale import EXPLICIT, MINIATURE, PAPER, REGULARIZERS
from mooring_paper.figures import backbone_accuracy
from mooring_paper.published.published_numbers import published
from mooring_paper.targets import run_targets, select_targets

TARGET = select_targets(["fig-backbone"])
LEVELS = {"weak": 60.0, "middle": 70.0, "strong": 90.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("backbones")


@pytest.fixture(scope="module")
def leveled_context(context, folder):
    plan = plan_backbones(TARGET, context.scale, "paper")
    plan.pretrain(open_stream(context.scale.pretraining), context, folder)
    return context


@pytest.fixture(scope="module")
def result(leveled_context):
    [result] = run_targets(TARGET, leveled_context)
    return result


def made_up_runs(condition, forgetting, accuracy=60.0, seeds=2):
    """Return runs by method and backbone, from functions of method, backbone's accuracy and seed."""

    def made_up(method, level, seed):
        lost = forgetting(method, level, seed)
        spec = RunSpec(condition.data, "0", method, seed, init=str(level))
        status = "unstable" if math.isnan(lost) else "finished"
        matrix = [[accuracy + 2 * lost, 0.0], [accuracy, accuracy]]
        return Result(spec, status, "", [10.0, 10.0], [] if status == "unstable" else matrix)

    return {
        method: {init: [made_up(method, level, seed) for seed in range(seeds)] for init, level in LEVELS.items()}
        for method in backbone_accuracy.METHODS
    }


def test_every_method_is_trained_from_every_backbone(leveled_context, result):
    assert len(result.results) == 40
    assert {run.spec.init for run in result.results} == set(leveled_context.levels)
    assert {run.spec.method for run in result.results} == {"plain", *REGULARIZERS, "uniform", *EXPLICIT}


def test_tables_list_backbones_from_the_least_to_the_most_accurate(leveled_context, result):
    assert [table.title for table in result.tables] == [
        "digits: forgetting by backbone",
        "digits: accuracy by backbone",
    ]
    for table in result.tables:
        names = ["mlp-paper-1-epoch-0.safetensors", "mlp-paper-60-epochs-0.safetensors"]
        assert [row["backbone"] for row in table.rows] == names
        assert [row["its accuracy"] for row in table.rows] == sorted(leveled_context.levels.values())
    plain = [run.metrics["forgetting"] for run in result.results if run.spec.method == "plain"]
    assert result.tables[0].rows[0]["plain"].startswith(f"{sum(plain[:2]) / 2:.2f} ±")


def test_backbone_of_the_recipe_is_the_first_one_of_the_main_network(folder, leveled_context):
    files = sorted(path.name for path in folder.iterdir())
    plan = plan_backbones(select_targets(["roots", "fig-backbone"]), MINIATURE, "paper")
    context = PaperContext(leveled_context.study, MINIATURE)
    plan.pretrain(open_stream(MINIATURE.pretraining), context, folder)
    assert context.backbones["mlp"][0] in context.levels
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, "mlp-paper-60-epochs-1.safetensors"])


def test_without_backbones_the_target_says_why_it_was_not_run(fresh_context):
    [result] = run_targets(TARGET, fresh_context)
    assert not result.results
    assert not result.draw()
    [sentence] = result.text
    assert sentence.startswith("Not run: ")
    assert all(option in sentence for option in ("cifar10", "--recipe"))


def test_figure_is_drawn(result, render):
    image = render(result)
    assert image.name == "fig-backbone-accuracy"
    assert image.png.startswith(b"\x89PNG")


def test_slope_is_that_of_a_line_through_the_finished_runs():
    accuracies = [60.0, 70.0, 90.0]
    values = [[2.0 + 0.5 * a, 1.0 - 0.1 * a, math.nan] for a in accuracies]
    values[1][1] = math.nan
    assert backbone_accuracy.slopes(accuracies, values) == pytest.approx([0.5, -0.1, math.nan], nan_ok=True)


def test_sentence_gives_the_change_of_each_family_and_the_slope_of_plain():
    condition = PAPER.first_conditions()[0]

    def forgetting(method, level, seed):
        slope = {"plain": 1.0, "ewc": math.nan}.get(method, 0.2 if method in backbone_accuracy.PENALTIES else 0.0)
        return (slope + 0.1 * seed) * (level - 60)

    sentence = backbone_accuracy._change(condition.data, LEVELS, made_up_runs(condition, forgetting))
    assert "from the backbone with 60.0 % to that with 90.0 %" in sentence
    assert "+31.50 [" in sentence  # (30 + 33) / 2
    assert "+7.50 [" in sentence  # (6 + 9) / 2, without ewc
    assert "+1.50 [" in sentence  # (0 + 3) / 2
    assert "that of plain changes by +10.50 [" in sentence
    unfinished = made_up_runs(condition, lambda method, level, seed: math.nan)
    assert "not known with plain" in backbone_accuracy._change(condition.data, LEVELS, unfinished)


def test_closest_backbone_is_the_nearest_in_accuracy_and_forgetting():
    condition = PAPER.first_conditions()[0]
    cell = published(condition.network, condition.regime.name, condition.data, "plain")
    shift = {60.0: 5.0, 70.0: 0.25, 90.0: -3.0}
    runs = made_up_runs(condition, lambda method, level, seed: cell.forgetting + shift[level], cell.accuracy)
    [sentence] = backbone_accuracy._closest(condition, LEVELS, runs)
    assert "plain 70.0 % (0.2 points)" in sentence or "plain 70.0 % (0.3 points)" in sentence
    assert backbone_accuracy._closest(MINIATURE.first_conditions()[0], LEVELS, runs) == []


def test_plain_takes_the_learning_rate_of_the_explicit_step():
    for condition in PAPER.conditions():
        assert paper_setting(PAPER, condition, "plain").lr == paper_setting(PAPER, condition, "explicit-ewc").lr


def test_lines_join_backbones_of_one_schedule():
    condition = PAPER.first_conditions()[0]
    trained = {condition: made_up_runs(condition, lambda method, level, seed: 1.0)}
    schedules = {"weak": "steps", "middle": "cosine", "strong": "steps"}
    [drawing] = backbone_accuracy._draw(trained, LEVELS, schedules)
    lines = [line for line in drawing.figure.axes[0].lines if line.get_label() == "plain"]
    assert [list(line.get_xdata()) for line in lines] == [[60.0, 90.0], [70.0]]
    assert "circles for steps, squares for cosine" in drawing.caption
