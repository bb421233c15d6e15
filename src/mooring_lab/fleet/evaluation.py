"""Test accuracy of a stack of runs on the tasks of a stream, and the head that each task is evaluated with."""

from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.model.known_methods import find_method
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.networks.multi_head import MultiHeadNetwork
from mooring_lab.streams.stream import Split, Stream, task_outputs

PIXELS_PER_BATCH = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Number of pixels that are evaluated at a time, over all runs."""

MAX_RESIDENT_BYTES = 1 << 30
"""Test images stay on the device if they take fewer bytes than this; larger sets are copied batch by batch."""


def resident_bytes(test: Split) -> int:
    """Return how many bytes of test images stay on a GPU: all of them or none.

    Example:
        >>> from mooring_lab.streams import digits
        >>> resident_bytes(digits().test) == digits().test.images.nbytes
        True
    """
    return test.images.nbytes if test.images.nbytes < MAX_RESIDENT_BYTES else 0


_UNTRAINED_SCORES: WeakKeyDictionary[MultiHeadNetwork, dict[Hashable, list[float]]] = WeakKeyDictionary()
"""Accuracies of initial networks, by data, heads, precision and device: many fleets start from the same network."""


class Evaluation:
    """The test images of a stream, and the accuracy of a stack of runs on them.

    Args:
        stream: the tasks.
        device: where the images stay if they are small enough.

    Example:
        >>> from mooring_lab.networks.initialization import initial_network
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> stack = Stack([initial_network("mlp", stream, seed) for seed in (0, 1, 2)], "cpu", [0, 1, 2])
        >>> Evaluation(stream).score(stack, heads=[0, 1], dtype=torch.float32).shape  # the first two of five tasks
        torch.Size([3, 2])
    """

    def __init__(self, stream: Stream, device: torch.device | str = "cpu") -> None:
        test = stream.test
        storage = device if resident_bytes(test) else test.images.device
        self.stream = stream
        self.images, self.labels = test.images.to(storage), task_outputs(stream, "test").to(storage)
        self.indices = [task.test.to(storage) for task in stream.tasks]

    @torch.no_grad()
    def score(
        self, stack: Stack, heads: Sequence[int | Tensor], dtype: torch.dtype, trained: int | None = None
    ) -> Tensor:
        """Return the test accuracy of every run on the first tasks, in percent: float64 of shape (runs, tasks).

        A growing head predicts one of the classes that have come so far; on a later task also one of its classes.

        Args:
            stack: the runs.
            heads: the head for each of the first tasks; one for all runs, or int64 of shape (runs,).
            dtype: of the inputs.
            trained: the last task whose classes have come, for a growing head; None for each task's own.
        """
        runs, accuracies = len(stack), []
        batch = max(1, PIXELS_PER_BATCH[stack.device.type] // (runs * self.images[0].numel()))
        for number, head in enumerate(heads):
            correct = torch.zeros(runs, dtype=torch.float64, device=stack.device)
            for indices in torch.split(self.indices[number], batch):
                x = normalize_pixels(self.images[indices].to(stack.device), dtype)
                own = head if isinstance(head, int) else head.to(stack.device)[:, None].expand(runs, len(x))
                logits = stack(x.expand(runs, *x.shape), own)
                predictions = logits[..., : self._outputs(number, trained)].argmax(-1)
                correct += (predictions == self.labels[indices].to(stack.device)).sum(1)
            accuracies.append(100 * correct / len(self.indices[number]))
        return torch.stack(accuracies, 1)

    def _outputs(self, task: int, trained: int | None) -> int:
        """Return how many outputs a prediction on a task is made from; if the task is known, those of its classes."""
        if self.stream.scenario == "task":
            return len(self.stream.tasks[task].classes)
        return self.stream.grown_outputs(task if trained is None else max(task, trained))

    def score_untrained(
        self,
        stack: Stack,
        starts: Sequence[MultiHeadNetwork],
        heads: Sequence[int | Tensor],
        dtype: torch.dtype,
        data: str = "",
    ) -> list[list[float]]:
        """Return what `score` gives before training; each initial network is evaluated once, for all fleets.

        Args:
            stack: the runs.
            starts: the initial network of each run.
            heads: as for `score`.
            dtype: as for `score`.
            data: the fingerprint of the images.
        """
        heads_of_runs = torch.stack([torch.as_tensor(head).expand(len(starts)) for head in heads], 1).tolist()
        tf32 = torch.backends.cudnn.allow_tf32
        settings = (data, *map(len, self.indices), dtype, stack.compute_dtype, stack.device, tf32)
        keys = [(network, (*settings, *row)) for network, row in zip(starts, heads_of_runs, strict=True)]
        new = [(network, key) for network, key in dict.fromkeys(keys) if key not in _UNTRAINED_SCORES.get(network, {})]
        if new:
            first = [keys.index(key) for key in new]
            networks = [network for network, _ in new]
            distinct = Stack(networks, stack.device, compute_dtype=stack.compute_dtype, mode=stack.mode)
            their_heads = [head if isinstance(head, int) else head[first] for head in heads]
            for (network, key), scores in zip(new, self.score(distinct, their_heads, dtype).tolist(), strict=True):
                _UNTRAINED_SCORES.setdefault(network, {})[key] = scores
        return [_UNTRAINED_SCORES[network][key] for network, key in keys]


def evaluation_heads(specs: Sequence[RunSpec], stream: Stream, trained: int, tasks: int) -> list[int | Tensor]:
    """Return the head to evaluate each of the first tasks with; for a future task, the head that it would start from.

    Args:
        specs: the runs.
        stream: the tasks.
        trained: the last trained task.
        tasks: the number of tasks to evaluate.

    Returns:
        For each task one head for all runs, or heads of shape (runs,).

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> specs = [RunSpec("digits", stream.fingerprint, "plain", 0, heads=heads) for heads in ("inherit", "fresh")]
        >>> evaluation_heads(specs[:1], stream, 0, 2), evaluation_heads(specs, stream, 0, 2)
        ([0, 0], [0, tensor([0, 1])])
    """
    inherits = [inherits_head(spec) for spec in specs]
    heads: list[int | Tensor] = []
    for task in range(tasks):
        own, trained_head = stream.head(task), stream.head(min(task, trained))
        if own == trained_head or len({*inherits}) == 1:
            heads.append(trained_head if inherits[0] else own)
        else:
            heads.append(torch.tensor([trained_head if inherit else own for inherit in inherits]))
    return heads


def inherits_head(spec: RunSpec) -> bool:
    """Return whether the head of a new task starts from the previous head."""
    method = find_method(spec.method)
    always_fresh = method.plugin is not None and method.plugin.fresh_heads
    return spec.heads == "inherit" and not method.all_tasks and not always_fresh


def last_seen(spec: RunSpec, stream: Stream, task: int) -> int:
    """Return the last task whose classes have come by the end of a task; joint training has all of them."""
    return len(stream.tasks) - 1 if find_method(spec.method).all_tasks else task
