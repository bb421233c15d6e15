"""An importance in eight bits: a code for each weight, and two numbers for each block of weights.

value = high * 2^(-(255 - code) * step) for codes from 1 to 255, and exactly 0 for code 0. `high` is the largest value
of the block, and 254 * step the octaves (powers of two) from there down to its smallest value that is not 0. So codes
are evenly spaced in the logarithm, and each value is within half a step of its code:

    |log2(quantized / value)| <= octaves / 508

R = 1 / (1 + (previous / current)^(-1/root)) is a logistic function of ln(previous) / root, whose slope is at most 1/4:

    |R(quantized) - R(value)| <= ln(2) / 4 / root * octaves / 508

With the square root that is 0.0034 for a block that spans 20 octaves, a factor of a million, and 0.043 for one that
spans all of float32. For a proximal step and a budget, R = p / (1 + p) is the same function with root 1: twice as much.
A penalty's force changes by the factor quantized / value itself. Values below the smallest normal number (1.2e-38 in
float32) count as 0. Rounding of the arithmetic adds about 2e-5 of a value in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.rules import State

BLOCK_SLOTS = ("previous_high", "previous_step")
"""The names of the tensors with one entry for each block."""

MAX_CODE = 255
"""The code of the largest value; 0 is the code of 0."""

MIN_BLOCK, MAX_BLOCK = 16, 256
"""The number of weights in a block."""


def block_size(shape: torch.Size) -> int | None:
    """Return the number of weights in a block: the largest divisor of a row, from 16 to 256; None if there is none.

    Blocks never cross a row, so that `fully_shard`, which cuts parameters into rows, cuts no block. Biases and other
    parameters without rows are not worth quantizing.

    Example:
        >>> block_size(torch.Size([10, 768])), block_size(torch.Size([64, 3, 7, 7])), block_size(torch.Size([4096]))
        (256, 147, None)
    """
    row = shape[1:].numel() if len(shape) > 1 else 0
    return next((size for size in range(min(row, MAX_BLOCK), MIN_BLOCK - 1, -1) if row % size == 0), None)


def quantize(values: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes in the shape of the values, and `high` and `step` of each block, of shape (rows, blocks in a row).

    Args:
        values: finite and not negative, with two dimensions or more.
        block: the number of weights in a block; it divides a row.

    Example:
        >>> code, high, step = quantize(torch.tensor([[8.0, 0.0, 2.0, 0.5]]), block=4)
        >>> code.tolist(), high.tolist(), (254 * step).tolist()
        ([[255, 0, 128, 1]], [[8.0]], [[4.0]])
    """
    blocks = values.reshape(len(values), values.shape[1:].numel() // block, block)
    known = blocks >= torch.finfo(values.dtype).tiny
    high = blocks.amax(-1)
    logs = blocks.log2()
    top = logs.amax(-1)
    low = torch.where(known, logs, torch.inf).amin(-1)
    step = ((top - low) / (MAX_CODE - 1)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # a block of zeros
    below = ((top.unsqueeze(-1) - logs) / step.unsqueeze(-1)).nan_to_num_(nan=0.0, posinf=0.0)  # equal values
    code = torch.where(known, MAX_CODE - below.round_().clamp_(0, MAX_CODE - 1), 0.0)
    return code.to(torch.uint8).view(values.shape), high * known.any(-1), step


def dequantize(code: Tensor, high: Tensor, step: Tensor) -> Tensor:
    """Return the values of codes; also of a flat chunk with its blocks, and of single codes each with its own numbers.

    The exponent is applied in two halves: 2^-254 is not a float32, but its product with `high` may be.

    Example:
        >>> code = torch.tensor([[255, 0, 128, 1]], dtype=torch.uint8)
        >>> dequantize(code, high=torch.tensor([[8.0]]), step=torch.tensor([[4 / 254]]))
        tensor([[8.0000, 0.0000, 2.0000, 0.5000]])
    """
    blocks = code.reshape(*high.shape, code.numel() // max(1, high.numel())).to(high.dtype)
    half = (blocks - MAX_CODE).mul_(step.unsqueeze(-1) / 2).exp2_()
    values = (high.unsqueeze(-1) * half).mul_(half)
    return values.mul_(blocks.clamp(max=1)).view(code.shape)  # 0 for code 0, much faster than a mask


@dataclass
class QuantizedImportance:
    """The quantized importance of one parameter.

    Attributes:
        code: one byte for each weight, in the parameter's shape.
        high: the largest value of each block.
        step: the distance between two codes, in octaves.
    """

    code: Tensor
    high: Tensor
    step: Tensor

    @classmethod
    def from_values(cls, values: Tensor, block: int) -> "QuantizedImportance":
        """Quantize values; refuse negative and non-finite ones."""
        if values.numel() and not bool(((values >= 0) & values.isfinite()).all()):
            raise MooringError(
                'an importance is negative or not finite, which previous="8bit" cannot store: give '
                "Memory(previous=) a dtype"
            )
        return cls(*(t.contiguous() for t in quantize(values.contiguous(), block)))

    def values(self) -> Tensor:
        """Return the values."""
        return dequantize(self.code, self.high, self.step)

    def slots(self) -> State:
        """Return the tensors by slot."""
        return {"previous": self.code, "previous_high": self.high, "previous_step": self.step}
