"""Random: importance drawn at random, the baseline that any definition should beat."""

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.importance.definition import Importance, State

__all__ = ["Random", "uniform_draw"]


def uniform_draw(like: Tensor, seed: int, name: str, task: int) -> Tensor:
    """Uniform numbers on [0, 1), fixed by (seed, name, task) alone.

    Drawn on the CPU in float32, so that they are the same on every device and in every dtype, and without
    touching the global random state.

    Example:
        >>> a, b = (uniform_draw(torch.empty(3), 0, "weight", 1) for _ in range(2))
        >>> bool((a == b).all())
        True
    """
    key = zlib.crc32(f"{seed}/{task}/{name}".encode())
    generator = torch.Generator("cpu").manual_seed(key)
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(like.device, like.dtype)  # whole, also where `like` is sharded


@dataclass(frozen=True)
class Random(Importance):
    """current uniform on [0, 1), drawn anew for each task; not merged.

    Args:
        seed: together with the parameter's name and the task's number it fixes the draw.

    Example:
        >>> scores = Random(seed=1).start(torch.empty(1000), name="weight", task=0)["current"]
        >>> bool((0 <= scores).all() and (scores < 1).all())
        True
    """

    seed: int = 0

    needs_anchor: ClassVar[bool] = False
    merges: ClassVar[bool] = False

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """The draw for this task."""
        return {"current": uniform_draw(like, self.seed, name, task)}
