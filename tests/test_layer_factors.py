"""Tests of the factors of layers of other kinds, against dense oracles."""

import pytest
import torch
from torch import nn

import mooring
from mooring.importance import Kronecker, kronecker_factors
from mooring.importance.kronecker_factors import batch_factors, layer_rows
from mooring.importance.observed_factors import observe

F64 = torch.float64


def moored(model, data, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return optimizer, mooring.attach(
        model, optimizer, reference=data, importance=Kronecker(**options), pull=mooring.Budget(1e-3)
    )


def conv1d(outputs, inputs):
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(outputs, inputs)


def test_weight_of_gpt2_layers_costs_what_the_same_linear_layer_costs():
    torch.manual_seed(0)
    transposed = conv1d(5, 3).to(F64)
    plain = nn.Linear(3, 5).to(F64)
    with torch.no_grad():
        transposed.weight.normal_()
        plain.weight.copy_(transposed.weight.mT)
        plain.bias.copy_(transposed.bias)
    data = [(torch.randn(6, 4, 3, dtype=F64), torch.randint(5, (6, 4))) for _ in range(3)]
    energies = []
    for layer in (transposed, plain):
        model = nn.Sequential(layer)
        optimizer, moor = moored(model, data)
        assert not moor._states.diagonal_reasons
        for x, y in data:
            optimizer.zero_grad()
            (30 * nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())).backward()
            optimizer.step()
            energies.append(moor.pull_energy())
        moor.consolidate()
        assert moor._states.records[layer.weight].factors.tasks == 2
    assert energies[:3] == pytest.approx(energies[3:], rel=1e-9)
    assert all(0.9e-3 < energy <= 1e-3 for energy in energies)
    torch.testing.assert_close(transposed.weight.mT, plain.weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_factors_of_1x1_convolutions_equal_those_of_unfolded_images(stride, memory_format, monkeypatch):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 1, stride=stride).to(F64)
    a = torch.randn(5, 3, 6, 7, dtype=F64).contiguous(memory_format=memory_format)
    b = torch.randn(layer(a).shape, dtype=F64)
    rows = nn.functional.unfold(a, 1, stride=stride).mT
    monkeypatch.setattr(kronecker_factors, "unfold", None)
    inputs, outputs, _ = batch_factors(layer, a, b)
    places = b.flatten(2).mT
    torch.testing.assert_close(inputs, torch.einsum("nti,ntj->ij", rows, rows) / 5)
    torch.testing.assert_close(outputs, torch.einsum("nti,ntj->ij", places, places) * 5 / places.shape[1])


def test_half_precision_rows_are_multiplied_as_they_are_and_summed_in_float32(monkeypatch):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).to(torch.bfloat16)
    a, b = torch.randn(8, 5, 6).bfloat16(), torch.randn(8, 5, 4).bfloat16()
    expected = observe(layer, a, b)
    seen = []

    def wide(x, y):
        seen.append((x.dtype, y.dtype))
        return x.float() @ y.float()

    monkeypatch.setattr(kronecker_factors, "sums_in_float32", lambda t: t.dtype == torch.bfloat16)
    monkeypatch.setattr(kronecker_factors, "float32_product", wide)
    assert all(rows.dtype == torch.bfloat16 for rows in layer_rows(layer, a, b))
    monkeypatch.setattr("mooring.importance.observed_factors.float32_product", wide)
    observed = observe(layer, a, b)
    assert seen[:2] == [(torch.bfloat16, torch.bfloat16)] * 2
    for name in ("weight", "bias"):
        assert observed[name].inputs.dtype == observed[name].outputs.dtype == torch.float32
        torch.testing.assert_close(observed[name].inputs, expected[name].inputs)
        torch.testing.assert_close(observed[name].outputs, expected[name].outputs)
        torch.testing.assert_close(observed[name].gradient, expected[name].gradient, rtol=0.02, atol=0.02)
