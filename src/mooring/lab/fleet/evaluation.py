"""What a fleet is scored on: the test images of a stream, on the device where they fit easily."""

from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mooring.lab.fleet.stack.stack import Stack
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.networks.multi_head import MultiHeadNetwork
from mooring.lab.streams.stream import Split, Stream

__all__ = ["Exam", "kept_bytes"]

PIXELS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""How many pixels to score at a time."""

EASILY = 1 << 30
"""Bytes of test images below which they stay on the device; more are copied piece by piece, each time."""


def kept_bytes(test: Split) -> int:
    """How many bytes of test images stay on a GPU: all of them or none.

    Example:
        >>> from mooring.lab.streams import digits
        >>> kept_bytes(digits().test) == digits().test.images.nbytes
        True
    """
    return test.images.nbytes if test.images.nbytes < EASILY else 0


_SCORED: WeakKeyDictionary[MultiHeadNetwork, dict[Hashable, list[float]]] = WeakKeyDictionary()
"""What networks scored before they were trained, by where and how exactly: many fleets start from one."""


class Exam:
    """A stream's test images, and how a stack of runs does on them.

    Args:
        stream: whose tasks.
        device: where the images stay, if they fit easily.

    Example:
        >>> from mooring.lab.networks.initialization import initial_network
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> stack = Stack([initial_network("mlp", stream, seed) for seed in (0, 1, 2)], "cpu", [0, 1, 2])
        >>> Exam(stream).score(stack, heads=[0, 1], dtype=torch.float32).shape  # the first two of five tasks
        torch.Size([3, 2])
    """

    def __init__(self, stream: Stream, device: torch.device | str = "cpu") -> None:
        self.tasks, test = stream.tasks, stream.test
        where = device if kept_bytes(test) else test.images.device
        self.images, self.labels = test.images.to(where), test.labels.to(where)
        self.places = [task.test.to(where) for task in stream.tasks]

    @torch.no_grad()
    def score(self, stack: Stack, heads: Sequence[int | Tensor], dtype: torch.dtype) -> Tensor:
        """Test accuracy of every run on the first tasks, in percent: float64 of shape (runs, heads).

        Args:
            stack: the runs.
            heads: the head that is asked on each of these tasks, from the first on; or of each run, of shape (runs,).
            dtype: of the arithmetic.
        """
        runs, found = len(stack), []
        at_once = max(1, PIXELS[stack.device.type] // (runs * self.images[0].numel()))
        for number, head in enumerate(heads):
            right = torch.zeros(runs, dtype=torch.float64, device=stack.device)
            for places in torch.split(self.places[number], at_once):
                x = normalize_pixels(self.images[places].to(stack.device), dtype)
                whose = head if isinstance(head, int) else head.to(stack.device)[:, None].expand(runs, len(x))
                logits = stack(x.expand(runs, *x.shape), whose)
                told = logits[..., : len(self.tasks[number].classes)].argmax(-1)
                right += (told == self.labels[places].to(stack.device)).sum(1)
            found.append(100 * right / len(self.places[number]))
        return torch.stack(found, 1)

    def score_starts(
        self,
        stack: Stack,
        starts: Sequence[MultiHeadNetwork],
        heads: Sequence[int | Tensor],
        dtype: torch.dtype,
        data: str = "",
    ) -> list[list[float]]:
        """What `score` finds for runs that were not trained yet; what many start from is scored once, for all fleets.

        Args:
            stack: the runs.
            starts: the network that each of them starts from.
            heads: as for `score`.
            dtype: as for `score`.
            data: the fingerprint of the images.
        """
        told = torch.stack([torch.as_tensor(head).expand(len(starts)) for head in heads], 1).tolist()
        how = (data, *map(len, self.places), dtype, stack.products, stack.device, torch.backends.cudnn.allow_tf32)
        alike = [(network, (*how, *mine)) for network, mine in zip(starts, told, strict=True)]
        new = [each for each in dict.fromkeys(alike) if each[1] not in _SCORED.get(each[0], {})]
        if new:
            first = [alike.index(each) for each in new]
            few = Stack([starts[row] for row in first], stack.device, products=stack.products, way=stack.way)
            theirs = [head if isinstance(head, int) else head[first] for head in heads]
            for (network, key), row in zip(new, self.score(few, theirs, dtype).tolist(), strict=True):
                _SCORED.setdefault(network, {})[key] = row
        return [_SCORED[network][key] for network, key in alike]
