"""An importance in eight bits: a code for each weight, and for each block of them two numbers that say what codes mean.

value = high * 2^(-(255 - code) * step) for codes from 1 to 255, and exactly 0 for code 0. `high` is the largest value
of the block and 254 * step the octaves, powers of two, from there down to its smallest that is not 0. So codes lie
evenly in the logarithm, and each value is within half a step of its code:

    |log2(coded / value)| <= octaves / 508

R = 1 / (1 + (previous / current)^(-1/root)) is a logistic function of ln(previous) / root, whose slope is at most 1/4:

    |R(coded) - R(value)| <= ln(2) / 4 / root * octaves / 508

With the square root that is 0.0034 where a block spans 20 octaves, a factor of a million, and 0.043 where it spans all
of float32. Of a proximal step and of a budget, R = p / (1 + p) is the same function with root 1: twice as much. A
penalty's force changes by the factor coded / value itself. Values below the smallest normal number (1.2e-38 in
float32) count as 0. To all this comes what the arithmetic rounds, about 2e-5 of a value in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.importance import State

__all__ = ["BLOCKS", "QuantizedImportance", "block_of", "dequantize", "largest_change", "past", "quantize"]

BLOCKS = ("previous_high", "previous_step")
"""The names of what is kept for each block."""

CODES = 255
"""The code of the largest value; 0 is the code of 0."""

SMALLEST, LARGEST = 16, 256
"""How many weights a block may have."""


def block_of(shape: torch.Size) -> int | None:
    """How many weights of such a parameter make a block: the most, up to 256, that divide a row; None where few do.

    Blocks never reach over a row, so that a parameter cut into rows, as `fully_shard` does, has its blocks cut with it.
    Biases and other parameters without rows are not worth coding.

    Example:
        >>> block_of(torch.Size([10, 768])), block_of(torch.Size([64, 3, 7, 7])), block_of(torch.Size([4096]))
        (256, 147, None)
    """
    row = shape[1:].numel() if len(shape) > 1 else 0
    return next((size for size in range(min(row, LARGEST), SMALLEST - 1, -1) if row % size == 0), None)


def quantize(values: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in the shape of the values, and `high` and `step` for each block, of shape (rows, blocks in a row).

    Args:
        values: not negative, finite; of two dimensions or more.
        block: how many make a block; it divides a row.

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
    step = ((top - low) / (CODES - 1)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # nothing but zeros
    below = ((top.unsqueeze(-1) - logs) / step.unsqueeze(-1)).nan_to_num_(nan=0.0, posinf=0.0)  # all alike
    code = torch.where(known, CODES - below.round_().clamp_(0, CODES - 1), 0.0)
    return code.to(torch.uint8).view(values.shape), high * known.any(-1), step


def dequantize(code: Tensor, high: Tensor, step: Tensor) -> Tensor:
    """The values of codes; also of a flat piece of them with its blocks, and of single codes each with its own numbers.

    Half of the exponent at a time: 2^-254, which float32 does not have, may come between two numbers that it has.

    Example:
        >>> code = torch.tensor([[255, 0, 128, 1]], dtype=torch.uint8)
        >>> dequantize(code, high=torch.tensor([[8.0]]), step=torch.tensor([[4 / 254]]))
        tensor([[8.0000, 0.0000, 2.0000, 0.5000]])
    """
    blocks = code.reshape(*high.shape, code.numel() // max(1, high.numel())).to(high.dtype)
    half = (blocks - CODES).mul_(step.unsqueeze(-1) / 2).exp2_()
    values = (high.unsqueeze(-1) * half).mul_(half)
    return values.mul_(blocks.clamp(max=1)).view(code.shape)  # 0 for code 0; a mask would cost far more


def largest_change(octaves: float, root: float = 2) -> float:
    """The bound on |R(coded) - R(value)| in a block that spans so many octaves: ln(2) / 4 / root * octaves / 508.

    Example:
        >>> round(largest_change(20), 4), round(largest_change(254), 3)
        (0.0034, 0.043)
    """
    return 0.6931471805599453 / 4 / root * octaves / (2 * (CODES - 1))


def past(told: State) -> Tensor:
    """`previous` among what is told of a parameter, in full where it is coded.

    Example:
        >>> past({"previous": torch.tensor([2.0])})
        tensor([2.])
    """
    if "previous_high" not in told:
        return told["previous"]
    return dequantize(told["previous"], told["previous_high"], told["previous_step"])


@dataclass
class QuantizedImportance:
    """The importance of one parameter, coded.

    Attributes:
        code: one byte for each weight, in the parameter's shape.
        high: the largest value of each block.
        step: between two codes, in octaves.
    """

    code: Tensor
    high: Tensor
    step: Tensor

    @classmethod
    def of(cls, values: Tensor, block: int) -> "QuantizedImportance":
        """Values coded, after a look at them."""
        if values.numel() and not bool(((values >= 0) & values.isfinite()).all()):
            raise MooringError(
                'an importance is negative or not finite, which previous="8bit" has no code for: give '
                "Memory(previous=) a dtype"
            )
        return cls(*(t.contiguous() for t in quantize(values.contiguous(), block)))

    def values(self) -> Tensor:
        """In full."""
        return dequantize(self.code, self.high, self.step)

    def slots(self) -> State:
        """Its tensors, by the names that `past` finds them under."""
        return {"previous": self.code, "previous_high": self.high, "previous_step": self.step}
