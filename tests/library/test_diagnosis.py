"""Tests of Mooring.diagnose: its numbers, its table, and the effect of its advice."""

import json
import math
import re
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

import mooring
from mooring.diagnose.diagnosis import diagnose_states
from mooring.errors import MooringError, NonFiniteError
from mooring.rules import Importance


class FixedScores(Importance):
    """Fixed scores by parameter name."""

    merges = False

    def __init__(self, scores: dict[str, list]) -> None:
        self.scores = scores

    def start(self, like: Tensor, *, name: str, task: int) -> dict[str, Tensor]:
        return {"current": torch.tensor(self.scores[name]).to(like).reshape(like.shape)}


class Net(nn.Module):
    """Two small layers, `first` and `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, dtype=torch.float64)
        self.last = nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


SCORES = {
    "first.weight": [[1.0, 2.0], [3.0, 4.0]],
    "first.bias": [0.0, 11.0],
    "last.weight": [[0.5, 0.0]],
    "last.bias": [7.0],
}


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def moored(scores=SCORES, make=sgd, pull=None):
    """Return a Mooring whose previous importance is `scores`."""
    model = Net()
    moor = mooring.attach(model, make(model), importance=FixedScores(scores), pull=pull or mooring.Penalty(2.0))
    moor.consolidate()
    return moor


def scaled(first: float, last: float) -> dict[str, list]:
    """Return scores that are constant within each layer."""
    return {
        "first.weight": [[first] * 2] * 2,
        "first.bias": [first] * 2,
        "last.weight": [[last] * 2],
        "last.bias": [last],
    }


# The numbers


def test_numbers_of_each_layer_equal_a_computation_by_hand():
    diagnosis = moored().diagnose()  # p = 0.1 * 2 * importance: 0.2 0.4 0.6 0.8 0 2.2 and 0.1 0 1.4
    first, last = diagnosis.layers
    assert (first.name, first.parameters, last.name, last.parameters) == ("first", 6, "last", 3)
    assert first.mean == pytest.approx(21 / 6, rel=1e-12)
    assert last.mean == pytest.approx(7.5 / 3, rel=1e-12)
    assert (first.largest, last.largest) == (11.0, 7.0)
    assert first.share == pytest.approx(21 / 28.5, rel=1e-12)
    assert last.share == pytest.approx(7.5 / 28.5, rel=1e-12)
    assert first.largest_p == pytest.approx(2.2, rel=1e-12)
    assert last.largest_p == pytest.approx(1.4, rel=1e-12)
    assert asdict(first.verdicts) == {"free": 1, "interpolate": 4, "extrapolate": 0, "diverge": 1, "negative": 0}
    assert asdict(last.verdicts) == {"free": 1, "interpolate": 1, "extrapolate": 1, "diverge": 0, "negative": 0}
    assert first.safe_strength == pytest.approx(1 / 1.1, rel=1e-12)
    assert last.safe_strength == pytest.approx(1 / 0.7, rel=1e-12)
    assert diagnosis.safe_strength == first.safe_strength
    assert diagnosis.disparity == pytest.approx(2.5 / 3.5, rel=1e-12)
    assert asdict(diagnosis.total) == {"free": 2, "interpolate": 5, "extrapolate": 1, "diverge": 1, "negative": 0}
    assert (diagnosis.strength, diagnosis.optimizer, diagnosis.limit, diagnosis.clamp) == (2.0, "SGD", 2.0, False)
    assert not diagnosis.stable
    assert diagnosis.notes == ()


def test_diagnose_accepts_another_strength_than_the_pulls():
    moor = moored(pull=mooring.Penalty(2.0))
    diagnosis = moor.diagnose(strength=0.5)
    assert diagnosis.strength == 0.5
    assert diagnosis.layers[0].largest_p == pytest.approx(0.55, rel=1e-12)
    assert diagnosis.stable
    assert diagnosis.safe_strength == pytest.approx(moor.diagnose().safe_strength, rel=1e-12)


def test_safe_strength_does_not_depend_on_the_given_strength():
    moor = moored()
    for strength in (0.0, 1e-30, 1.0, 1e30):
        assert moor.diagnose(strength=strength).safe_strength == pytest.approx(1 / 1.1, rel=1e-12)


def test_strength_0_leaves_every_parameter_free():
    diagnosis = moored(pull=mooring.Penalty(0.0)).diagnose()
    assert diagnosis.stable
    assert diagnosis.total.free == 9
    assert not any("no parameter has any importance" in advice for advice in diagnosis.advice)


def two_groups(model):
    return torch.optim.SGD(
        [
            {"params": model.first.parameters(), "lr": 0.1},
            {"params": model.last.parameters(), "lr": 0.01, "momentum": 0.9},
        ]
    )


def test_each_parameter_group_has_its_own_learning_rate_and_limit():
    scores = {**scaled(1.0, 1.0), "first.bias": [3.0, 15.0], "last.bias": [300.0]}
    diagnosis = moored(scores, two_groups, mooring.Penalty(1.0)).diagnose()
    first, last = diagnosis.layers
    assert first.largest_p == pytest.approx(1.5, rel=1e-12)
    assert last.largest_p == pytest.approx(3.0, rel=1e-12)
    assert first.safe_strength == pytest.approx(1 / 1.5, rel=1e-12)
    assert last.safe_strength == pytest.approx(1 / 3.0, rel=1e-12)
    assert diagnosis.safe_strength == last.safe_strength
    assert diagnosis.limit == 2.0  # the smallest
    assert asdict(last.verdicts) == {"free": 0, "interpolate": 2, "extrapolate": 1, "diverge": 0, "negative": 0}
    again = moored(scores, two_groups, mooring.Penalty(1.0)).diagnose(strength=1.3)  # 1.95 and 3.9
    assert [layer.verdicts.diverge for layer in again.layers] == [0, 1]


def test_layers_are_in_the_models_order_for_any_order_of_groups():
    def reversed_groups(model):
        return torch.optim.SGD([{"params": model.last.parameters()}, {"params": model.first.parameters()}], lr=0.1)

    diagnosis = moored(scaled(5.0, 1.0), reversed_groups).diagnose()
    assert [layer.name for layer in diagnosis.layers] == ["first", "last"]
    assert diagnosis.disparity == pytest.approx(0.2, rel=1e-12)


def test_clamped_penalty_is_stable_and_reports_clamped_parameters():
    diagnosis = moored(pull=mooring.Penalty(2.0, clamp=True)).diagnose()
    assert diagnosis.clamp
    assert diagnosis.stable
    assert any("clamp=True" in note for note in diagnosis.notes)
    assert any("2 of 9 parameters are clamped" in advice for advice in diagnosis.advice)
    assert not any("extrapolate (" in advice for advice in diagnosis.advice)
    assert asdict(diagnosis.total) == asdict(moored().diagnose().total)


def test_clamp_does_not_make_negative_importance_stable():
    scores = {**SCORES, "last.weight": [[-0.5, 0.0]]}
    assert not moored(scores, pull=mooring.Penalty(2.0, clamp=True)).diagnose().stable


def test_clamped_penalty_that_diverges_under_adam_is_not_stable():
    # The cap is 1 / (lr * strength) with the group's lr, but here Adam moves at lr / (sqrt(v) + eps) = 100 lr: p = 100.
    model = nn.Module()
    model.theta = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([model.theta], lr=0.1, eps=1e-2)
    moor = mooring.attach(
        model, optimizer, importance=FixedScores({"theta": [1e6] * 3}), pull=mooring.Penalty(1.0, clamp=True)
    )
    moor.consolidate()
    with torch.no_grad():
        model.theta.fill_(1e-100)  # its square vanishes next to eps
    for _ in range(30):
        model.theta.grad = torch.zeros_like(model.theta)
        optimizer.step()
    assert float(model.theta.detach().abs().min()) > 1e-90
    assert not moor.diagnose().stable


def test_negative_scores_are_counted_and_mentioned_in_the_advice():
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-2, 2, p.numel()).reshape(p.shape))
    optimizer = sgd(model, lr=0.05, weight_decay=3.0)  # the decay moves parameters against the task's gradient
    moor = mooring.attach(model, optimizer, importance=mooring.SI(sign="signed"), pull=mooring.Penalty(3.0))
    for _ in range(3):
        optimizer.zero_grad()
        (-0.1 * model(torch.ones(1, 2, dtype=torch.float64)).sum()).backward()
        optimizer.step()
    moor.consolidate()
    diagnosis = moor.diagnose()
    for layer in diagnosis.layers:
        flat = torch.cat([s.reshape(-1) for name, s in moor.previous.items() if name.startswith(layer.name)])
        assert layer.verdicts.negative == int((flat < 0).sum())
        assert layer.mean == pytest.approx(float(flat.mean()), rel=1e-12)
        assert layer.largest == float(flat.max())
        assert layer.largest_p == pytest.approx(float((0.05 * 3.0 * flat).max()), rel=1e-12)
        everything = sum(float(s.abs().sum()) for s in moor.previous.values())
        assert layer.share == pytest.approx(float(flat.abs().sum()) / everything, rel=1e-12)
    assert 0 < diagnosis.total.negative < 9
    assert not diagnosis.stable
    advice = next(advice for advice in diagnosis.advice if "negative importance" in advice)
    assert f"{diagnosis.total.negative} of 9" in advice
    assert "Interpolation()" in advice
    assert "SI(sign='rectified')" in advice


def test_adam_is_diagnosed_at_its_present_rates_with_a_note():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moor = mooring.attach(model, optimizer, importance="ewc", pull=mooring.Penalty(5.0))
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 2, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    moor.consolidate()
    diagnosis = moor.diagnose()
    assert diagnosis.optimizer == "Adam"
    assert diagnosis.limit == pytest.approx(38.0, rel=1e-12)
    assert any("Adam rescales the learning rate per parameter" in note for note in diagnosis.notes)
    assert "note: Adam rescales" in str(diagnosis)
    for layer in diagnosis.layers:
        largest = 0.0
        for name, p in model.get_submodule(layer.name).named_parameters():
            vhat = optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**10)
            rate = 0.01 / (vhat.sqrt() + 1e-8)
            largest = max(largest, float((rate * 5.0 * moor.previous[f"{layer.name}.{name}"]).max()))
        assert layer.largest_p == pytest.approx(largest, rel=1e-12)
        assert layer.safe_strength == pytest.approx(5.0 / largest, rel=1e-12)


def test_an_optimizer_without_known_rates_is_named_in_a_note():
    diagnosis = moored(make=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1)).diagnose()
    assert diagnosis.limit == 2.0
    assert any("limits are those of gradient descent; Adagrad may rescale" in note for note in diagnosis.notes)


def test_note_does_not_claim_limits_of_gradient_descent_for_adam():
    diagnosis = moored(make=lambda model: torch.optim.Adam(model.parameters(), lr=0.1)).diagnose()  # before a step
    assert diagnosis.limit == pytest.approx(38.0, rel=1e-12)
    assert len(diagnosis.notes) == 1  # there is a note
    assert "limits are those of gradient descent" not in diagnosis.notes[0]


def test_empty_parameter_is_ignored():
    model = Net()
    model.first.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=torch.float64)))
    moor = mooring.attach(
        model, sgd(model), importance=FixedScores({**SCORES, "first.empty": []}), pull=mooring.Penalty(2.0)
    )
    moor.consolidate()
    assert moor.diagnose() == moored().diagnose()


def test_diagnose_changes_nothing():
    moor = moored()
    before = {key: tensor.clone() for key, tensor in {**moor.state_dict(), **moor.model.state_dict()}.items()}
    moor.diagnose()
    after = {**moor.state_dict(), **moor.model.state_dict()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


# Errors


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_pull_without_strength_requires_one():
    moor = moored(pull=mooring.Interpolation())
    with pytest.raises(MooringError) as error:
        moor.diagnose()
    assert "Interpolation has no strength" in one_line(error)
    with pytest.raises(MooringError, match="Interpolation has no strength"):
        moor.effective_learning_rate(1)
    assert moor.diagnose(strength=2.0).layers == moored().diagnose().layers


@pytest.mark.parametrize("strength", [None, 2.0])
def test_diagnose_before_the_first_consolidation_is_refused(strength):
    model = Net()
    moor = mooring.attach(model, sgd(model), pull=mooring.Penalty(2.0))
    with pytest.raises(MooringError) as error:
        moor.diagnose(strength)
    assert "consolidate()" in one_line(error)


@pytest.mark.parametrize("strength", [-1.0, math.nan])
def test_invalid_strength_is_refused(strength):
    with pytest.raises(MooringError) as error:
        moored().diagnose(strength=strength)
    assert "strength" in one_line(error)


# The printed table


class LongNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone_with_a_long_name = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone_with_a_long_name(x) * self.scale


def cells(line: str) -> list[re.Match]:
    """Return the cells of a line, which are at least two spaces apart."""
    return list(re.finditer(r"\S+(?: \S+)*", line))


def test_printed_table_has_an_aligned_line_per_layer():
    torch.manual_seed(0)
    model = LongNames()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, pull=mooring.Penalty(1e5))
    model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    moor.consolidate()
    diagnosis = moor.diagnose()
    lines = str(diagnosis).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    titles = cells(lines[head])
    assert [t.group() for t in titles] == [
        "layer",
        "params",
        "mean",
        "max",
        "share",
        "max p",
        "interp.",
        "extrap.",
        "diverge",
        "safe strength",
    ]
    rows = lines[head + 1 : head + 1 + len(diagnosis.layers)]
    names = [layer.name for layer in diagnosis.layers]
    assert sorted(names) == ["(root)", "backbone_with_a_long_name.0", "backbone_with_a_long_name.2"]
    for row, layer in zip(rows, diagnosis.layers, strict=True):
        values = cells(row)
        assert values[0].start() == 0
        assert [v.end() for v in values[1:]] == [t.end() for t in titles[1:]]  # right-aligned under their titles
        numbers = [v.group().replace(",", "") for v in values[1:]]
        assert values[0].group() == layer.name
        assert int(numbers[0]) == layer.parameters
        assert float(numbers[1]) == pytest.approx(layer.mean, rel=5e-3)
        assert float(numbers[2]) == pytest.approx(layer.largest, rel=5e-3)
        assert float(numbers[3].removesuffix("%")) == pytest.approx(100 * layer.share, abs=0.051)
        assert float(numbers[4]) == pytest.approx(layer.largest_p, rel=5e-3)
        counts = layer.verdicts
        assert [int(n) for n in numbers[5:8]] == [counts.interpolate, counts.extrapolate, counts.diverge]
        assert float(numbers[8]) == pytest.approx(layer.safe_strength, rel=5e-3)
    assert all(sum(line.startswith(f"{name} ") for line in lines) == 1 for name in names)
    assert "100000" in lines[0]
    assert "SGD" in lines[0]
    footer = "\n".join(lines[head + 1 + len(rows) :])
    assert f"largest safe strength {diagnosis.safe_strength:.3g}" in footer
    assert [line for line in lines if line.startswith("advice: ")] == [f"advice: {words}" for words in diagnosis.advice]
    assert diagnosis.advice


# As a dictionary


def test_dictionary_has_every_number_and_goes_through_json():
    diagnosis = moored().diagnose()
    back = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert back["layers"][0]["largest_p"] == diagnosis.layers[0].largest_p
    assert back["layers"][1]["verdicts"] == asdict(diagnosis.layers[1].verdicts)
    assert back["total"] == asdict(diagnosis.total)
    assert back["stable"] is False
    assert back["safe_strength"] == diagnosis.safe_strength
    assert back["advice"] == list(diagnosis.advice)


def test_dictionary_has_only_json_types():
    diagnosis = moored(pull=mooring.Penalty(2.0, clamp=True)).diagnose().to_dict()
    assert json.loads(json.dumps(diagnosis)) == diagnosis  # a tuple would come back as a list


@pytest.mark.parametrize("scores", [scaled(0.0, 0.0), scaled(0.0, 1.0)], ids=["nothing held", "first layer free"])
def test_dictionary_is_valid_json_with_infinite_or_undefined_numbers(scores):
    diagnosis = moored(scores).diagnose()
    assert math.isinf(diagnosis.layers[0].safe_strength)
    assert math.isnan(diagnosis.disparity)
    json.dumps(diagnosis.to_dict(), allow_nan=False)


# The advice


def test_advice_for_an_exploding_penalty_names_the_remedies():
    diagnosis = moored().diagnose()
    words = next(advice for advice in diagnosis.advice if "extrapolate" in advice)
    assert "2 of 9 parameters" in words
    assert "(1 diverge)" in words
    assert "'first'" in words
    assert f"below {1 / 1.1:.3g}" in words
    for remedy in ("Penalty(2, clamp=True)", "Proximal(2)", "Interpolation()"):
        assert remedy in words


def test_advice_says_how_much_room_a_stable_penalty_has():
    diagnosis = moored(pull=mooring.Penalty(0.1)).diagnose()
    assert diagnosis.stable
    assert any("could grow 9.09-fold, to 0.909" in advice for advice in diagnosis.advice)
    assert not any("Proximal" in advice for advice in diagnosis.advice)


def test_advice_for_weakly_held_deep_layers_is_to_balance():
    assert any("Balanced(FixedScores" in advice for advice in moored(scaled(10.0, 0.9)).diagnose().advice)
    assert not any("Balanced" in advice for advice in moored(scaled(10.0, 1.1)).diagnose().advice)


def shallow_and_deep(importance):
    """Return the diagnosis of a trained network whose last layer gets a tiny gradient."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.last.weight.fill_(30.0)
    optimizer = sgd(model, lr=1e-6)
    moor = mooring.attach(model, optimizer, importance=importance, pull=mooring.Penalty(1.0))
    model(torch.randn(8, 2, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    moor.consolidate()
    return moor.diagnose()


def test_following_the_advice_to_balance_removes_the_disparity_and_the_advice():
    diagnosis = shallow_and_deep(mooring.EWC())
    assert diagnosis.disparity < 0.1
    assert any("Balanced(EWC(...))" in advice for advice in diagnosis.advice)
    diagnosis = shallow_and_deep(mooring.Balanced(mooring.EWC()))
    assert diagnosis.disparity == pytest.approx(1.0, rel=1e-9)
    assert not any("Balanced" in advice for advice in diagnosis.advice)


def test_advice_without_importance_asks_for_a_trained_task():
    diagnosis = moored(scaled(0.0, 0.0)).diagnose()
    assert diagnosis.safe_strength == math.inf
    assert diagnosis.stable
    assert diagnosis.total.free == 9
    assert any("nothing is held" in advice for advice in diagnosis.advice)
    assert len(diagnosis.advice) == 1


def test_diagnosis_without_parameters_is_empty():
    model = Net()
    moor = mooring.attach(model, sgd(model), pull=mooring.Penalty(1.0))  # no parameter had a gradient
    diagnosis = diagnose_states(moor._states, moor.pull, strength=1.0)
    assert diagnosis.layers == ()
    assert diagnosis.stable
    assert str(diagnosis)


# Following the advice


def second_task(pull, momentum, steps=400):
    """Train a regression, then its opposite under `pull`; return the diagnosis and the largest parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = sgd(model, lr=0.05, momentum=momentum)
    moor = mooring.attach(model, optimizer, importance=mooring.EWC(decay=None), pull=pull)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True).sin()

    def train(target, count):
        for _ in range(count):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()

    train(y, 30)
    moor.consolidate()
    diagnosis = moor.diagnose(getattr(pull, "strength", 1.0))
    try:
        train(-y, steps)
    except NonFiniteError:
        return diagnosis, math.inf
    return diagnosis, max(float(p.detach().abs().max()) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_remedy_in_the_advice_makes_an_exploding_run_stable(momentum):
    diagnosis, size = second_task(mooring.Penalty(1.0), momentum, steps=0)
    assert size < 10
    exploding = 3 * diagnosis.limit * diagnosis.safe_strength
    diagnosis, size = second_task(mooring.Penalty(exploding), momentum)
    assert size > 1e6
    assert not diagnosis.stable
    assert diagnosis.total.diverge > 0
    words = next(advice for advice in diagnosis.advice if "extrapolate" in advice)
    below = float(re.search(r"below (\S+),", words).group(1))
    clamped = float(re.search(r"Penalty\((\S+), clamp=True\)", words).group(1))
    proximal = float(re.search(r"Proximal\((\S+)\)", words).group(1))
    assert "Interpolation()" in words
    assert below == pytest.approx(diagnosis.safe_strength, rel=5e-3)
    assert clamped == proximal == pytest.approx(exploding, rel=1e-5)
    ways = [
        mooring.Penalty(0.9 * below),
        mooring.Penalty(clamped, clamp=True),
        mooring.Proximal(proximal),
        mooring.Interpolation(),
    ]
    for pull in ways:
        diagnosis, size = second_task(pull, momentum)
        assert size < 10, pull
        if isinstance(pull, mooring.Penalty):
            assert diagnosis.stable


def test_kronecker_budget_that_works_is_diagnosed_by_its_diagonal():
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = sgd(model)
    pull = mooring.Budget(0.1)
    moor = mooring.attach(model, optimizer, importance=mooring.rules.Kronecker(), pull=pull)
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    with torch.no_grad():
        gradient = model(x).softmax(1) - nn.functional.one_hot(y, 2)  # of each sample's loss
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    moor.consolidate()
    expected = torch.outer(gradient.square().mean(0), x.square().mean(0))
    (layer,) = moor.diagnose(strength=1.0).layers
    assert layer.largest == pytest.approx(float(expected.max()), rel=1e-5)
    assert layer.mean == pytest.approx(float(expected.mean()), rel=1e-5)
    assert not any("nothing is held" in advice for advice in moor.diagnose(strength=1.0).advice)


def test_diagnosis_prints_and_contains_the_coverage():
    moor = moored()
    assert "coverage: 4 of 4 parameters held (9 of 9 weights)" in str(moor.diagnose()).splitlines()
    assert moor.diagnose().to_dict()["coverage"] == moor.coverage().to_dict()
