"""Tests of the history of a measured budget."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mooring
from mooring.hold.measure import MAX_POINTS, MeasuredHistory, MeasuredPoint
from mooring.reference.pass_cost import MEASURING_INTERVAL


def batches(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(16, 4, generator=generator) for _ in range(count)]
    return [(x, (x * seed).sin().argmax(1)) for x in inputs]


def moored():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"reference": batches(1, 6), "memory": mooring.Memory(), "progress": False}
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.05), **options)
    return model, optimizer, moor


def train(model, optimizer, data, moor=None):
    """Train, and return what is measured after each step that measures."""
    logged = []
    for number, (x, y) in enumerate(data, 1):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if moor is not None and number % MEASURING_INTERVAL == 0:
            logged.append((moor.tasks, number, moor.running_forgetting))
    return logged


def test_history_has_what_was_measured_after_each_step_that_measures():
    model, optimizer, moor = moored()
    assert moor.measured_history == ()
    first = train(model, optimizer, batches(2, 30), moor)
    moor.consolidate()
    second = train(model, optimizer, batches(3, 15), moor)
    assert [point[:3] for point in moor.measured_history] == first + second
    assert len(first) == 4
    assert {(point.task, point.named) for point in moor.measured_history} == {(1, 0.05), (2, 0.05)}


def test_history_is_saved_and_goes_on():
    model, optimizer, moor = moored()
    train(model, optimizer, batches(2, 20))
    saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, moor)]
    others = moored()
    for part, state in zip(others, saved, strict=True):
        part.load_state_dict(state)
    for trained in ((model, optimizer), others[:2]):
        train(*trained, batches(3, 20))
    assert others[2].measured_history == moor.measured_history
    assert len(moor.measured_history) == 5


def test_long_history_keeps_its_ends_and_loses_half_of_its_first_half():
    history = MeasuredHistory()
    points = [MeasuredPoint(1, step, 0.01, 0.1) for step in range(MAX_POINTS + 1)]
    for point in points:
        history.add(point)
    half = (MAX_POINTS + 1) // 2
    assert list(history) == points[:half:2] + points[half:]
