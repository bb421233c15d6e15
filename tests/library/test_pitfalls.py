"""Tests that would have caught known mistakes of other implementations."""

import copy

import pytest
import torch
from torch import nn

import mooring

F64 = torch.float64
EVERY = ["ewc", "mas", "si", "rwalk", mooring.EWC(labels="sampled"), mooring.Balanced("mas")]


def convnet():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)).to(F64)


def train(model, optimizer, steps=4, seed=0):
    data = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(6, 1, 6, 6, generator=data, dtype=F64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.randint(2, (6,), generator=data)).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
def test_si_is_not_zero_through_aliased_parameters():
    """Saved parameters that alias the live ones make every step, and so every score, exactly zero."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="si")
    train(model, optimizer)
    assert all(float(score.max()) > 0 for name, score in moor.current.items() if name != "0.bias")
    moor.consolidate()
    anchor = moor.anchor["4.weight"]
    assert anchor.data_ptr() != model[4].weight.data_ptr()
    before = anchor.clone()
    train(model, optimizer, seed=1)
    assert torch.equal(anchor, before)


@pytest.mark.parametrize("importance", EVERY, ids=str)
def test_model_stays_in_training_mode(importance):
    model = convnet()
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=importance)
    modes = [m.training for m in model.modules()]
    train(model, optimizer)
    moor.consolidate()
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("importance", EVERY, ids=str)
def test_importance_does_not_change_batch_norm_statistics(importance):
    plain, moored = convnet(), None
    moored = copy.deepcopy(plain)
    for model in (plain, moored):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if model is moored:
            moor = mooring.attach(model, optimizer, importance=importance)
        train(model, optimizer)
    moor.consolidate()
    for a, b in zip(plain.buffers(), moored.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
@pytest.mark.parametrize("importance", EVERY, ids=str)
def test_penalty_has_an_effect(importance):
    """With the penalty, parameters end closer to their anchors than without."""
    distances = []
    for strength in (0.0, 0.5):
        torch.manual_seed(0)
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        moor = mooring.attach(model, optimizer, importance=importance, pull=mooring.Penalty(strength, clamp=True))
        train(model, optimizer)
        moor.consolidate()
        train(model, optimizer, steps=20, seed=1)
        distances.append(sum(float((p.detach() - moor.anchor[n]).square().sum()) for n, p in model.named_parameters()))
        assert moor.pull_energy() > 0
    assert distances[1] < 0.999 * distances[0]


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
@pytest.mark.parametrize("importance", EVERY, ids=str)
def test_resumed_state_has_importance_and_anchors(importance):
    """A resumed run must not lose its importance, nor anchor itself to untrained weights."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=importance)
    train(model, optimizer)
    moor.consolidate()
    train(model, optimizer, steps=2, seed=1)
    torch.manual_seed(9)
    resumed = convnet()
    resumed_optimizer = torch.optim.SGD(resumed.parameters(), lr=0.1)
    resumed_moor = mooring.attach(resumed, resumed_optimizer, importance=importance)
    resumed.load_state_dict(model.state_dict())
    resumed_moor.load_state_dict(moor.state_dict())
    assert any(bool(s.any()) for s in resumed_moor.previous.values())
    for name, anchor in moor.anchor.items():
        assert torch.equal(resumed_moor.anchor[name], anchor)
        assert torch.equal(resumed_moor.previous[name], moor.previous[name])
    train(model, optimizer, seed=2)
    train(resumed, resumed_optimizer, seed=2)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_loaded_after_attach_are_the_anchors():
    model, trained = convnet(), convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="si")
    model.load_state_dict(trained.state_dict())
    train(model, optimizer, steps=1)
    assert torch.equal(moor.anchor["4.weight"], trained[4].weight)


def test_path_integral_is_positive_for_a_decreasing_loss():
    """On a quadratic with small steps the path sums to the decrease of the loss, and is positive."""
    theta = nn.Linear(4, 1, bias=False).to(F64)
    optimizer = torch.optim.SGD(theta.parameters(), lr=1e-3)
    moor = mooring.attach(theta, optimizer, importance="si")
    losses = []
    for _ in range(500):
        optimizer.zero_grad()
        loss = theta.weight.square().sum() / 2
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    losses.append(theta.weight.square().sum().item() / 2)
    path = moor.state_dict()["path.weight"]
    assert bool((path > 0).all())
    assert float(path.sum()) == pytest.approx(losses[0] - losses[-1], rel=1e-2)


def test_mas_does_not_include_the_losss_gradient():
    """Neither the loss's gradient nor an earlier one in .grad is part of MAS."""
    for leave in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 2, bias=False).to(F64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        moor = mooring.attach(model, optimizer, importance=mooring.MAS(decay=0.0))
        for x in (torch.ones(3, 2, dtype=F64), torch.eye(2, dtype=F64)):
            if not leave:
                optimizer.zero_grad()
            model(x).sum().mul(1e6).backward()
            optimizer.step()
        expected = (2 * model.weight @ x.T @ x).abs()
        torch.testing.assert_close(moor.current["weight"], expected.detach())


def test_squares_are_taken_after_the_batch_mean():
    """Observed EWC squares the batch mean, which differs from per-sample squares by a factor of the batch size."""
    weight = nn.Linear(1, 1, bias=False).to(F64)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    moor = mooring.attach(weight, optimizer, importance=mooring.EWC(decay=0.0))
    weight(torch.tensor([[1.0], [3.0]], dtype=F64)).mean().backward()
    optimizer.step()
    assert moor.current["weight"].item() == ((1 + 3) / 2) ** 2 != (1**2 + 3**2) / 2
    assert "after the mean" in mooring.rules.ewc.fisher_observed.__doc__


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
def test_penalty_has_a_factor_one_half():
    """strength * previous * d is the gradient of strength / 2 * previous * d^2."""
    weight = nn.Linear(1, 1, bias=False).to(F64)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    moor = mooring.attach(weight, optimizer, importance="uniform", pull=mooring.Penalty(3.0))
    moor.consolidate()
    with torch.no_grad():
        weight.weight.add_(2.0)
    start = weight.weight.item()
    assert moor.pull_energy() == pytest.approx(2.0**2 / 2)
    weight.weight.grad = torch.zeros(1, 1, dtype=F64)
    optimizer.step()
    assert weight.weight.item() == pytest.approx(start - 0.1 * 3.0 * 2.0)


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
def test_parameters_without_any_importance_stay_free():
    """R = 1 at 0/0 would freeze parameters that never mattered."""
    model = nn.Linear(2, 1, bias=False).to(F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer)
    dead = torch.tensor([[1.0, 0.0]], dtype=F64)
    for _ in range(3):
        optimizer.zero_grad()
        model(dead).sum().backward()
        optimizer.step()
    moor.consolidate()
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    model(dead).sum().backward()
    with torch.no_grad():
        model.weight[0, 1] += 5.0
    optimizer.step()
    assert moor.previous["weight"][0, 1] == 0
    assert model.weight[0, 1].item() == before[0, 1].item() + 5.0


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_importance_gets_unscaled_gradients_of_fused_optimizers(optimizer_class):
    """GradScaler leaves gradients scaled for a fused optimizer; the importance must get the unscaled ones."""
    scores = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = optimizer_class(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=fused)
        moor = mooring.attach(model, optimizer)
        scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scores.append(moor.current["weight"].clone())
    torch.testing.assert_close(scores[1], scores[0])
