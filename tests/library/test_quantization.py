"""Tests of 8-bit importances: the error of a value, and of R, is within its bound for all numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooring.backends.eager import chunks
from mooring.errors import MooringError
from mooring.rules.interpolation import relative_importance
from mooring.rules.proximal import proximal_rate
from mooring.state.quantization import QuantizedImportance, block_size, dequantize, quantize

TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
FLOAT32_ERROR = 1e-4
"""The relative error that float32 may add: exponents are close to 128, where its resolution is 1.5e-5."""


def octaves_of(blocks: torch.Tensor) -> torch.Tensor:
    """Return the number of powers of two that a block's values span, without those that count as 0."""
    logs = blocks.double().log2()
    low = torch.where(blocks >= TINY, logs, torch.inf).amin(-1)
    return (logs.amax(-1) - low).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def check_bounds(values: torch.Tensor, block: int) -> None:
    """Check every bound of `mooring.state.quantization`, for values of shape (rows, ...)."""
    coded = dequantize(*quantize(values, block))
    assert coded.shape == values.shape
    assert coded.dtype == values.dtype
    counts = values >= TINY
    assert torch.equal(coded == 0, ~counts)
    octaves = octaves_of(values.reshape(-1, block)).unsqueeze(-1).expand(-1, block).reshape(values.shape)
    off = (coded[counts].double() / values[counts].double()).log2().abs()
    assert bool((off <= octaves[counts] / 508 + FLOAT32_ERROR).all())
    ranks = [values.median(), values.amax(), values.amin().clamp(min=TINY)]
    for current in (*(values.new_full((), float(rank)).expand_as(values) for rank in ranks), values.flip(-1)):
        for root in (1, 2, 3):
            wide = [relative_importance(t.double(), current.double(), root) for t in (coded, values)]
            allowed = math.log(2) / 4 / root * octaves / 508 + FLOAT32_ERROR
            assert bool(((wide[0] - wide[1]).abs() <= allowed)[counts].all())
    p = [proximal_rate(t.double(), 1 / float(values.amax().clamp(min=TINY)), 30.0) for t in (coded, values)]
    assert bool(((p[0] - p[1]).abs() <= math.log(2) / 4 * octaves / 508 + FLOAT32_ERROR)[counts].all())


numbers = st.one_of(
    st.just(0.0),
    st.floats(0, HUGE, width=32),
    st.floats(2.0**-40, 1.0, width=32),
    st.floats(0, TINY, width=32),
)


@given(st.lists(numbers, min_size=32, max_size=32), st.sampled_from([4, 8, 16, 32]))
def test_quantization_error_is_within_its_bound(values, block):
    check_bounds(torch.tensor(values, dtype=torch.float32).view(1, -1), block)


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 16,
        [3.7] * 16,
        [TINY] * 16,
        [HUGE] * 16,
        [HUGE, TINY] * 8,
        [HUGE, 0.0, TINY, 1.0] * 4,
        [1e-45, 1e-40] * 8,
        [1e-45, 1.0] * 8,
        [1.0, 1.0 + 2**-23] * 8,
        [2.0**-n for n in range(16)],
    ],
    ids=str,
)
def test_quantization_error_is_within_its_bound_for_extreme_values(values):
    check_bounds(torch.tensor([values, values[::-1]]), 16)


def test_largest_value_and_constant_blocks_are_exact():
    code, high, step = quantize(torch.tensor([[3.7] * 16 + [8.0, 1e-3] * 8]), 16)
    assert torch.equal(dequantize(code, high, step)[0, :16], torch.full((16,), 3.7))
    assert torch.equal(dequantize(code, high, step)[0, 16::2], torch.full((8,), 8.0))
    assert step[0, 0] == 0


def test_error_of_squared_gradients_is_far_below_the_bound():
    """Blocks of squares of normal numbers span about 20 octaves."""
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).square()
    other = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).square()
    coded = dequantize(*quantize(values, 256))
    off = (relative_importance(coded, other) - relative_importance(values, other)).abs()
    assert float(off.max()) < 0.006
    assert float(off.mean()) < 0.002


def test_float64_is_quantized_in_its_own_range():
    values = torch.tensor([[1e-300, 1e300, 0.0, 1.0] * 4], dtype=torch.float64)
    coded = dequantize(*quantize(values, 16))
    assert coded.dtype == torch.float64
    octaves = math.log2(1e300) * 2
    assert bool(((coded / values).log2().abs().nan_to_num() <= octaves / 508 + 1e-9).all())
    assert torch.equal(coded == 0, values == 0)


@pytest.mark.parametrize("bad", [math.inf, math.nan, -1e-3])
def test_negative_and_non_finite_values_are_refused_in_one_line(bad):
    values = torch.ones(2, 16)
    values[1, 3] = bad
    with pytest.raises(MooringError, match=r"negative or not finite.*give Memory\(previous=\) a dtype") as error:
        QuantizedImportance.from_values(values, 16)
    assert "\n" not in str(error.value)


def test_block_size_divides_rows_or_parameter_is_not_quantized():
    for shape, block in [((8, 300), 150), ((8, 257), None), ((8, 8), None), ((8, 4, 9), 36), ((8,), None), ((), None)]:
        assert block_size(torch.Size(shape)) == block


def test_tensor_without_rows_is_quantized():
    coded = QuantizedImportance.from_values(torch.zeros(0, 32), 32)
    assert coded.values().shape == (0, 32)


def test_chunks_contain_whole_blocks_and_dequantize_alone(monkeypatch):
    monkeypatch.setattr("mooring.backends.eager.CPU_CHUNK", 100)
    values = torch.rand(7, 96)
    coded = QuantizedImportance.from_values(values, 48)
    named = {"theta": values, **coded.slots()}
    pieces = list(chunks(named))
    assert [piece["theta"].numel() for piece in pieces] == [96] * 7
    dequantized = torch.cat([dequantize(*list(piece.values())[1:]) for piece in pieces])
    assert torch.equal(dequantized.view_as(values), coded.values())
