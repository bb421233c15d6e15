"""Tests of factors that are computed from a part of the places of a sample."""

import pytest
import torch
from torch import nn

import mooring
from mooring.curvature import observed_factors
from mooring.curvature.kronecker_factors import layer_rows
from mooring.curvature.observed_factors import observe, sample_rows
from mooring.errors import MooringError
from mooring.rules import Kronecker

F64 = torch.float64
LAYERS = {
    "plain": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "strided": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "1 x 1": lambda: nn.Conv2d(4, 6, 1, stride=2),
    "linear": lambda: nn.Linear(4, 6),
}


def called(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().to(F64)
    x = torch.randn(5, 30, 4, dtype=F64) if name == "linear" else torch.randn(5, 4, 13, 12, dtype=F64)
    return layer, x, torch.randn_like(layer(x))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("places", [1, 7, 16])
def test_sampled_rows_are_some_of_all_rows_and_belong_together(name, places):
    layer, x, b = called(name)
    sampled_a, sampled_b, share = sample_rows(layer, x, b, places)
    a, b = layer_rows(layer, x, b)
    assert 1 <= sampled_a.shape[1] <= places
    assert share == a.shape[1] / sampled_a.shape[1]
    every, chosen = (torch.cat(pair, -1) for pair in ((a, b), (sampled_a, sampled_b)))
    distances = (chosen[0].unsqueeze(1) - every[0]).abs().amax(-1)
    assert float(distances.amin(1).max()) == 0
    assert len(distances.argmin(1).unique()) == len(distances)


@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_that_of_all_places(name):
    layer, x, b = called(name)
    whole, sampled = (observe(layer, x, b, places=places) for places in (None, 9))
    for parameter in ("weight", "bias"):
        torch.testing.assert_close(sampled[parameter].gradient, whole[parameter].gradient)
        assert sampled[parameter].outputs.shape == whole[parameter].outputs.shape
    torch.testing.assert_close(sampled["bias"].outputs, whole["bias"].outputs, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_large_batches_are_observed_in_parts(name, monkeypatch):
    layer, x, b = called(name)
    whole = observe(layer, x, b)["weight"]
    monkeypatch.setattr(observed_factors, "MAX_WINDOWS", 8000)
    parts = observe(layer, x, b)["weight"]
    assert parts.samples == whole.samples == 5
    for slot in ("inputs", "outputs", "gradient"):
        torch.testing.assert_close(getattr(parts, slot), getattr(whole, slot))
    assert float(parts.noise) == pytest.approx(float(whole.noise), rel=0.1)


def test_factors_of_a_constant_image_need_one_place():
    layer = nn.Conv2d(2, 3, 3).to(F64)
    x, b = torch.ones(4, 2, 9, 9, dtype=F64), torch.ones(4, 3, 7, 7, dtype=F64)
    whole, sampled = (observe(layer, x, b, places=places)["weight"] for places in (None, 1))
    torch.testing.assert_close(sampled.inputs, whole.inputs)
    torch.testing.assert_close(sampled.outputs, whole.outputs)


def test_moored_model_samples_places_and_keeps_its_factors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    data = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pull = mooring.Budget(1e-3, distil=False)
    moor = mooring.attach(model, optimizer, importance=Kronecker(places=9), pull=pull, reference=data)
    assert all(state.factors for state in moor._states.records.values())
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert moor.pull_energy() <= 1e-3


def test_number_of_places_is_checked():
    with pytest.raises(MooringError, match="places"):
        Kronecker(places=0)
