"""Tests of calibration, which scales a task's curvature so that its budget is in nats."""

import json
from copy import deepcopy

import pytest
import torch
from torch import nn

import mooring
from mooring.errors import MooringError, NonFiniteError, UnheldWarning
from mooring.rules import Importance, Kronecker
from mooring.testing import check_equal
from stateful_net import StatefulNet, model_unchanged

F64 = torch.float64
CURVATURE = torch.tensor([[0.5, 3.0, 40.0], [1.0, 0.0, 7.0]], dtype=F64)


class FixedCurvature(Importance):
    """A fixed curvature, scaled."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, state, it):
        state["current"].copy_((self.scale * CURVATURE).flatten()[: it.g.numel()].view_as(it.g))


def quadratic(importance, nats=0.02, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).to(F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, importance=importance, pull=mooring.Budget(nats, measured=False, **options))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    at = model.weight.detach().clone()
    return moor, lambda model, slope: (
        (CURVATURE * (model.weight - at).square()) / 2 + slope * (model.weight - at)
    ).sum()


@pytest.mark.parametrize("slopes", [[0.0], [0.01, -0.03, 0.02]])
@pytest.mark.parametrize("scale", [1.0, 2.0, 0.1])
def test_calibration_corrects_the_scale_of_a_known_curvature(scale, slopes):
    moor, loss = quadratic(FixedCurvature(scale))
    moor.consolidate(data=slopes, loss=loss)
    assert moor.calibration == [pytest.approx(1 / scale, rel=0.02)]
    torch.testing.assert_close(moor.previous["weight"], CURVATURE, rtol=0.02, atol=0)


def test_task_without_data_takes_the_factor_of_the_task_before():
    moor, loss = quadratic(FixedCurvature(2.0))
    moor.consolidate(data=[0.0], loss=loss)
    moor.optimizer.step()
    moor.consolidate()
    assert moor.calibration == [moor.calibration[0]] * 2 == pytest.approx([0.5, 0.5], rel=1e-2)
    torch.testing.assert_close(moor.previous["weight"], 2 * CURVATURE, rtol=1e-2, atol=0)


def test_exact_kronecker_factors_have_calibration_1():
    """With a squared error and one sample whose output gradient is 1 or -1, the Hessian is x x'."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).to(F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, importance=Kronecker(), pull=mooring.Budget(0.02, measured=False))
    x, y = torch.randn(1, 3, dtype=F64), []
    for sign in (1, -1):
        y.append(model(x).detach() + sign)
        optimizer.zero_grad()
        ((model(x) - y[-1]).square().sum() / 2).backward()
        optimizer.step()
    moor.consolidate(data=y, loss=lambda model, y: (model(x) - y).square().sum() / 2)
    assert moor.calibration == [pytest.approx(1.0, rel=0.02)]


def test_calibration_is_measured_at_the_next_tasks_budget():
    moor, loss = quadratic(FixedCurvature(1.0), nats=0.02, growth=2.0)

    def steep(model, slope):  # r + 10 r^2, of a quadratic r
        r = loss(model, slope)
        return r + 10 * r.square()

    moor.consolidate(data=[0.0], loss=steep)
    moor.model.weight.grad = torch.ones_like(moor.model.weight)
    moor.optimizer.step()
    moor.consolidate(data=[0.0], loss=steep)
    # r + 10 r^2 = nats has r = (sqrt(1 + 40 nats) - 1) / 20
    expected = [nats * 20 / ((1 + 40 * nats) ** 0.5 - 1) for nats in (0.02, 0.04)]
    assert moor.calibration == pytest.approx(expected, rel=0.02)


# In a training loop

IMPORTANCES = {
    "diagonal": lambda: None,
    "sampled": lambda: mooring.EWC(decay=None, labels="sampled"),
    "balanced": lambda: mooring.Balanced(mooring.EWC(decay=None, per_sample=True)),
    "kronecker": Kronecker,
}


def batches(seed, count=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, 1, 6, 6, generator=generator)
    return [(inputs, (inputs.mean((1, 2, 3)) > 0).long() + seed % 2) for inputs in x]


def moored(name, nats=0.05, **options):
    torch.manual_seed(1)
    model = StatefulNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pull = mooring.Budget(nats, measured=False, **options)
    return model, optimizer, mooring.attach(model, optimizer, importance=IMPORTANCES[name](), pull=pull)


def train(model, optimizer, seed, times=5):
    for x, y in batches(seed) * times:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
@pytest.mark.parametrize("name", IMPORTANCES)
def test_calibration_does_not_change_the_model(name):
    model, optimizer, moor = moored(name)
    train(model, optimizer, 0)
    model.drop.eval()
    data = torch.utils.data.DataLoader([(x[0], y[0]) for x, y in batches(10, 30)], batch_size=8, shuffle=True)
    with model_unchanged(model):
        moor.consolidate(data=data)


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
@pytest.mark.parametrize("name", IMPORTANCES)
def test_calibration_scales_the_task_and_does_not_affect_the_next_estimate(name):
    (_, _, plain), (_, _, measured) = both = [moored(name) for _ in range(2)]
    for model, optimizer, _ in both:
        torch.manual_seed(5)
        train(model, optimizer, 0)
    plain.consolidate()
    measured.consolidate(data=batches(10))
    (factor,) = measured.calibration
    assert factor != 1.0
    for moor in (plain, measured):
        with torch.no_grad():
            for p in moor.model.parameters():
                p.add_(0.01)
    assert measured.pull_energy() == pytest.approx(factor * plain.pull_energy(), rel=1e-4)
    for model, optimizer, _ in both:
        x, y = batches(1)[0]
        optimizer.zero_grad()
        model.eval()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    counts = [
        {m.name: m.factors.count for m in moor._states.records.values() if m.factors} for moor in (plain, measured)
    ]
    assert counts[0] == counts[1]  # the calibration's evaluations were not counted
    check_equal("current", measured.current, plain.current)


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")  # at a bound with the dropout masks of torch 2.6
@pytest.mark.parametrize("options", [{}, {"per": "layer"}])
@pytest.mark.parametrize("name", IMPORTANCES)
def test_saved_state_contains_the_calibration(name, options):
    model, optimizer, moor = moored(name, **options)
    train(model, optimizer, 0)
    moor.consolidate(data=batches(10))
    train(model, optimizer, 1, 1)
    resumed, resumed_optimizer, resumed_moor = moored(name, **options)
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    resumed_moor.load_state_dict(deepcopy(moor.state_dict()))
    assert resumed_moor.calibration == moor.calibration
    for net, opt, kept in ((model, optimizer, moor), (resumed, resumed_optimizer, resumed_moor)):
        torch.manual_seed(5)
        train(net, opt, 1, 2)
        kept.consolidate(data=batches(11))
    assert resumed_moor.calibration == moor.calibration
    assert len(resumed_moor.calibration) == 2
    check_equal("state", resumed_moor.state_dict(), moor.state_dict())


def test_state_without_calibration_loads_with_factor_1():
    model, optimizer, moor = moored("diagonal")
    train(model, optimizer, 0, 1)
    moor.consolidate()
    state = deepcopy(moor.state_dict())
    header = json.loads(bytes(state["mooring"].tolist()))
    del header["calibration"]
    state["mooring"] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    moor.load_state_dict(state)
    assert moor.calibration == [1.0]


def unsure(model, batch):
    return model(batch[0]).sum() * torch.nan


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        ({"data": []}, MooringError, "data has no batches"),
        ({"data": 3}, MooringError, "data of type int is not"),
        ({"data": torch.zeros(3)}, MooringError, "data of type Tensor is not"),
        ({"data": ["text"]}, MooringError, "a batch of type str is not"),
        ({"data": batches(1), "loss": unsure}, NonFiniteError, "the loss on data is not finite"),
        ({"data": batches(1), "loss": lambda model, batch: model(batch[0])}, MooringError, "returned shape"),
        ({"data": batches(1), "loss": lambda model, batch: 1.0}, MooringError, "returned type float"),
        ({"data": batches(1), "loss": lambda model, batch: torch.ones(())}, MooringError, "no moored parameter"),
        ({"loss": unsure}, MooringError, "loss and batches have no effect without data"),
    ],
)
def test_bad_data_and_losses_are_refused_in_one_line_and_change_nothing(arguments, error, line):
    model, optimizer, moor = moored("diagonal")
    train(model, optimizer, 0, 1)
    before = {k: v.clone() for k, v in (*moor.state_dict().items(), *model.state_dict().items())}
    with pytest.raises(error, match=line) as error:
        moor.consolidate(**arguments)
    assert "\n" not in str(error.value)
    check_equal("untouched", {**moor.state_dict(), **model.state_dict()}, before)
    assert moor.tasks == 0


def test_data_without_a_budget_is_refused():
    model = StatefulNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mooring.attach(model, optimizer, importance="ewc") as moor:
        train(model, optimizer, 0, 1)
        with pytest.raises(MooringError, match="Interpolation has no budget"):
            moor.consolidate(data=batches(0))


def test_calibration_at_a_bound_warns_and_takes_the_safer_factor():
    """A loss that is infinitely steep, and one that does not depend on where the parameters are."""
    for steep, factor, line in ((1e12, 1e6, "rises by more than"), (1e-12, 1.0, "does not rise by")):
        moor, loss = quadratic(FixedCurvature(1.0))
        with pytest.warns(UnheldWarning, match=rf"could not be calibrated: the loss on the data {line}") as caught:
            moor.consolidate(data=[0.0], loss=lambda model, slope, by=steep, loss=loss: by * loss(model, slope))
        assert len(caught) == 1
        assert "\n" not in str(caught[0].message)
        assert moor.calibration == [factor]


def test_calibration_of_a_direction_that_nothing_holds_warns():
    """Importance 0 where the loss rises: no factor keeps the budget."""
    moor, loss = quadratic(FixedCurvature(0.0))
    with pytest.warns(UnheldWarning, match="could not be calibrated"):
        moor.consolidate(data=[1.0, -1.0], loss=lambda model, slope: 1e3 * loss(model, slope))
    assert moor.calibration == [1e6]


@pytest.mark.parametrize("importance", [mooring.EWC(decay=None, per_sample=True), Kronecker()])
@pytest.mark.parametrize("tasks", [0, 1])
def test_calibration_that_fails_after_its_estimate_changes_nothing(importance, tasks):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=importance, pull=mooring.Budget(0.1, measured=False))
    data = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(2)]
    if tasks:
        moor.consolidate(data=data)
    before = {key: tensor.clone() for key, tensor in moor.state_dict().items()}
    calls = []

    def loss(model, batch):
        calls.append(batch)
        if len(calls) > 2:
            raise RuntimeError("out of luck")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(RuntimeError, match="out of luck"):
        moor.consolidate(data=data, loss=loss)
    check_equal("state", moor.state_dict(), before)
    moor.consolidate(data=data)
    assert moor.tasks == tasks + 1
