"""Tests of the registry of methods, their parts and their descriptions."""

import pytest
import torch

import mooring
from mooring import EWC, MAS, SI, Balanced, Interpolation, Penalty, Proximal, Random, RWalk, Uniform
from mooring.errors import MooringError
from mooring.rules import Blend, merges
from mooring.state.chosen_rules import choose_rules
from mooring_lab.methods import METHODS, find_method, resolve_methods
from mooring_lab.methods.budgets import ReferenceOptions
from mooring_lab.methods.groups import GROUPS
from mooring_lab.model.method import Method
from mooring_lab.study.comparison import comparison

IMPORTANCES = {"ewc": EWC, "mas": MAS, "si": SI, "rwalk": RWalk, "uniform": Uniform, "random": Random}
SIGNS = {"si-absolute": "absolute", "si-signed": "signed", "si-negative": 0.001}
CONTROLS = ["plain", "frozen", "frozen-after-first", "joint"]
REPLAY = ["er", "mir", "a-gem", "der++", "tpgm"]
REFERENCES = ["distil", "mooring", "budget-measured", "budget-distil"]
MATCHED = ["summed-ewc", "clamped-summed-ewc", "laplace-kronecker", "clamped-laplace-kronecker"]
PROJECTIONS = ["gpm", "nscl", "owm", "ftp", "tpgm"]
NAMES = [
    *CONTROLS,
    *IMPORTANCES,
    *SIGNS,
    *(f"{kind}-{name}" for kind in ("balanced", "clamped", "explicit") for name in IMPORTANCES),
    *(f"soft-{name}" for name in ("ewc", "mas", "si", "rwalk")),
    *("l2-sp", "sfa", "wise-ft", "imm-mean", "imm-mode", "cofima"),
    "proximal-ewc",
    "budget-ewc",
    "budget-kronecker",
    *PROJECTIONS,
    "a-gem",
    "er",
    "mir",
    *REFERENCES,
    *MATCHED,
    "lwf",
    "der++",
]


def test_registry_has_exactly_the_documented_methods():
    assert len(NAMES) == 62
    assert set(METHODS) == set(NAMES)
    assert all(method.name == name for name, method in METHODS.items())


@pytest.mark.parametrize("name", NAMES)
def test_description_is_one_short_line(name):
    line = find_method(name).line
    assert line == line.strip()
    assert "\n" not in line
    assert 10 < len(line) <= 100
    assert not line.endswith(".")


def test_every_method_is_in_one_group():
    grouped = [name for group in GROUPS for name in resolve_methods(group)]
    assert sorted(grouped) == sorted(NAMES)
    assert len(resolve_methods("start")) == 6
    assert set(CONTROLS) < set(resolve_methods("controls"))
    assert resolve_methods("plain,start")[0] == "plain"


def test_descriptions_are_unique():
    assert len({method.line for method in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize("name", IMPORTANCES)
def test_regularized_methods_use_the_importances_and_pulls_of_the_library(name):
    plain, balanced, clamped, explicit = (
        find_method(f"{kind}{name}") for kind in ("", "balanced-", "clamped-", "explicit-")
    )
    for method in (plain, clamped, explicit):
        assert type(method.importance(3)) is IMPORTANCES[name]
    assert type(balanced.importance(3)) is Balanced
    assert type(balanced.importance(3).importance) is IMPORTANCES[name]
    assert plain.pull(2.0) == balanced.pull(2.0) == Penalty(2.0)
    assert clamped.pull(2.0) == Penalty(2.0, clamp=True)
    assert explicit.pull(2.0) == Interpolation()
    assert plain.strength == balanced.strength == clamped.strength > 0
    assert explicit.strength is None
    assert all(method.merge == "average" for method in (plain, balanced, clamped, explicit))
    assert all(method.observes_outputs == (name == "mas") for method in (plain, balanced, clamped, explicit))


@pytest.mark.parametrize("name", IMPORTANCES)
def test_importances_have_the_default_options_and_the_papers_decay(name):
    importance = find_method(name).importance(0)
    assert importance == mooring.rules.importance_names.resolve(name) == find_method(f"explicit-{name}").importance(0)
    if name in ("ewc", "mas", "rwalk"):
        assert importance.decay == 0.2


@pytest.mark.parametrize(("name", "sign"), SIGNS.items())
def test_si_variants_have_their_sign(name, sign):
    assert find_method(name).importance(4).sign == sign
    assert find_method(name).pull(1.0) == Penalty(1.0)
    assert find_method("si").importance(4).sign == "rectified"


def test_random_importances_use_the_seed_of_the_run():
    for name in ("random", "balanced-random", "clamped-random", "explicit-random", "si-negative"):
        assert find_method(name).importance(7).seed == 7
        assert find_method(name).importance(8).seed == 8
    like = torch.zeros(50)
    one, other = (find_method("random").importance(s).start(like, name="w", task=0)["current"] for s in (1, 2))
    assert not torch.equal(one, other)


def test_proximal_step_sums_the_mean_fisher_of_the_tasks():
    method = find_method("proximal-ewc")
    assert method.importance(0) == EWC(decay=None, per_sample=True)
    assert method.pull(5.0) == Proximal(5.0)
    assert method.merge == "sum"
    assert method.strength > 0


def test_budget_uses_the_same_fisher_as_the_proximal_step():
    method, other = find_method("budget-ewc"), find_method("proximal-ewc")
    assert method.importance(0) == other.importance(0)
    assert method.merge == other.merge
    assert method.pull(0.1) == mooring.Budget(0.1)
    assert not method.can_extrapolate


def test_pull_accepts_one_strength_per_run():
    strengths = torch.tensor([0.5, 1.0])
    for name, method in METHODS.items():
        if method.has_strength and method.importance is not None:
            assert any(value is strengths for value in vars(method.pull(strengths)).values()), name


def test_controls_and_replay_have_no_importance():
    for name in (*CONTROLS, "er", "a-gem"):
        method = find_method(name)
        assert (method.importance, method.strength, method.observes_outputs) == (None, None, False)
    assert find_method("plain").plugin is None
    assert [find_method(name).plugin.trained_tasks for name in ("frozen", "frozen-after-first")] == [0, 1]
    assert {name for name, method in METHODS.items() if method.all_tasks} == {"joint"}
    assert {name for name, method in METHODS.items() if method.memory} == {*REPLAY, *REFERENCES}
    assert all(find_method(name).memory == 500 for name in (*REPLAY, *REFERENCES))


def test_methods_with_a_reference_measure_or_distil_or_both():
    assert {name for name, method in METHODS.items() if isinstance(method.plugin, ReferenceOptions)} == set(REFERENCES)
    assert [find_method(name).plugin.measures for name in REFERENCES] == [False, True, True, True]
    assert [find_method(name).pull(0.1).distil for name in REFERENCES[1:]] == [None, False, None]
    assert find_method("budget-measured").importance(0) == find_method("budget-kronecker").importance(0)
    assert find_method("distil").importance is None


def test_mooring_has_the_rules_of_attach_with_a_reference():
    method, rules = find_method("mooring"), choose_rules(reference=True)
    assert (method.importance(0), method.pull(method.strength)) == (rules.importance, rules.pull)
    assert merges.resolve(method.merge) is rules.merge


def test_only_unclamped_penalties_can_extrapolate():
    expected = {
        *IMPORTANCES,
        *SIGNS,
        "l2-sp",
        "summed-ewc",
        "laplace-kronecker",
        *(f"balanced-{name}" for name in IMPORTANCES),
    }
    assert {name for name, method in METHODS.items() if method.can_extrapolate} == expected


def test_names_of_the_paper_are_aliases():
    assert find_method("vanilla") is find_method("uniform")
    assert find_method("clamped-vanilla") is find_method("clamped-uniform")
    assert find_method("explicit-vanilla") is find_method("explicit-uniform")


def test_resolve_methods_removes_duplicates_and_keeps_the_order():
    assert resolve_methods("er, ewc ,vanilla,ewc,uniform") == ["er", "ewc", "uniform"]
    assert resolve_methods(["joint", "plain"]) == ["joint", "plain"]
    assert resolve_methods("all") == list(METHODS)
    assert resolve_methods("joint,all") == ["joint", *(name for name in METHODS if name != "joint")]


@pytest.mark.parametrize(
    ("name", "closest"),
    [("ewk", "ewc"), ("explicit_mas", "explicit-mas"), ("agem", "a-gem"), ("zzz", None), ("frozen-first", "frozen")],
)
def test_unknown_method_raises_an_error_with_the_closest_name(name, closest):
    for function in (find_method, resolve_methods):
        with pytest.raises(MooringError, match=f"unknown method '{name}'") as error:
            function(name)
        message = str(error.value)
        assert "\n" not in message
        assert f"`mooring methods` lists all {len(METHODS)}" in message
        assert len(message) < 160  # two lines of a terminal
        assert (f"did you mean '{closest}" in message) == (closest is not None)


def test_empty_name_raises_an_error():
    for names in ("", "ewc,", ","):
        with pytest.raises(MooringError, match="unknown method ''"):
            resolve_methods(names)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_strength])
def test_dial_has_valid_strengths_and_contains_the_default(name):
    method = find_method(name)
    assert len(method.dial) >= 6
    assert list(method.dial) == sorted(method.dial)
    assert all(type(method.pull(strength)) is type(method.pull(1.0)) for strength in method.dial)
    assert method.dial[0] <= method.strength <= method.dial[-1]


def test_published_methods_are_combinations_of_importances_and_pulls():
    assert find_method("wise-ft").pull(0.3) == Blend(0.3, every="task")
    assert find_method("sfa").pull(0.3) == Blend(0.3, every=50)
    assert find_method("l2-sp").pull(3.0) == Penalty(3.0)
    assert find_method("l2-sp").anchors == "start"
    assert find_method("soft-si").pull(0.3) == Interpolation(stiffness=0.3)
    assert find_method("imm-mode").pull(0.0) == Interpolation(root=1, every="task")
    assert find_method("cofima").pull(3.0) == Interpolation(root=1, every="task", weight=3.0)
    assert all(find_method(name).merge == "sum" for name in ("imm-mean", "imm-mode", "cofima"))


INVALID = {
    "a pull without an importance": ({"pull": Proximal, "strength": 10.0}, "it would pull nothing: give an importance"),
    "a strength alone": ({"strength": 10.0}, "it would pull nothing: give an importance"),
    "an importance instead of a function": (
        {"importance": EWC()},
        r"give a function that makes it, such as lambda seed: EWC",
    ),
    "a pull instead of a function": (
        {"importance": lambda seed: EWC(), "pull": Proximal(1.0)},
        r"give a function that makes it, such as lambda strength: Proximal",
    ),
    "a pull that takes no strength": (
        {"importance": lambda seed: EWC(), "pull": lambda: Proximal(1.0)},
        "must take one argument, the strength",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_method_raises_an_error(case):
    fields, message = INVALID[case]
    with pytest.raises(MooringError, match=message):
        Method("custom", "a method", **fields)


def test_key_that_differs_from_the_name_raises_an_error(monkeypatch):
    monkeypatch.setitem(METHODS, "custom", Method("other", "a method"))
    with pytest.raises(MooringError, match=r"METHODS\['custom'\] holds the method 'other': key and name must agree"):
        resolve_methods("plain,custom")


def test_custom_method_has_its_own_strength_on_every_stream(monkeypatch):
    custom = Method("custom", "a method", importance=lambda seed: EWC(), pull=Proximal, strength=10.0)
    monkeypatch.setitem(METHODS, "custom", custom)
    comparisons = [comparison(stream, "custom", seeds=1) for stream in ("digits", "cifar10")]
    assert [c.specs(c.streams[0][1], "", "", "")[0].strength for c in comparisons] == [10.0, 10.0]


@pytest.mark.parametrize("name", ["ewc-gentle", "clamped-ewc-of-mine", "mas-2", "ewc"])
def test_custom_method_named_like_a_built_in_one_has_its_own_strength(monkeypatch, name):
    custom = Method(name, "a method", importance=lambda seed: EWC(), pull=Proximal, strength=10.0)
    monkeypatch.setitem(METHODS, name, custom)
    compared = comparison("cifar10", name, seeds=1)
    assert compared.specs(compared.streams[0][1], "", "", "")[0].strength == 10.0


def test_custom_method_with_an_impossible_default_strength_is_refused_before_training(monkeypatch):
    custom = Method("custom", "a method", importance=lambda seed: EWC(), pull=Proximal, strength=-1.0)
    monkeypatch.setitem(METHODS, "custom", custom)
    with pytest.raises(MooringError, match="strength"):
        comparison("digits", "custom", seeds=1)
