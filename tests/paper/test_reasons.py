"""A reason is a single change that brings a cell to the paper's beyond chance; anything less is said to be less."""

from dataclasses import replace

import pytest

from mooring.lab.model.metrics import confidence_interval
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import initial_network
from mooring.lab.streams.options import open_stream
from mooring.lab.study.study import Study
from mooring.paper.ablations import reasons
from mooring.paper.ablations.changes import BASE, CHANGES
from mooring.paper.ablations.explained import explained
from mooring.paper.context.cell import cell
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import MINIATURE, PAPER

CASE = PAPER.cases()[0]  # cifar100, where the paper's ewc has 62.5 ± 0.6
LATER = PAPER.cases()[3]
PRODUCTS = "products in tf32 instead of bf16"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("reasons")
    stream = open_stream(MINIATURE.streams["digits"])
    *paths, other = [folder / f"{seed}.safetensors" for seed in (7, 8, 9)]
    for seed, path in zip((7, 8, 9), (*paths, other), strict=True):
        save_file(initial_network("mlp", stream, seed).backbone.state_dict(), path)
    return Laboratory(Study(folder / "p.sqlite"), MINIATURE.on(None), {"mlp": paths}, instead=other)


@pytest.fixture(scope="module")
def finding(lab):
    return reasons.run(lab)


def test_every_change_is_trained_once_with_every_seed(lab, finding):
    assert len({result.spec.key for result in finding.results}) == len(lab.study.results())
    assert len(lab.study.results()) <= reasons.count(lab.scale)
    (table,) = finding.tables
    shown = [(row["method"], row["changed"]) for row in table.rows]
    here = [change for change in (BASE, *CHANGES) if change.name != PRODUCTS]  # on a CPU they are exact already
    wanted = [(m, c.name) for m in reasons.METHODS for c in here if c.fits(m)]
    assert shown == wanted
    before = len(lab.study.results())
    assert reasons.run(lab).to_json() == finding.to_json()
    assert len(lab.study.results()) == before


def test_a_change_changes_one_thing(lab):
    for method in reasons.METHODS:
        runs = reasons._specs(lab, lab.scale.cases()[0], method)
        for name, specs in runs.items():
            for spec, base in zip(specs, runs[BASE.name], strict=True):
                told, usual = spec.to_json(), base.to_json()
                apart = {key for key in told if told[key] != usual[key]} - {"stream"}
                alike = name == CHANGES[-1].name or (name == CHANGES[0].name and spec.seed % 2 == 0)
                assert len(apart) == (0 if name == BASE.name or alike else 1), (method, name)


def test_other_splits_have_the_same_images(lab):
    """Another order moves classes between the searched tasks and the rest; all tasks are all of them."""
    usual, other, entire = lab.trained("digits"), lab.trained("digits", shuffle=1), lab.entire("digits")
    assert len({stream.fingerprint for stream in (usual, other, entire)}) == 3
    assert len(other.tasks) == len(usual.tasks) == len(entire.tasks) - lab.scale.search_tasks
    classes = [each for task in entire.tasks for each in task.classes]
    assert sorted(classes) == list(range(10))


def test_without_a_backbone_there_is_none_to_change(tmp_path):
    bare = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None))
    names = set(reasons._specs(bare, bare.scale.cases()[0], "plain"))
    assert not names & {"a random start", "the first backbone for all seeds", "another backbone"}


def test_on_a_gpu_products_can_be_more_exact(tmp_path):
    """The changed runs are those of a regime in tf32: a study that has them does not train them again."""
    scale = replace(MINIATURE.on(None), regimes=PAPER.regimes)
    usual = replace(scale, regimes=tuple(replace(regime, on_gpu="auto") for regime in PAPER.regimes))
    cpu, bf16, tf32 = (
        Laboratory(Study(tmp_path / "p.sqlite"), each, device=device)
        for each, device in ((scale, "cpu"), (scale, "cuda"), (usual, "cuda"))
    )
    for place in range(len(PAPER.regimes)):
        for method in reasons.METHODS:
            here, base, exact = (reasons._specs(lab, lab.scale.cases()[place], method) for lab in (cpu, bf16, tf32))
            assert {spec.dtype for spec in base[BASE.name]} == {"bf16"}
            assert PRODUCTS not in here
            assert PRODUCTS not in exact
            assert (PRODUCTS in base) == (method in ("plain", "ewc", "explicit-ewc"))
            if PRODUCTS in base:
                assert {spec.dtype for spec in base[PRODUCTS]} == {"tf32"}
                assert [spec.key for spec in base[PRODUCTS]] == [spec.key for spec in exact[BASE.name]]


def test_the_papers_silence_is_told(finding):
    assert "The paper has no numbers for these data sets" in finding.text[-1]
    assert not finding.reasons


# Verdicts, on made-up runs


def made(accuracies, method="ewc"):
    """A run of two tasks for each accuracy, nothing forgotten; None is an unstable one."""
    specs = [RunSpec("cifar100", "0", method, seed, strength=1.0) for seed in range(len(accuracies))]
    return [
        Result(spec, "unstable", "", [], [])
        if accuracy is None
        else Result(spec, "finished", "", [10.0, 10.0], [[accuracy, 10.0], [accuracy, accuracy]])
        for spec, accuracy in zip(specs, accuracies, strict=True)
    ]


BEFORE = [58.0, 58.4, 57.6, 58.1, 57.9]


def effects(after, before=BEFORE, case=CASE):
    runs = {BASE.name: made(before), "momentum 0": made(after)}
    return reasons._effects((case, "ewc"), runs, "accuracy")


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([62.5, 62.8, 62.2, 62.6, 62.4], "explains it"),
        ([60.0, 60.3, 59.7, 60.1, 59.9], "moves towards"),
        ([67.0, 67.3, 66.7, 67.1, 66.9], "overshoots"),
        ([50.0, 50.3, 49.7, 50.1, 49.9], "moves away"),
        (BEFORE, "no sure effect"),
        ([72.0, 48.0, 75.0, 45.0, 70.0], "no sure effect"),  # agrees only because it is anything
        ([None] * 5, "does not finish"),
        ([62.5, None, None, None, None], "not decided"),
    ],
)
def test_a_change_explains_what_it_brings_to_the_papers_beyond_chance(after, verdict):
    assert effects(after)[1].verdict == verdict


def test_where_nothing_finished_before_finishing_is_told():
    assert effects([62.5, 62.8, 62.2, 62.6, 62.4], [None] * 5)[1].verdict == "finishes, and agrees"
    assert effects([50.0, 50.3, 49.7, 50.1, 49.9], [None] * 5)[1].verdict == "finishes"


def test_what_agrees_needs_no_reason():
    found = effects([62.9, 63.2, 62.6, 63.0, 62.8], [62.5, 62.8, 62.2, 62.6, 62.4])
    assert found[1].verdict == "still agrees"
    assert not reasons._off(found)
    assert reasons._off(effects(BEFORE))


def test_the_measure_of_forgetting_can_be_the_reason():
    run = Result(RunSpec("cifar100", "0", "ewc", 0), "finished", "", [10.0, 10.0], [[80.0, 10.0], [70.0, 80.0]])
    assert CHANGES[-1].score(run, "forgetting") == 2 * run.metrics["forgetting"]
    assert CHANGES[-1].score(run, "accuracy") == run.metrics["accuracy"]


def test_reasons_name_what_explains_or_what_comes_closest():
    assert reasons._reason(effects([62.5, 62.8, 62.2, 62.6, 62.4])).startswith("explained by momentum 0 (+4.5")
    near = reasons._reason(effects([60.0, 60.3, 59.7, 60.1, 59.9]))
    assert near == (
        "no reason found among 1 single change; of those that surely move it momentum 0 comes closest, with which "
        "-2.50 is left"
    )
    assert reasons._reason(effects(BEFORE)).endswith("none surely moves it towards the paper's")


def test_a_reason_is_held_to_how_many_were_tried():
    after = [59.5, 65.0, 60.5, 66.0, 61.5]  # higher by 4.5, and surely so at 95 % but not at 99.5 %
    alone = reasons._effects((CASE, "ewc"), {BASE.name: made(BEFORE), "momentum 0": made(after)}, "accuracy")
    others = {change.name: made(BEFORE) for change in CHANGES if change.fits("ewc") and change.trains}
    among = reasons._effects((CASE, "ewc"), {BASE.name: made(BEFORE), **others, "momentum 0": made(after)}, "accuracy")
    assert alone[1].verdict == "explains it"
    assert next(effect for effect in among if effect.change == "momentum 0").verdict == "may explain it"
    assert reasons._reason(among).startswith("perhaps explained by momentum 0")


# Under the tables


def table(case, values, at_papers, method="ewc"):
    found = cell(case, method, "accuracy", confidence_interval(values), at_papers=at_papers)
    return Table("t", ["method"], [{"method": method}], [found])


def notes(tables, told=None):
    tested = [] if told is None else [Finding("reasons", reasons=told)]
    return [shown.notes for shown in explained([Finding("table1", tables=tables), *tested])[0].tables]


def test_each_cell_that_differs_is_followed_by_its_reason():
    told = {(CASE, "ewc", "accuracy"): "explained by momentum 0"}
    same, papers = notes([table(CASE, BEFORE, False), table(CASE, BEFORE, True)], told)
    assert papers == same == ["ewc: accuracy differs by -4.50: explained by momentum 0."]
    lower = [value - 1 for value in BEFORE]
    ours, papers = notes([table(CASE, lower, False), table(CASE, BEFORE, True)], told)
    assert ours == ["ewc: accuracy differs by -5.50: at the paper's setting by -4.50, explained by momentum 0."]


def test_a_reason_for_the_opposite_is_not_taken_for_one():
    told = {(CASE, "ewc", "accuracy"): "explained by momentum 0"}
    higher = [value + 10 for value in BEFORE]
    ours, _ = notes([table(CASE, higher, False), table(CASE, BEFORE, True)], told)
    other_way = "at the paper's setting the other way, by -4.50 (explained by momentum 0)"
    assert ours == [f"ewc: accuracy differs by +5.50: {other_way}."]


def test_a_setting_can_be_the_reason():
    tables = [table(CASE, BEFORE, False), table(CASE, [62.5, 62.8, 62.2, 62.6, 62.4], True)]
    ours, papers = notes(tables, {})
    assert ours[0].endswith("explained by the setting: at the paper's it agrees.")
    assert not papers


def test_a_setting_that_does_not_surely_move_a_cell_explains_nothing():
    """It agrees there because it is anything there."""
    ours, papers = notes([table(CASE, BEFORE, False), table(CASE, [72.0, 40.0, 75.0, 36.0, 64.0], True)], {})
    assert ours[0].endswith("which chance allows, but the setting does not surely move it.")
    assert not papers


def test_what_was_not_tested_is_said():
    assert notes([table(CASE, BEFORE, True)]) == [["1 cell not as in the paper; `mooring paper reasons` tests why."]]
    assert "not tested with cnn6 in 30-epochs" in notes([table(LATER, BEFORE, True)], {})[0][0]
    unfinished = replace(table(CASE, BEFORE, False), title="alone")
    assert "no seed finished at the paper's setting" in notes([unfinished], {})[0][0]
