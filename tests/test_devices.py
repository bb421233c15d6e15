"""Promise 2: CPU and GPU give the same parameters, to 1e-9 in float64."""

from itertools import product

import pytest
import torch
from torch import nn

import mooring

IMPORTANCES = {
    "ewc": mooring.EWC,
    "mas": mooring.MAS,
    "si": lambda: mooring.SI(sign=0.3),
    "rwalk": mooring.RWalk,
    "uniform": mooring.Uniform,
    "random": mooring.Random,
    "balanced": lambda: mooring.Balanced("ewc"),
}
PULLS = {
    "interpolation": mooring.Interpolation,
    "penalty": lambda: mooring.Penalty(0.3),
    "clamped": lambda: mooring.Penalty(1e4, clamp=True),
    "proximal": lambda: mooring.Proximal(5.0),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares with a GPU, and there is none here")


def train(device, importance, pull, optimizer_class=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4))
    model = model.to(device, torch.float64)
    optimizer = optimizer_class(model.parameters(), lr=0.05, **options)
    moor = mooring.attach(model, optimizer, importance=IMPORTANCES[importance](), pull=PULLS[pull](), buffers="keep")
    data = torch.Generator().manual_seed(1)
    for step in range(8):
        if step == 4:
            moor.consolidate()
        x = torch.randn(6, 1, 6, 6, generator=data, dtype=torch.float64).to(device)
        y = torch.randint(4, (6,), generator=data).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: tensor.cpu() for name, tensor in (model.state_dict() | moor.state_dict()).items()}


@needs_gpu
@pytest.mark.parametrize(("importance", "pull"), list(product(IMPORTANCES, PULLS)))
def test_gpu_equals_cpu(importance, pull):
    torch.testing.assert_close(train("cuda", importance, pull), train("cpu", importance, pull), rtol=1e-9, atol=1e-9)


@needs_gpu
@pytest.mark.parametrize("importance", IMPORTANCES)
def test_a_fused_optimizer_equals_the_plain_one(importance):
    plain = train("cuda", importance, "proximal", torch.optim.Adam)
    fused = train("cuda", importance, "proximal", torch.optim.Adam, fused=True)
    torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-9)


@needs_gpu
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_on_the_gpu_hands_importance_the_true_gradient(fused):
    scores = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=enabled)
        moor = mooring.attach(model, optimizer)
        scaler.scale(model(torch.ones(4, 3).cuda()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scores.append(moor.current["weight"].clone())
    torch.testing.assert_close(scores[1], scores[0])


@needs_gpu
def test_sampled_labels_train_on_the_gpu():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=mooring.EWC(labels="sampled"))
    random_state = torch.cuda.get_rng_state()
    nn.functional.cross_entropy(model(torch.ones(4, 3).cuda()), torch.zeros(4, dtype=torch.long).cuda()).backward()
    optimizer.step()
    assert bool(moor.current["weight"].any())
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
