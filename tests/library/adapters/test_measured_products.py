"""Tests of low-rank adapters with a budget that is measured."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

import mooring
from library.adapters.low_rank_nets import adapted_net, trainable
from mooring.rules import Kronecker

SIZE, CLASSES, NATS = 4, 3, 0.02


def task(seed, count=12):
    """Return batches whose labels a linear rule of this seed gives."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(SIZE, CLASSES, generator=generator)
    inputs = [torch.randn(16, SIZE, generator=generator) for _ in range(count)]
    return [(x, (x @ rule).argmax(1)) for x in inputs]


def by_hand():
    return adapted_net(base=nn.Linear)


def by_peft():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(SIZE, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return get_peft_model(net, LoraConfig(r=2, target_modules=["0", "2"]))


def train(model, optimizer, batches, epochs=3):
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


@torch.no_grad()
def divergence(model, original, batches):
    x = torch.cat([inputs for inputs, _ in batches])
    return float(
        kl_div(
            model.eval()(x).log_softmax(1), original.eval()(x).log_softmax(1), reduction="batchmean", log_target=True
        )
    )


@pytest.mark.filterwarnings("ignore:training moves parameters that nothing holds")  # A, if held by itself
@pytest.mark.parametrize("make", [by_hand, by_peft])
@pytest.mark.parametrize("options", [{}, {"importance": Kronecker()}, {"adapters": "parameters"}])
def test_budget_is_kept_on_the_gauge_while_adapters_train(make, options):
    model = make()
    original, plain = copy.deepcopy(model), copy.deepcopy(model)
    train(plain, torch.optim.Adam(trainable(plain), lr=0.05), task(2))
    gauge = task(1)[::3]
    assert divergence(plain, original, gauge) > 2 * NATS
    optimizer = torch.optim.Adam(trainable(model), lr=0.05)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(NATS), reference=task(1), **options)
    assert {entry.how for entry in moor.coverage().held} == {"scores" if "adapters" in options else "product"}
    train(model, optimizer, task(2))
    kept = moor.finish()
    assert kept.nats == pytest.approx(divergence(model, original, gauge), rel=1e-4)
    assert 0 < kept.nats <= NATS  # a ceiling: plain training would exceed it, and nothing is spent without need


def test_default_budget_of_adapters_is_measured():
    model = by_hand()
    moor = mooring.attach(model, torch.optim.Adam(trainable(model), lr=0.05), reference=task(1))
    assert "forgetting=measured" in repr(moor)
    assert moor.measured().nats == 0


def test_second_task_of_an_adapter_is_kept_with_respect_to_its_start():
    model = by_hand()
    optimizer = torch.optim.Adam(trainable(model), lr=0.05)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(NATS), reference=task(1))
    train(model, optimizer, task(2))
    moor.consolidate(data=task(2))
    original = copy.deepcopy(model)
    train(model, optimizer, task(3))
    kept = moor.finish().nats
    values = [divergence(model, original, gauge) for gauge in (task(1)[::3], task(2)[::3])]
    assert kept == pytest.approx(sum(values) / 2, rel=1e-4)
    assert kept <= NATS


def test_killed_and_resumed_equals_never_interrupted():
    results = []
    for interrupted in (False, True):
        model = by_hand()
        optimizer = torch.optim.Adam(trainable(model), lr=0.05)
        moor = mooring.attach(model, optimizer, pull=mooring.Budget(NATS), reference=task(1))
        train(model, optimizer, task(2, count=10), epochs=1)
        if interrupted:
            saved = copy.deepcopy([moor.state_dict(), model.state_dict(), optimizer.state_dict()])
            model = by_hand()
            model.load_state_dict(saved[1])
            optimizer = torch.optim.Adam(trainable(model), lr=0.05)
            optimizer.load_state_dict(saved[2])
            moor = mooring.attach(model, optimizer)
            moor.load_state_dict(saved[0])
        train(model, optimizer, task(3, count=20), epochs=1)
        moor.finish()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))
