"""Counts the bytes of tensors that are alive at once during a call, on any device."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Follows each storage from the operation that returns it to its end.

    What operations allocate for themselves is not seen.

    Attributes:
        peak: the largest number of bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for t in tensors:
            storage = t.untyped_storage()
            if storage._cdata not in self._alive:
                self._now += (size := storage.nbytes())
                self._alive[storage._cdata] = weakref.ref(storage, self._end(storage._cdata, size))
        self.peak = max(self.peak, self._now)

    def _end(self, key: int, size: int) -> Callable[[object], None]:
        def end(_: object) -> None:
            self._now -= size
            del self._alive[key]

        return end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.follow(t for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


def peak_bytes(work: Callable[[], object], existing: Iterable[Tensor]) -> int:
    """Return the peak of live bytes during a call, with those of existing tensors."""
    gc.collect()
    with LiveMemory() as memory:
        memory.follow(existing)
        work()
    return memory.peak
