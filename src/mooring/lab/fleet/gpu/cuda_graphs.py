"""Steps of a fleet recorded once and played back: the host tells the device one thing for a whole step."""

from collections.abc import Callable, Hashable

import torch

__all__ = ["Recorder"]

EAGER = 1
"""Steps of a kind before it is recorded: compilers and libraries set themselves up in them."""

PAYS = 6
"""Steps of a kind that must be left for a recording to pay."""


class Recorder:
    """CUDA graphs of the steps of one task, by their kind.

    What is recorded reads and writes memory where it lies, so nothing it touches may be replaced; when something must
    be, `clear` forgets all. Where a step cannot be recorded, since it waits for the device, it goes on being told.

    Args:
        on: whether to record at all.

    Attributes:
        failed: why a step could not be recorded; empty where none failed.
    """

    def __init__(self, on: bool) -> None:
        self.on, self.failed = on, ""
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.seen: dict[Hashable, int] = {}

    def run(self, kind: Hashable, left: int, step: Callable[[], None]) -> None:
        """Take a step.

        Args:
            kind: steps of one kind do the same to memory in the same places.
            left: how many more of this kind there will be.
            step: does it.
        """
        if kind in self.graphs:
            self.graphs[kind].replay()
            return
        self.seen[kind] = self.seen.get(kind, 0) + 1
        if not self.on or self.seen[kind] <= EAGER or left < PAYS:
            step()
        else:
            self._record(kind, step)

    def _record(self, kind: Hashable, step: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.on, self.failed = False, str(error).splitlines()[0]
            torch.cuda.synchronize()
            step()
            return
        self.graphs[kind] = graph
        graph.replay()

    def clear(self) -> None:
        """Forget what was recorded, and give its memory back."""
        self.graphs, self.seen = {}, {}
        if self.on:
            torch.cuda.empty_cache()
