"""Tests of the factors of layers of other kinds, against dense oracles."""

import pytest
import torch
from torch import nn

import mooring
from mooring.curvature import kronecker_factors, observed_factors
from mooring.curvature.kronecker_factors import batch_factors, layer_rows
from mooring.curvature.observed_factors import observe
from mooring.rules import Kronecker

F64 = torch.float64


def moored(model, data, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return optimizer, mooring.attach(
        model,
        optimizer,
        reference=data,
        importance=Kronecker(**options),
        pull=mooring.Budget(1e-3, distil=False),
        memory=mooring.Memory(),
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
    monkeypatch.setattr("mooring.curvature.observed_factors.float32_product", wide)
    observed = observe(layer, a, b)
    assert seen[:2] == [(torch.bfloat16, torch.bfloat16)] * 2
    for name in ("weight", "bias"):
        assert observed[name].inputs.dtype == observed[name].outputs.dtype == torch.float32
        torch.testing.assert_close(observed[name].inputs, expected[name].inputs)
        torch.testing.assert_close(observed[name].outputs, expected[name].outputs)
        torch.testing.assert_close(observed[name].gradient, expected[name].gradient, rtol=0.02, atol=0.02)


def wide_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(32, 12), nn.Tanh(), nn.Linear(12, 4)).to(F64)


def images(count=3):
    torch.manual_seed(1)
    return [(torch.randn(8, 2, 4, 4, dtype=F64), torch.randint(4, (8,))) for _ in range(count)]


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def diagonal_blocks(matrix, size):
    mask = torch.block_diag(*(torch.ones(size, size, dtype=F64) for _ in range(len(matrix) // size)))
    return matrix * mask


def test_blocks_as_wide_as_the_layers_are_whole_factors():
    results = []
    for blocks in (None, 64):
        model = wide_net()
        optimizer, moor = moored(model, images(), blocks=blocks)
        train(model, optimizer, images())
        moor.consolidate()
        train(model, optimizer, images())
        results.append((moor.pull_energy(), [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-9)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-9, atol=1e-12)


def test_energy_of_blocks_is_that_of_the_block_diagonal_parts_of_whole_factors():
    energies, expected = {}, 0.0
    for blocks in (None, 6):
        model = wide_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        moor = mooring.attach(
            model, optimizer, importance=Kronecker(blocks=blocks), pull=mooring.Budget(1e9), check_finite=False
        )
        train(model, optimizer, images())
        moor.consolidate()
        torch.manual_seed(2)
        for name, p in model.named_parameters():
            d = torch.randn_like(p)
            with torch.no_grad():
                p.add_(d)
            if blocks is None:
                factors = next(s for s in moor._states.records.values() if s.name == name).factors
                flat = d.reshape(len(factors.past_outputs), -1)
                sizes = {18: 6, 8: 4, 32: 4, 12: 6, 4: 4, 1: 1}
                a, g = (diagonal_blocks(m, sizes[len(m)]) for m in (factors.past_inputs, factors.past_outputs))
                expected += float((g @ flat @ a * flat).sum()) / 2
        energies[blocks] = moor.pull_energy()
    assert energies[6] == pytest.approx(expected, rel=1e-9)
    assert energies[6] != pytest.approx(energies[None], rel=1e-3)


def test_blocks_keep_a_budget_and_resume():
    model = wide_net()
    optimizer, moor = moored(model, images(), blocks=6)
    assert not moor._states.diagonal_reasons
    train(model, optimizer, images())
    assert moor.pull_energy() <= 1e-3
    resumed = wide_net()
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer = torch.optim.SGD(resumed.parameters(), lr=0.05)
    again = mooring.attach(resumed, resumed_optimizer, importance=Kronecker(blocks=6), pull=mooring.Budget(1e-3))
    again.load_state_dict(moor.state_dict())
    for net, opt in ((model, optimizer), (resumed, resumed_optimizer)):
        train(net, opt, images())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_layer_that_does_not_divide_into_blocks_is_named():
    model = nn.Linear(101, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=Kronecker(blocks=50), pull=mooring.Budget(0.1))
    assert "101 inputs or outputs" in moor._states.diagonal_reasons[model.weight]


def test_blocks_must_be_a_whole_number():
    with pytest.raises(mooring.errors.MooringError, match="blocks=0"):
        Kronecker(blocks=0)


CONVOLUTIONS = {
    "1 x 1": nn.Conv2d(4, 8, 1),
    "1 x 1, strided": nn.Conv2d(4, 8, 1, stride=2),
    "wide, few places": nn.Conv2d(64, 48, 1),
    "3 x 3": nn.Conv2d(4, 8, 3, stride=2, padding=1),
    "depthwise": nn.Conv2d(4, 4, 5, padding=2, groups=4),
    "two groups": nn.Conv2d(4, 6, 3, dilation=2, groups=2, padding=1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_factors_of_images_equal_those_of_their_rows(name, dtype, monkeypatch):
    torch.manual_seed(0)
    layer = CONVOLUTIONS[name]
    a = torch.randn(5, layer.in_channels, 7, 7, dtype=dtype)
    b = torch.randn(5, layer.out_channels, *layer(a.float()).shape[2:], dtype=dtype)
    observed = observed_factors.observe(layer, a, b, ["weight"])["weight"]
    monkeypatch.setattr(observed_factors, "_observe_image", None)
    monkeypatch.setattr(observed_factors, "has_channels_first", lambda *_: False)
    expected = observed_factors.observe(layer, a, b, ["weight"])["weight"]
    close = 1e-12 if dtype == torch.float64 else 1e-5
    for slot in ("inputs", "outputs", "gradient", "noise"):
        one, two = getattr(observed, slot), getattr(expected, slot)
        torch.testing.assert_close(one, two, rtol=close, atol=close * float(two.abs().max()))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_half_of_a_wide_product_is_mirrored(dtype, close, monkeypatch):
    monkeypatch.setattr(kronecker_factors, "MIN_MIRRORED", 10)
    rows = torch.randn(40, 22, generator=torch.Generator().manual_seed(0)).to(dtype)
    observed, expected = kronecker_factors.squares(rows), rows.mT @ rows
    for stop in (6, 12, 18):  # the bands
        assert torch.equal(observed[stop:, :stop], observed[:stop, stop:].mT)
    torch.testing.assert_close(observed, expected, rtol=close, atol=close * float(expected.max()))
