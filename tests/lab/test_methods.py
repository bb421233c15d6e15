"""Methods: every one that is promised, each told in one line and made of the core's own rules."""

import pytest
import torch

import mooring
from mooring import EWC, MAS, SI, Balanced, Interpolation, Penalty, Proximal, Random, RWalk, Uniform
from mooring.errors import MooringError
from mooring.lab.methods import METHODS, find_method, resolve_methods
from mooring.lab.methods.method import Method
from mooring.lab.study.comparison import comparison
from mooring.pulls import Blend
from mooring.pulls.merges import average, total

SIX = {"ewc": EWC, "mas": MAS, "si": SI, "rwalk": RWalk, "uniform": Uniform, "random": Random}
SIGNS = {"si-absolute": "absolute", "si-signed": "signed", "si-negative": 0.001}
CONTROLS = ["plain", "frozen", "frozen-after-first", "joint"]
PROMISED = [
    *CONTROLS,
    *SIX,
    *SIGNS,
    *(f"{kind}-{name}" for kind in ("balanced", "clamped", "explicit") for name in SIX),
    *(f"soft-{name}" for name in ("ewc", "mas", "si", "rwalk")),
    *("l2-sp", "sfa", "wise-ft", "imm-mean", "imm-mode", "cofima"),
    "proximal-ewc",
    "budget-ewc",
    "budget-kronecker",
    "a-gem",
    "er",
]


def test_every_promised_method_is_there_and_no_other():
    assert len(PROMISED) == 46
    assert set(METHODS) == set(PROMISED)
    assert all(method.name == name for name, method in METHODS.items())


@pytest.mark.parametrize("name", PROMISED)
def test_a_method_says_what_it_does_in_one_line(name):
    line = find_method(name).line
    assert line == line.strip()
    assert "\n" not in line
    assert 10 < len(line) <= 100
    assert not line.endswith(".")


def test_no_two_methods_say_the_same():
    assert len({method.line for method in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize("name", SIX)
def test_the_regularized_methods_are_an_importance_and_a_pull_of_the_core(name):
    plain, balanced, clamped, explicit = (
        find_method(f"{kind}{name}") for kind in ("", "balanced-", "clamped-", "explicit-")
    )
    for method in (plain, clamped, explicit):
        assert type(method.importance(3)) is SIX[name]
    assert type(balanced.importance(3)) is Balanced
    assert type(balanced.importance(3).importance) is SIX[name]
    assert plain.pull(2.0) == balanced.pull(2.0) == Penalty(2.0)
    assert clamped.pull(2.0) == Penalty(2.0, clamp=True)
    assert explicit.pull(2.0) == Interpolation()
    assert plain.strength == balanced.strength == clamped.strength > 0
    assert explicit.strength is None
    assert all(method.merge is average for method in (plain, balanced, clamped, explicit))
    assert all(method.observes_outputs == (name == "mas") for method in (plain, balanced, clamped, explicit))


@pytest.mark.parametrize("name", SIX)
def test_importances_have_the_options_of_the_core_and_the_papers_decay(name):
    made = find_method(name).importance(0)
    assert made == mooring.importance.names.resolve(name) == find_method(f"explicit-{name}").importance(0)
    if name in ("ewc", "mas", "rwalk"):
        assert made.decay == 0.2


@pytest.mark.parametrize(("name", "sign"), SIGNS.items())
def test_the_signs_of_si(name, sign):
    assert find_method(name).importance(4).sign == sign
    assert find_method(name).pull(1.0) == Penalty(1.0)
    assert find_method("si").importance(4).sign == "rectified"


def test_what_is_drawn_at_random_is_drawn_by_the_runs_own_seed():
    for name in ("random", "balanced-random", "clamped-random", "explicit-random", "si-negative"):
        assert find_method(name).importance(7).seed == 7
        assert find_method(name).importance(8).seed == 8
    like = torch.zeros(50)
    one, other = (find_method("random").importance(s).start(like, name="w", task=0)["current"] for s in (1, 2))
    assert not torch.equal(one, other)


def test_the_proximal_step_has_the_mean_fisher_of_each_task_summed():
    method = find_method("proximal-ewc")
    assert method.importance(0) == EWC(decay=None, per_sample=True)
    assert method.pull(5.0) == Proximal(5.0)
    assert method.merge is total
    assert method.strength > 0


def test_a_budget_has_the_curvature_of_the_proximal_step():
    method, other = find_method("budget-ewc"), find_method("proximal-ewc")
    assert method.importance(0) == other.importance(0)
    assert method.merge is other.merge
    assert method.pull(0.1) == mooring.Budget(0.1)
    assert not method.can_extrapolate


def test_a_pull_takes_a_strength_for_each_run():
    strengths = torch.tensor([0.5, 1.0])
    for name, method in METHODS.items():
        if method.has_strength:
            assert any(value is strengths for value in vars(method.pull(strengths)).values()), name


def test_controls_and_replay_moor_nothing():
    for name in (*CONTROLS, "er", "a-gem"):
        method = find_method(name)
        assert (method.importance, method.strength, method.observes_outputs) == (None, None, False)
    assert [find_method(name).frozen for name in CONTROLS] == ["never", "always", "after first", "never"]
    assert [find_method(name).data for name in (*CONTROLS, "er", "a-gem")] == ["task"] * 3 + ["joint", "er", "a-gem"]
    assert {name for name, method in METHODS.items() if method.memory} == {"er", "a-gem"}
    assert find_method("er").memory == find_method("a-gem").memory == 500


def test_only_a_penalty_that_is_not_clamped_can_extrapolate():
    expected = {*SIX, *SIGNS, "l2-sp", *(f"balanced-{name}" for name in SIX)}
    assert {name for name, method in METHODS.items() if method.can_extrapolate} == expected


def test_the_papers_names_stand_for_ours():
    assert find_method("vanilla") is find_method("uniform")
    assert find_method("clamped-vanilla") is find_method("clamped-uniform")
    assert find_method("explicit-vanilla") is find_method("explicit-uniform")


def test_a_list_of_methods_names_each_once_in_the_order_given():
    assert resolve_methods("er, ewc ,vanilla,ewc,uniform") == ["er", "ewc", "uniform"]
    assert resolve_methods(["joint", "plain"]) == ["joint", "plain"]
    assert resolve_methods("all") == list(METHODS)
    assert resolve_methods("joint,all") == ["joint", *(name for name in METHODS if name != "joint")]


@pytest.mark.parametrize(
    ("given", "near"),
    [("ewk", "ewc"), ("explicit_mas", "explicit-mas"), ("agem", "a-gem"), ("zzz", None), ("frozen-first", "frozen")],
)
def test_an_unknown_method_is_refused_in_one_line_with_the_nearest(given, near):
    for ask in (find_method, resolve_methods):
        with pytest.raises(MooringError, match=f"unknown method '{given}'") as error:
            ask(given)
        told = str(error.value)
        assert "\n" not in told
        assert all(name in told for name in PROMISED)
        assert (f"did you mean '{near}" in told) == (near is not None)


def test_an_empty_name_is_refused_in_one_line():
    for given in ("", "ewc,", ","):
        with pytest.raises(MooringError, match="unknown method ''"):
            resolve_methods(given)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_strength])
def test_a_dial_has_strengths_that_its_pull_allows_and_the_usual_one_lies_between_its_ends(name):
    method = find_method(name)
    assert len(method.dial) >= 6
    assert list(method.dial) == sorted(method.dial)
    assert all(type(method.pull(strength)) is type(method.pull(1.0)) for strength in method.dial)
    assert method.dial[0] <= method.strength <= method.dial[-1]


def test_known_names_are_made_of_the_same_pieces():
    assert find_method("wise-ft").pull(0.3) == Blend(0.3, every="task")
    assert find_method("sfa").pull(0.3) == Blend(0.3, every=50)
    assert find_method("l2-sp").pull(3.0) == Penalty(3.0)
    assert find_method("l2-sp").anchors == "start"
    assert find_method("soft-si").pull(0.3) == Interpolation(stiffness=0.3)
    assert find_method("imm-mode").pull(0.0) == Interpolation(root=1, every="task")
    assert find_method("cofima").pull(3.0) == Interpolation(root=1, every="task", weight=3.0)
    assert all(find_method(name).merge is total for name in ("imm-mean", "imm-mode", "cofima"))


WRONG = {
    "a pull without an importance": ({"pull": Proximal, "strength": 10.0}, "it would pull nothing: give an importance"),
    "a strength alone": ({"strength": 10.0}, "it would pull nothing: give an importance"),
    "an importance that is made": ({"importance": EWC()}, r"give a function that makes it, such as lambda seed: EWC"),
    "a pull that is made": (
        {"importance": lambda seed: EWC(), "pull": Proximal(1.0)},
        r"give a function that makes it, such as lambda strength: Proximal",
    ),
    "a pull that takes no strength": (
        {"importance": lambda seed: EWC(), "pull": lambda: Proximal(1.0)},
        "must take one argument, the strength",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_method_that_would_not_do_what_it_says_is_refused(what):
    given, said = WRONG[what]
    with pytest.raises(MooringError, match=said):
        Method("mine", "my own", **given)


def test_a_method_under_another_name_is_refused(monkeypatch):
    monkeypatch.setitem(METHODS, "mine", Method("other", "my own"))
    with pytest.raises(MooringError, match=r"METHODS\['mine'\] holds the method 'other': key and name must agree"):
        resolve_methods("plain,mine")


def test_a_method_of_ones_own_has_its_own_strength_everywhere(monkeypatch):
    mine = Method("mine", "my own", importance=lambda seed: EWC(), pull=Proximal, strength=10.0)
    monkeypatch.setitem(METHODS, "mine", mine)
    made = [comparison(stream, "mine", seeds=1) for stream in ("digits", "cifar10")]
    assert [each.specs(each.streams[0][1], "", "", "")[0].strength for each in made] == [10.0, 10.0]
