"""Training steps captured as CUDA graphs and replayed: the host launches one graph for a whole step."""

from collections.abc import Callable, Hashable

import torch

from mooring.errors import first_line

WARMUP_STEPS = 1
"""Number of steps of a kind that run before it is captured: compilers and libraries initialize in them."""

MIN_STEPS_LEFT = 6
"""Smallest number of remaining steps of a kind for which a capture pays."""


class GraphRecorder:
    """CUDA graphs of the steps of one task, by the kind of step.

    A graph reads and writes fixed memory, so the tensors that it uses must not be replaced; `clear` removes all graphs
    if they must. A step that waits for the device cannot be captured; from then on all steps run without a graph.

    Args:
        enabled: whether to capture steps at all.

    Attributes:
        failure: why a step could not be captured; empty if none failed.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.failure = enabled, ""
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.counts: dict[Hashable, int] = {}

    def run(self, kind: Hashable, left: int, step: Callable[[], None]) -> None:
        """Run a step, or replay its graph.

        Args:
            kind: steps of one kind do the same with the same memory.
            left: the number of steps of this kind from here on.
            step: runs the step.
        """
        if kind in self.graphs:
            self.graphs[kind].replay()
            return
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if not self.enabled or self.counts[kind] <= WARMUP_STEPS or left < MIN_STEPS_LEFT:
            step()
        else:
            self._capture(kind, step)

    def _capture(self, kind: Hashable, step: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # ending a failed capture raises an error of its own
            self.enabled, self.failure = False, first_line(cause)
            torch.cuda.synchronize()
            step()
            return
        self.graphs[kind] = graph
        graph.replay()

    def clear(self) -> None:
        """Remove all graphs and release their memory."""
        self.graphs, self.counts = {}, {}
        if self.enabled:
            torch.cuda.empty_cache()
