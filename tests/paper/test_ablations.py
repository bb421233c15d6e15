"""A change explains a cell if it brings our mean to the paper's beyond chance."""

from dataclasses import replace

import pytest

from mooring.lab.model.metrics import confidence_interval
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import initial_network
from mooring.lab.streams.options import open_stream
from mooring.lab.study.study import Study
from mooring.paper import ablations
from mooring.paper.ablations import BASE, CHANGES
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import MINIATURE, PAPER, ROWS
from mooring.paper.context.target_result import ResultTable, TargetResult, make_cell
from mooring.paper.page.difference_notes import add_table_notes
from mooring.paper.targets import TARGETS

CONDITION = PAPER.conditions()[0]  # cifar100, where the paper's ewc has 62.5 ± 0.6
OTHER_REGIME = PAPER.conditions()[3]
PRECISION = "products in tf32 instead of bf16"


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("ablations")
    stream = open_stream(MINIATURE.streams["digits"])
    *paths, other = [folder / f"{seed}.safetensors" for seed in (7, 8, 9)]
    for seed, path in zip((7, 8, 9), (*paths, other), strict=True):
        save_file(initial_network("mlp", stream, seed).backbone.state_dict(), path)
    return PaperContext(Study(folder / "p.sqlite"), MINIATURE.with_data(None), {"mlp": paths}, other_backbone=other)


@pytest.fixture(scope="module")
def result(context):
    return ablations.run(context)


def test_every_change_is_trained_once_with_every_seed(context, result):
    assert len({run.spec.key for run in result.results}) == len(context.study.results())
    assert len(context.study.results()) <= TARGETS["reasons"].count(context.scale)
    (table,) = result.tables
    rows = [(row["method"], row["changed"]) for row in table.rows]
    changes = [change for change in (BASE, *CHANGES) if change.name != PRECISION]  # a CPU has no bf16 products
    assert rows == [(method, change.name) for method in ROWS for change in changes if change.applies_to(method)]
    before = len(context.study.results())
    assert ablations.run(context).to_json() == result.to_json()
    assert len(context.study.results()) == before


def test_every_change_changes_one_field(context):
    for method in ROWS:
        runs = ablations._specs(context, context.scale.conditions()[0], method)
        for name, specs in runs.items():
            for spec, base in zip(specs, runs[BASE.name], strict=True):
                fields, base_fields = spec.to_json(), base.to_json()
                changed = {key for key in fields if fields[key] != base_fields[key]} - {"stream"}
                same_backbone = name == CHANGES[0].name and spec.seed % 2 == 0
                same = name in (BASE.name, CHANGES[-1].name) or same_backbone
                assert len(changed) == (0 if same else 1), (method, name)


def test_other_splits_have_the_same_images(context):
    """Another order moves classes between the searched tasks and the others; the full stream has all of them."""
    main, shuffled, full = (
        context.main_stream("digits"),
        context.main_stream("digits", shuffle=1),
        context.full_stream("digits"),
    )
    assert len({stream.fingerprint for stream in (main, shuffled, full)}) == 3
    assert len(shuffled.tasks) == len(main.tasks) == len(full.tasks) - context.scale.search_tasks
    assert sorted(label for task in full.tasks for label in task.classes) == list(range(10))


def test_backbone_is_not_changed_without_one(fresh_context):
    names = set(ablations._specs(fresh_context, fresh_context.scale.conditions()[0], "plain"))
    assert not names & {"a random start", "the first backbone for all seeds", "another backbone"}


def test_precision_is_changed_on_a_gpu_only(tmp_path):
    """The changed runs are those of a regime in tf32: a study that has them does not train them again."""
    scale = replace(MINIATURE.with_data(None), regimes=PAPER.regimes)
    tf32_scale = replace(scale, regimes=tuple(replace(regime, gpu_dtype="auto") for regime in PAPER.regimes))
    cpu, bf16, tf32 = (
        PaperContext(Study(tmp_path / "p.sqlite"), scale, device=device)
        for scale, device in ((scale, "cpu"), (scale, "cuda"), (tf32_scale, "cuda"))
    )
    for index in range(len(PAPER.regimes)):
        for method in ROWS:
            on_cpu, in_bf16, in_tf32 = (
                ablations._specs(context, context.scale.conditions()[index], method) for context in (cpu, bf16, tf32)
            )
            assert {spec.dtype for spec in in_bf16[BASE.name]} == {"bf16"}
            assert PRECISION not in on_cpu
            assert PRECISION not in in_tf32
            assert (PRECISION in in_bf16) == (method in ("plain", "ewc", "explicit-ewc"))
            if PRECISION in in_bf16:
                assert {spec.dtype for spec in in_bf16[PRECISION]} == {"tf32"}
                assert [spec.key for spec in in_bf16[PRECISION]] == [spec.key for spec in in_tf32[BASE.name]]


def test_text_says_that_the_paper_has_no_numbers(result):
    assert "The paper has no numbers for these data sets" in result.text[-1]
    assert not result.reasons


# Verdicts, on invented runs


def runs_with(accuracies, method="ewc"):
    """A run of two tasks for each accuracy, without forgetting; None is an unstable run."""
    specs = [RunSpec("cifar100", "0", method, seed, strength=1.0) for seed in range(len(accuracies))]
    return [
        Result(spec, "unstable", "", [], [])
        if accuracy is None
        else Result(spec, "finished", "", [10.0, 10.0], [[accuracy, 10.0], [accuracy, accuracy]])
        for spec, accuracy in zip(specs, accuracies, strict=True)
    ]


BEFORE = [58.0, 58.4, 57.6, 58.1, 57.9]
PAPERS = [62.5, 62.8, 62.2, 62.6, 62.4]


def effects(after, before=BEFORE):
    runs = {BASE.name: runs_with(before), "momentum 0": runs_with(after)}
    return ablations._effects((CONDITION, "ewc"), runs, "accuracy")


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (PAPERS, "explains it"),
        ([60.0, 60.3, 59.7, 60.1, 59.9], "moves towards"),
        ([67.0, 67.3, 66.7, 67.1, 66.9], "overshoots"),
        ([50.0, 50.3, 49.7, 50.1, 49.9], "moves away"),
        (BEFORE, "no significant effect"),
        ([72.0, 48.0, 75.0, 45.0, 70.0], "no significant effect"),  # agrees only because of its variance
        ([None] * 5, "does not finish"),
        ([62.5, None, None, None, None], "not decided"),
    ],
)
def test_change_explains_a_cell_if_it_brings_it_to_the_papers_beyond_chance(after, verdict):
    assert effects(after)[1].verdict == verdict


def test_finishing_is_reported_if_nothing_finished_before():
    assert effects(PAPERS, [None] * 5)[1].verdict == "finishes, and agrees"
    assert effects([50.0, 50.3, 49.7, 50.1, 49.9], [None] * 5)[1].verdict == "finishes"


def test_cell_that_agrees_needs_no_reason():
    agreeing = effects([62.9, 63.2, 62.6, 63.0, 62.8], PAPERS)
    assert agreeing[1].verdict == "still agrees"
    assert not ablations._differs(agreeing)
    assert ablations._differs(effects(BEFORE))


def test_last_change_leaves_the_last_task_out_of_forgetting():
    run = Result(RunSpec("cifar100", "0", "ewc", 0), "finished", "", [10.0, 10.0], [[80.0, 10.0], [70.0, 80.0]])
    assert CHANGES[-1].score(run, "forgetting") == 2 * run.metrics["forgetting"]
    assert CHANGES[-1].score(run, "accuracy") == run.metrics["accuracy"]


def test_reason_names_what_explains_or_what_comes_closest():
    assert ablations._reason(effects(PAPERS)).startswith("explained by momentum 0 (+4.5")
    assert ablations._reason(effects([60.0, 60.3, 59.7, 60.1, 59.9])) == (
        "not explained by any of 1 single change; of those with a significant effect, momentum 0 comes closest, with "
        "-2.50 left"
    )
    assert ablations._reason(effects(BEFORE)).endswith("none moves it significantly towards the paper's")


def test_significance_is_corrected_for_the_number_of_changes():
    after = [59.5, 65.0, 60.5, 66.0, 61.5]  # higher by 4.5: significant at 95 %, but not at 99.5 %
    tested = {BASE.name: runs_with(BEFORE), "momentum 0": runs_with(after)}
    alone = ablations._effects((CONDITION, "ewc"), tested, "accuracy")
    others = {change.name: runs_with(BEFORE) for change in CHANGES if change.applies_to("ewc") and change.trains}
    among = ablations._effects((CONDITION, "ewc"), {**others, **tested}, "accuracy")
    assert alone[1].verdict == "explains it"
    assert next(effect for effect in among if effect.change == "momentum 0").verdict == "may explain it"
    assert ablations._reason(among).startswith("perhaps explained by momentum 0")


# Notes below the tables


def table(condition, values, at_paper_setting, method="ewc"):
    cell = make_cell(condition, method, "accuracy", confidence_interval(values), at_paper_setting=at_paper_setting)
    return ResultTable("t", ["method"], [{"method": method}], [cell])


def notes(tables, reasons=None):
    tested = [] if reasons is None else [TargetResult("reasons", reasons=reasons)]
    return [noted.notes for noted in add_table_notes([TargetResult("table1", tables=tables), *tested])[0].tables]


REASONS = {(CONDITION, "ewc", "accuracy"): "explained by momentum 0"}


def test_note_gives_the_reason_of_every_cell_that_differs():
    ours, papers = notes([table(CONDITION, BEFORE, False), table(CONDITION, BEFORE, True)], REASONS)
    assert papers == ours == ["ewc: accuracy differs by -4.50: explained by momentum 0."]
    lower = [value - 1 for value in BEFORE]
    ours, papers = notes([table(CONDITION, lower, False), table(CONDITION, BEFORE, True)], REASONS)
    assert ours == ["ewc: accuracy differs by -5.50: at the paper's setting by -4.50, explained by momentum 0."]


def test_note_says_if_a_reason_is_for_the_opposite_direction():
    higher = [value + 10 for value in BEFORE]
    ours, _ = notes([table(CONDITION, higher, False), table(CONDITION, BEFORE, True)], REASONS)
    opposite = "in the opposite direction at the paper's setting, by -4.50 (explained by momentum 0)"
    assert ours == [f"ewc: accuracy differs by +5.50: {opposite}."]


def test_note_names_the_setting_if_it_explains_the_cell():
    ours, papers = notes([table(CONDITION, BEFORE, False), table(CONDITION, PAPERS, True)], {})
    assert ours[0].endswith("explained by the setting: it agrees at the paper's setting.")
    assert not papers


def test_setting_without_a_significant_effect_explains_nothing():
    """The cell agrees at the paper's setting only because of its variance."""
    tables = [table(CONDITION, BEFORE, False), table(CONDITION, [72.0, 40.0, 75.0, 36.0, 64.0], True)]
    ours, papers = notes(tables, {})
    assert ours[0].endswith("within chance, but the setting has no significant effect.")
    assert not papers


def test_note_says_what_was_not_tested():
    untested = notes([table(CONDITION, BEFORE, True)])
    assert untested == [["1 cell differs from the paper; `mooring paper reasons` tests why."]]
    assert "no change was tested under this condition" in notes([table(OTHER_REGIME, BEFORE, True)], {})[0][0]
    assert "no seed finished at the paper's setting" in notes([table(CONDITION, BEFORE, False)], {})[0][0]
