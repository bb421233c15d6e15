"""Mooring in Avalanche's strategies: a plugin, in place of their EWC, SI or MAS."""

from pathlib import Path
from typing import Any

from mooring.integrations.deferred_attach import DeferredAttach, SavedState
from mooring.moor import Mooring

try:
    from avalanche.core import SupervisedPlugin
except ImportError as error:
    raise ImportError("mooring.integrations.avalanche needs avalanche: pip install avalanche-lib") from error

__all__ = ["MooringPlugin"]


class MooringPlugin(SupervisedPlugin):  # type: ignore[misc]
    """Moors the model of an Avalanche strategy: one experience is one task, consolidated at its end.

    Args:
        state: what to go on from: a `state_dict()`, or the file or folder that one was saved to.
        options: those of `mooring.attach`, such as `importance`, `pull` and `exclude` (the heads).

    Example:
        >>> import torch
        >>> from avalanche.benchmarks import tensors_benchmark
        >>> from avalanche.training import Naive
        >>> from avalanche.training.plugins import EvaluationPlugin
        >>> model = torch.nn.Linear(3, 2)
        >>> tasks = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(2)]
        >>> plugin = MooringPlugin(importance="mas")
        >>> strategy = Naive(
        ...     model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_mb_size=4,
        ...     evaluator=EvaluationPlugin(), plugins=[plugin],
        ... )
        >>> for experience in tensors_benchmark(tasks, tasks, task_labels=[0, 0]).train_stream:
        ...     _ = strategy.train(experience)
        >>> plugin.moor.tasks
        2
    """

    def __init__(self, *, state: SavedState = None, **options: Any) -> None:
        super().__init__()
        self._deferred = DeferredAttach(state, options)

    @property
    def moor(self) -> Mooring:
        """The Mooring, from the start of the first experience on."""
        return self._deferred.moor

    def save(self, path: str | Path) -> Path:
        """Write the state to a file, or into a folder."""
        return self._deferred.save(path)

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """An experience begins: the model is adapted to it, and its optimizer is there."""
        self._deferred.attach(strategy.model, strategy.optimizer)

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """An experience is over: what was learned is now part of what is kept."""
        self.moor.consolidate()

    def __getstate__(self) -> dict[str, Any]:
        """What Avalanche's checkpoints hold: the state, which the next experience goes on from."""
        return {**self.__dict__, "_deferred": DeferredAttach(self._deferred.state(), self._deferred.options)}
