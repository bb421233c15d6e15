"""Random: scores drawn at random, a baseline that every definition should beat."""

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.rules.importance import Importance, State


def uniform_draw(like: Tensor, seed: int, name: str, task: int) -> Tensor:
    """Draw uniform numbers on [0, 1) that depend only on (seed, name, task).

    They are drawn on the CPU in float32, so that they are the same on every device and in every dtype. The global
    random state is not used.

    Example:
        >>> a, b = (uniform_draw(torch.empty(3), 0, "weight", 1) for _ in range(2))
        >>> bool((a == b).all())
        True
    """
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed}/{task}/{name}".encode()))
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(like.device, like.dtype)  # the whole tensor, even if `like` is sharded


@dataclass(frozen=True)
class Random(Importance):
    """Scores uniform on [0, 1), drawn again for each task and not merged.

    Args:
        seed: with the parameter's name and the task's number it determines the draw.

    Example:
        >>> scores = Random(seed=1).start(torch.empty(1000), name="weight", task=0)["current"]
        >>> bool((0 <= scores).all() and (scores < 1).all())
        True
    """

    seed: int = 0
    needs_anchor: ClassVar[bool] = False
    merges: ClassVar[bool] = False

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """Return the draw for this task."""
        return {"current": uniform_draw(like, self.seed, name, task)}
