"""A change explains a cell if it brings our mean to the paper's beyond chance."""

import math
import re
from dataclasses import replace

import pytest

from mooring_lab.model.metrics import confidence_interval
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import initial_network
from mooring_lab.streams.options import open_stream
from mooring_lab.study.study import Study
from mooring_paper import ablations
from mooring_paper.ablations import change_specs, closer_changes, differs, explain, measure_effects
from mooring_paper.changes import BASE, CHANGES, applicable_changes
from mooring_paper.context import target_result
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import MINIATURE, PAPER, REPLAY, ROWS
from mooring_paper.context.target_result import CELL_METRICS, ResultTable, TargetResult, make_cell
from mooring_paper.page.verdict import difference_lines
from mooring_paper.published.published_numbers import PublishedCell
from mooring_paper.tables.accuracy_tables import OUR_SETTINGS, PAPER_SETTINGS
from mooring_paper.targets import run_targets, select_targets

CONDITION = PAPER.conditions()[0]  # cifar100, where the paper's ewc has 62.5 ± 0.6
OTHER_REGIME = PAPER.conditions()[3]
PRECISION = "products in tf32 instead of bf16"


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("ablations")
    stream = open_stream(MINIATURE.streams["digits"])
    paths = [folder / f"{seed}.safetensors" for seed in (7, 8)]
    for seed, path in zip((7, 8), paths, strict=True):
        save_file(initial_network("mlp", stream, seed).backbone.state_dict(), path)
    return PaperContext(Study(folder / "p.sqlite"), MINIATURE.with_data(None), {"mlp": paths})


# Which runs are trained


DIFFERING = ("plain", "si", "explicit-ewc", "a-gem", "er")
UNSTABLE = ("ewc",)
"""No seed of these finishes in the miniature."""


@pytest.fixture(scope="module")
def unchanged(context):
    """The result without any number of the paper: the unchanged runs."""
    return ablations.run(context)


@pytest.fixture(scope="module")
def result(context, unchanged):
    """The result if the paper had our numbers, but for the accuracy of some methods, which is impossibly high."""
    cells = {}
    for condition, table in zip(context.scale.conditions(), unchanged.tables, strict=True):
        for row in table.rows:
            cell = PublishedCell(50.0, 5.0, accuracy_std=1.0, forgetting_std=1.0)
            if row["method"] not in UNSTABLE:
                accuracy, forgetting = (float(row[metric].split()[0]) for metric in ("accuracy", "forgetting"))
                gap = 1000 if row["method"] in DIFFERING else 0
                cell = replace(cell, accuracy=accuracy + gap, forgetting=forgetting)
            cells[condition.network, condition.regime.name, condition.data, row["method"]] = cell
    with pytest.MonkeyPatch.context() as patch:
        for module in (ablations, target_result):
            patch.setattr(module, "published", lambda *key: cells.get(key))
        (result,) = run_targets(select_targets(["reasons"]), context)
    return result


def test_nothing_is_changed_without_numbers_of_the_paper(context, unchanged):
    assert {run.spec.method for run in unchanged.results} == set(ROWS)
    assert len(unchanged.results) == len(ROWS) * context.scale.seeds * len(context.scale.conditions())
    assert not unchanged.reasons


def is_explained_in(table, method):
    """Whether a change that shares its fleet lets the method finish and agree, in both metrics."""
    apart = {change.name for change in CHANGES if change.apart}
    rows = [row for row in table.rows if row["method"] == method and row["changed"] not in apart]
    columns = [f"{metric}: what it does" for metric in CELL_METRICS]
    return any(all(row.get(column) == "finishes, and agrees" for column in columns) for row in rows)


TOWARDS = {"explains it", "may explain it", "moves towards", "overshoots", "finishes, and agrees", "finishes"}


def closer_in(table, method):
    """The changes that significantly reduce a difference of the method from the paper's."""
    before, *changed = [row for row in table.rows if row["method"] == method]
    names = set()
    for metric in CELL_METRICS:
        difference, verdict = f"{metric} from the paper's", f"{metric}: what it does"
        limit = math.inf if before[difference] is None else abs(before[difference])
        names |= {row["changed"] for row in changed if row.get(verdict) in TOWARDS and abs(row[difference]) < limit}
    return names


def test_changes_in_fleets_of_their_own_are_left_out_if_another_explains_the_cell(result):
    first, _ = result.tables
    assert is_explained_in(first, "ewc")
    assert not any(is_explained_in(first, method) for method in DIFFERING)  # so that both cases are tested below


def test_only_methods_that_differ_are_trained_again(context, result):
    first, other = result.tables
    assert any(closer_in(first, method) for method in DIFFERING)
    for condition, table in zip(context.scale.conditions(), (first, other), strict=True):
        rows = [(row["method"], row["changed"]) for row in table.rows]
        expected = []
        for method in ROWS:
            again = method in (*DIFFERING, *UNSTABLE)
            changes = applicable_changes(context.scale, condition, method) if again else []
            if table is other:
                closer = closer_in(first, method)
                changes = [c for c in changes if c.name in closer or c.always or not c.trains]
            elif method in UNSTABLE:
                changes = [change for change in changes if not change.apart]
            # A CPU has no bf16 products.
            expected += [(method, change.name) for change in (BASE, *changes) if change.name != PRECISION]
        assert rows == expected


def test_both_regimes_have_reasons(context, result):
    conditions = context.scale.conditions()
    differing = {(condition, method, "accuracy") for condition in conditions for method in DIFFERING}
    unstable = {
        (condition, method, metric)
        for condition in conditions
        for method in UNSTABLE
        for metric in ("accuracy", "forgetting")
    }
    assert set(result.reasons) == differing | unstable
    assert all(result.reasons[key][0].startswith("not explained by any change that was tested") for key in differing)
    assert all(result.reasons[key] == ["not explained by any change that was tested"] for key in unstable)


def test_result_has_every_run_once(context, result):
    assert len({run.spec.key for run in result.results}) == len(result.results) == len(context.study.results())


def test_results_are_the_same_if_nothing_is_left_to_train(context, unchanged):
    before = len(context.study.results())
    assert ablations.run(context).to_json() == unchanged.to_json()
    assert len(context.study.results()) == before


def test_other_regimes_have_fewer_seeds_and_fewer_changes(context):
    scale = replace(context.scale, seeds=5)
    many = PaperContext(context.study, scale)
    first, other = scale.conditions()
    for method in ROWS:
        everything, selected = (change_specs(many, condition, method) for condition in (first, other))
        free = {change.name for change in CHANGES if not change.trains}
        assert {len(specs) for name, specs in everything.items() if name not in free} == {5}
        assert {len(specs) for name, specs in selected.items() if name not in free} == {3}
        assert {len(specs) for name, specs in selected.items() if name in free} == {5}  # these runs exist
        assert set(selected) < set(everything)
        assert not any("updates" in name for name in selected)


def test_changes_apply_to_the_methods_that_have_what_is_changed():
    changes = {method: {c.name for c in applicable_changes(PAPER, CONDITION, method)} for method in ROWS}
    for method, names in changes.items():
        assert {"fresh heads", "learning rate x 3", "learning rate / 3"} <= names
        assert ("strength x 2" in names) == (method in ("ewc", "mas", "si", "rwalk", "uniform", "random"))
        assert ("2 updates for each batch" in names) == (method in REPLAY)
        assert ("replay of past tasks only" in names) == (method == "er")


def test_every_change_changes_one_field(context):
    for condition in context.scale.conditions():
        for method in ROWS:
            base = ablations._base_specs(context, condition, method)
            for name, specs in change_specs(context, condition, method).items():
                for spec, unchanged in zip(specs, base, strict=True):
                    fields, base_fields = spec.to_json(), unchanged.to_json()
                    changed = {key for key in fields if fields[key] != base_fields[key]} - {"stream"}
                    same_backbone = name == CHANGES[0].name and spec.seed % 2 == 0
                    assert len(changed) == (0 if name == CHANGES[-1].name or same_backbone else 1), (method, name)


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
    names = set(change_specs(fresh_context, fresh_context.scale.conditions()[0], "plain"))
    assert not names & {"a random start", "the first backbone for all seeds"}


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
                change_specs(context, context.scale.conditions()[index], method) for context in (cpu, bf16, tf32)
            )
            assert {spec.dtype for spec in in_bf16["fresh heads"]} == {"bf16"}
            assert PRECISION not in on_cpu
            assert PRECISION not in in_tf32
            assert (PRECISION in in_bf16) == (index == 0 and method in ("plain", "ewc", "explicit-ewc"))
            if PRECISION in in_bf16:
                assert {spec.dtype for spec in in_bf16[PRECISION]} == {"tf32"}
                base = ablations._base_specs(tf32, tf32.scale.conditions()[index], method)
                assert [spec.key for spec in in_bf16[PRECISION]] == [spec.key for spec in base]


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
    return measure_effects((CONDITION, "ewc"), runs, "accuracy")


def explain_accuracy(tested):
    """The reason if the paper's forgetting agrees whatever is changed."""
    return explain({"accuracy": tested}, "accuracy")


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
    assert not differs(agreeing)
    assert differs(effects(BEFORE))


def test_other_regimes_test_what_helps_in_the_first(context):
    first, other = context.scale.conditions()
    specs = change_specs(context, other, "ewc")
    helpful = {"accuracy": [replace(effect, change="fresh heads") for effect in effects(PAPERS)]}
    tested = ablations._promising(specs, (other, "ewc"), {(first, "ewc"): helpful})
    always = {change.name for change in applicable_changes(PAPER, OTHER_REGIME, "ewc") if change.always}
    assert always == {
        "the first backbone for all seeds",
        "the authors' definition",
        "weight decay as in the code",
    }
    assert set(tested) == {"fresh heads", CHANGES[-1].name, *always}


def test_other_regimes_test_every_change_if_the_first_tests_none(context):
    first, other = context.scale.conditions()
    specs = change_specs(context, other, "ewc")
    assert ablations._promising(specs, (other, "ewc"), {(first, "ewc"): {"accuracy": effects(BEFORE)[:1]}}) == specs


def test_last_change_leaves_the_last_task_out_of_forgetting():
    run = Result(RunSpec("cifar100", "0", "ewc", 0), "finished", "", [10.0, 10.0], [[80.0, 10.0], [70.0, 80.0]])
    assert CHANGES[-1].score(run, "forgetting") == 2 * run.metrics["forgetting"]
    assert CHANGES[-1].score(run, "accuracy") == run.metrics["accuracy"]


def test_reason_names_what_explains_or_what_comes_closest():
    assert explain_accuracy(effects(PAPERS)) == ["explained by momentum 0"]
    assert explain_accuracy(effects([60.0, 60.3, 59.7, 60.1, 59.9])) == [
        "not explained by any change that was tested; momentum 0 comes closest"
    ]
    assert explain_accuracy(effects(BEFORE)) == ["not explained by any change that was tested"]


def effects_on_both(after, forgetting):
    """Effects on accuracy and forgetting of EWC, whose forgetting in the paper is 2.07 ± 0.2."""
    forgotten = [
        replace(run, matrix=[[run.matrix[1][0] + 2 * lost, 10.0], run.matrix[1]])
        for run, lost in zip(runs_with(after), forgetting, strict=True)
    ]
    runs = {BASE.name: runs_with(BEFORE), "momentum 0": forgotten}
    return {metric: measure_effects((CONDITION, "ewc"), runs, metric) for metric in CELL_METRICS}


def test_change_explains_a_cell_only_if_the_whole_row_then_agrees():
    agreeing, differing = (
        effects_on_both(PAPERS, [value + by for value in (2.0, 2.2, 1.9, 2.1, 2.0)]) for by in (0, 3)
    )
    for metric in CELL_METRICS:
        assert explain(agreeing, metric) == ["explained by momentum 0"]
    assert differing["accuracy"][1].verdict == "explains it"  # on its own
    assert explain(differing, "accuracy") == ["not explained by any change that was tested; momentum 0 comes closest"]


def test_a_cell_for_which_no_change_of_a_run_was_tested_has_no_reason():
    runs = {BASE.name: runs_with(BEFORE), CHANGES[-1].name: runs_with(BEFORE)}
    assert explain({"forgetting": measure_effects((CONDITION, "ewc"), runs, "forgetting")}, "forgetting") == []
    assert explain({"accuracy": measure_effects((CONDITION, "ewc"), runs, "accuracy")}, "accuracy") == []


def test_change_of_the_measure_leaves_the_accuracy_as_it_is():
    by_metric = effects_on_both(PAPERS, [2.0, 2.2, 1.9, 2.1, 2.0])
    by_metric["accuracy"] = by_metric["accuracy"][:1]  # which differs
    assert not ablations.row_agrees(by_metric, "momentum 0")


def test_a_sentence_says_how_many_changes_were_tested_in_each_regime(context, result):
    first, other = result.text
    assert re.fullmatch(r"In 1-epoch, \d+ (to \d+ )?changes of a run were tested for .*, with 2 seeds\.", first)
    assert re.fullmatch(r"In 30-epochs, \d+ (to \d+ )?changes .*closer in the first regime, with 2 seeds\.", other)


def test_change_that_leaves_the_smallest_difference_comes_closest():
    farther, closer = [59.0, 59.4, 58.6, 59.1, 58.9], [60.0, 60.3, 59.7, 60.1, 59.9]
    runs = {BASE.name: runs_with(BEFORE), "weight decay 1e-4": runs_with(farther), "fresh heads": runs_with(closer)}
    tested = measure_effects((CONDITION, "ewc"), runs, "accuracy")
    assert explain_accuracy(tested) == ["not explained by any change that was tested; fresh heads comes closest"]


def test_significance_is_corrected_for_the_number_of_changes():
    after = [59.5, 65.0, 60.5, 66.0, 61.5]  # higher by 4.5: significant at 95 %, but not at 99.5 %
    tested = {BASE.name: runs_with(BEFORE), "momentum 0": runs_with(after)}
    alone = measure_effects((CONDITION, "ewc"), tested, "accuracy")
    changes = applicable_changes(PAPER, CONDITION, "ewc")
    others = {change.name: runs_with(BEFORE) for change in changes if change.trains}
    among = measure_effects((CONDITION, "ewc"), {**others, **tested}, "accuracy")
    assert alone[1].verdict == "explains it"
    assert next(effect for effect in among if effect.change == "momentum 0").verdict == "may explain it"
    assert explain_accuracy(among) == ["perhaps explained by momentum 0"]


def test_three_seeds_are_compared_with_the_same_three():
    """The first three seeds are lower than the others before the change, which therefore seems to do nothing."""
    before = [57.0, 57.1, 56.9, 62.0, 62.1]
    few = effects([59.0, 59.2, 58.8], before)[1]
    assert few.shift.count == few.after.count == 3
    assert few.before.count == 5
    assert few.shift.mean == pytest.approx(2.0)
    assert few.verdict == "moves towards"


def test_effect_of_three_seeds_needs_a_larger_size_to_be_beyond_chance():
    """Shifts of the same size, with five seeds and with three."""
    shifts = [5.5, 3.5, 4.5, 5.0, 4.0]
    among = {change.name: runs_with(BEFORE) for change in applicable_changes(PAPER, OTHER_REGIME, "ewc")}

    def verdict(seeds):
        after = runs_with([value + shift for value, shift in zip(BEFORE, shifts, strict=True)][:seeds])
        tested = {**among, BASE.name: runs_with(BEFORE), "fresh heads": after}
        effects = measure_effects((CONDITION, "ewc"), tested, "accuracy")
        return next(effect.verdict for effect in effects if effect.change == "fresh heads")

    assert verdict(5) == "explains it"
    assert verdict(3) == "may explain it"


def test_change_that_ends_farther_away_explains_nothing_even_if_its_variance_lets_it_agree():
    before, after = [61.2, 61.3, 61.1, 61.25, 61.15], [65.5, 62.4, 66.5, 62.0, 66.0]
    tested = effects(after, before)
    effect = tested[1]
    assert closer_changes(tested) == []
    assert effect.cell_after.probably_agrees
    assert effect.cell_after.difference > -effect.cell_before.difference
    assert effect.verdict == "overshoots"


def test_cell_without_a_finished_run_is_not_explained():
    for after in (PAPERS, [None] * 5):
        assert explain_accuracy(effects(after, [None] * 5)) == ["not explained by any change that was tested"]


# The lines of the page


def table(condition, values, at_paper_setting, method="ewc"):
    cell = make_cell(condition, method, "accuracy", confidence_interval(values), at_paper_setting=at_paper_setting)
    title = f"{condition}, {PAPER_SETTINGS if at_paper_setting else OUR_SETTINGS}"
    return ResultTable(title, ["method"], [{"method": method}], [cell])


def lines(tables, reasons=None):
    """The reasons of the cells that differ at our settings and at the paper's."""
    result = TargetResult("table1", tables=tables)
    return [difference_lines(result, settings, reasons) for settings in (OUR_SETTINGS, PAPER_SETTINGS)]


REASONS = {(CONDITION, "ewc", "accuracy"): ["explained by momentum 0"]}


def cells(reason, by):
    return [f"**{reason}** (1 cell): 1-epoch, cifar100: accuracy of ewc by {by}."]


def test_line_gives_the_reason_at_the_papers_setting():
    ours, papers = lines([table(CONDITION, BEFORE, False), table(CONDITION, BEFORE, True)], REASONS)
    assert papers == ours == cells("Explained by momentum 0", "-4.50")
    lower = [value - 1 for value in BEFORE]
    ours, papers = lines([table(CONDITION, lower, False), table(CONDITION, BEFORE, True)], REASONS)
    assert ours == cells("Explained by momentum 0", "-5.50")


def test_line_says_if_a_reason_is_for_the_opposite_direction():
    higher = [value + 10 for value in BEFORE]
    ours, _ = lines([table(CONDITION, higher, False), table(CONDITION, BEFORE, True)], REASONS)
    assert ours == cells("The search: at the paper's setting they differ in the opposite direction", "+5.50")


def test_line_names_the_setting_if_it_explains_the_cell():
    ours, papers = lines([table(CONDITION, BEFORE, False), table(CONDITION, PAPERS, True)], {})
    assert ours == cells("Explained by the setting: it agrees at the paper's setting", "-4.50")
    assert not papers


def test_setting_without_a_significant_effect_explains_nothing():
    """The cell agrees at the paper's setting only because of its variance."""
    tables = [table(CONDITION, BEFORE, False), table(CONDITION, [72.0, 40.0, 75.0, 36.0, 64.0], True)]
    ours, papers = lines(tables, {})
    assert "but the setting has no significant effect" in ours[0]
    assert not papers


def test_line_says_what_was_not_tested():
    _, untested = lines([table(CONDITION, BEFORE, True)])
    assert untested == ["1 cell differs from the paper; `mooring paper reasons` tests why."]
    assert "No change was tested under this condition" in lines([table(OTHER_REGIME, BEFORE, True)], {})[1][0]
    assert "No seed finished at the paper's setting" in lines([table(CONDITION, BEFORE, False)], {})[0][0]
