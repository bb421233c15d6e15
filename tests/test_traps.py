"""The traps that other implementations fell into, each with a test that would have caught it."""

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
def test_no_run_is_left_in_eval_mode(importance):
    model = convnet()
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=importance)
    modes = [m.training for m in model.modules()]
    train(model, optimizer)
    moor.consolidate()
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("importance", EVERY, ids=str)
def test_batch_norm_statistics_are_those_of_training_alone(importance):
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


@pytest.mark.parametrize("importance", EVERY, ids=str)
def test_a_penalty_is_not_identically_zero(importance):
    """It holds: with it, parameters end nearer to their anchors than without."""
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


@pytest.mark.parametrize("importance", EVERY, ids=str)
def test_resume_keeps_importance_and_anchors(importance):
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


def test_loading_weights_after_attaching_does_not_anchor_untrained_ones():
    model, trained = convnet(), convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="si")
    model.load_state_dict(trained.state_dict())
    train(model, optimizer, steps=1)
    assert torch.equal(moor.anchor["4.weight"], trained[4].weight)


def test_the_path_integral_has_the_sign_of_a_falling_loss():
    """On a quadratic with small steps the path adds up to the loss that was saved, and is positive."""
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


def test_mas_is_not_measured_on_the_sum_of_two_gradients():
    """Neither the loss's gradient nor an earlier step's leaks into MAS, whatever is left in .grad."""
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
    """Observed EWC squares the batch mean (a factor of the batch size away from per-sample squares), and says so."""
    weight = nn.Linear(1, 1, bias=False).to(F64)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    moor = mooring.attach(weight, optimizer, importance=mooring.EWC(decay=0.0))
    weight(torch.tensor([[1.0], [3.0]], dtype=F64)).mean().backward()
    optimizer.step()
    assert moor.current["weight"].item() == ((1 + 3) / 2) ** 2 != (1**2 + 3**2) / 2
    assert "after the mean" in mooring.importance.ewc.fisher_observed.__doc__


def test_the_penalty_has_its_half():
    """strength * previous * d is the gradient of strength / 2 * previous * d^2: no 2 is lost or gained."""
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


def test_dead_units_stay_free_at_zero_over_zero():
    """R = 1 at 0/0 would freeze a unit that never mattered to anything."""
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
def test_a_fused_kernels_unscaling_does_not_reach_the_importance(optimizer_class):
    """GradScaler leaves gradients scaled for a fused optimizer; the importance must see the true ones."""
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
