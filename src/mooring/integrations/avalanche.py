"""A plugin for Avalanche's strategies, in place of their EWC, SI or MAS."""

from typing import Any

from mooring.integrations.deferred_attach import MooringOwner, SavedState

try:
    from avalanche.core import SupervisedPlugin
except ImportError as error:
    raise ImportError("mooring.integrations.avalanche needs avalanche: pip install avalanche-lib") from error


class MooringPlugin(MooringOwner, SupervisedPlugin):  # type: ignore[misc]
    """A plugin that moors the model of an Avalanche strategy; each experience is a task, consolidated at its end.

    Args:
        state: the state to resume from: a `state_dict()`, or the file or folder that it was saved to.
        verbose: whether to print, when an experience begins, how many parameters are held, and when it ends, what was
            forgotten, if that is measured.
        options: options of `mooring.attach`, such as `importance`, `pull` and `exclude` (the heads).

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

    def __init__(self, *, state: SavedState = None, verbose: bool = True, **options: Any) -> None:
        SupervisedPlugin.__init__(self)
        MooringOwner.__init__(self, state, options, verbose=verbose)

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Attach to the model and optimizer; Avalanche calls this after it adapted both to the experience."""
        self._attach(strategy.model, strategy.optimizer)
        self.print_coverage()

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Consolidate at the end of an experience."""
        self.end_task()

    def __getstate__(self) -> dict[str, Any]:
        """Return what Avalanche's checkpoints store: the state that the next experience resumes from."""
        return {**self.__dict__, "_state": self._next_state(), "_moor": None}
