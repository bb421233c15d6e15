"""Tests that CPU and GPU give the same parameters, to 1e-9 in float64."""

import gc
from itertools import product

import pytest
import torch
from torch import nn

import mooring
from mooring.curvature.eigenbases import eigenbases, eigenbasis

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
needs_gpu = pytest.mark.gpu


def train(device, importance, pull, optimizer_class=torch.optim.SGD, **options):
    torch.manual_seed(0)
    # Without a bias before the batch norm: its gradient is rounding, whose sign decides whether SI warns of it.
    convolution = nn.Conv2d(1, 3, 3, bias=False)
    model = nn.Sequential(convolution, nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4))
    model = model.to(device, torch.float64)
    optimizer = optimizer_class(model.parameters(), lr=0.05, **options)
    moor = mooring.attach(model, optimizer, importance=IMPORTANCES[importance](), pull=PULLS[pull](), buffers="frozen")
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
def test_fused_optimizer_equals_the_unfused_one(importance):
    plain = train("cuda", importance, "proximal", torch.optim.Adam)
    fused = train("cuda", importance, "proximal", torch.optim.Adam, fused=True)
    torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-9)


@needs_gpu
@pytest.mark.parametrize("fused", [False, True])
def test_importance_gets_unscaled_gradients_under_grad_scaler(fused):
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


HOST = mooring.Memory(host=True, staging=1 << 20)


def pulled(memory, pull, side=512, layers=6, steps=6, fused=True):
    """Train two tasks of a few wide layers; return the parameters and the peak memory of a step of the second."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(side, side) for _ in range(layers))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    moor = mooring.attach(model, optimizer, importance=mooring.EWC(decay=None), pull=pull, memory=memory)
    for step in range(steps):
        if step == 2:
            moor.consolidate()
        optimizer.zero_grad()
        model(torch.randn(4, side, device="cuda")).square().mean().backward()
        if step == steps - 1:
            torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, torch.cuda.max_memory_allocated(), moor


@needs_gpu
@pytest.mark.parametrize("pull", [*(make() for make in PULLS.values()), mooring.Budget(1e-3)], ids=repr)
def test_offloaded_anchors_equal_anchors_on_the_gpu(pull):
    (near, _, _), (host, _, moor) = pulled(None, pull), pulled(HOST, pull)
    exact = not isinstance(pull, mooring.Budget)  # sums in another order
    torch.testing.assert_close(host, near, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)
    assert all(m.anchor.is_pinned() and m.anchor.device.type == "cpu" for m in moor._states.records.values())
    assert sum(room.bytes.numel() for room in moor._states.offload.slots.values()) <= 2 * 4 * 512 * 512


@needs_gpu
def test_offloaded_anchors_free_their_bytes_on_the_gpu():
    anchors = 4 * 24 * (512 * 512 + 512)
    peaks = {}
    for name, memory in (("near", None), ("host", HOST)):
        gc.collect()
        begin = torch.cuda.memory_allocated()
        peaks[name] = pulled(memory, mooring.Proximal(5.0), layers=24)[1] - begin
    assert peaks["near"] - peaks["host"] >= 0.85 * anchors  # two slots of one layer each stay


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_offloading_does_not_synchronise():
    """torch raises an error if a step synchronises."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    memory = mooring.Memory(host=True, staging=1 << 19)
    moor = mooring.attach(model, optimizer, pull=mooring.Proximal(5.0), memory=memory, check_finite=False)
    for step in range(5):
        if step == 1:
            moor.consolidate()
        optimizer.zero_grad()
        model(torch.ones(4, 256, device="cuda")).square().mean().backward()
        try:
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("pull", PULLS)
def test_state_with_less_memory_on_gpu_equals_cpu(pull):
    """8-bit importances and offloaded anchors in float64, so that the codes agree."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 4)).to(device, torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        memory = mooring.Memory(previous="8bit", host=True, staging=4096)
        moor = mooring.attach(model, optimizer, pull=PULLS[pull](), memory=memory)
        data = torch.Generator().manual_seed(1)
        for step in range(6):
            if step in (2, 4):
                moor.consolidate()
            optimizer.zero_grad()
            x = torch.randn(6, 48, generator=data, dtype=torch.float64).to(device)
            nn.functional.cross_entropy(model(x), torch.randint(4, (6,), generator=data).to(device)).backward()
            optimizer.step()
        results.append({name: t.cpu() for name, t in (model.state_dict() | moor.state_dict()).items()})
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@needs_gpu
def test_matrices_that_are_decomposed_at_once_have_the_same_bits_as_alone():
    torch.manual_seed(0)
    roots = [torch.randn(size, size, device="cuda") for size in (3, 40, 40, 300, 300, 300, 600)]
    matrices = [root @ root.mT for root in roots]
    for (values, vectors), matrix in zip(eigenbases(matrices), matrices, strict=True):
        alone = eigenbasis(matrix)
        assert torch.equal(values, alone[0])
        assert torch.equal(vectors, alone[1])
