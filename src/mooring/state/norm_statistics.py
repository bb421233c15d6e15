"""The running statistics of normalization layers once a task was consolidated: they follow the data or are frozen."""

import copyreg
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from mooring.rules import ParameterPull, Pull, State
from mooring.state.selection import norm_buffers, norm_modules

BUFFERS = ("follow", "frozen")
"""The options of `buffers`."""


class NormStatistics:
    """The running statistics of the normalization layers that belong to one optimizer, except excluded ones.

    Args:
        model: the model.
        exclude: patterns of parameters that stay free; the statistics of their layers follow the data.
        held: returns the parameters of the optimizer.
        mode: from the end of the first task on, statistics "follow" the data or are "frozen": layers in training mode
            normalise with them, and do not change them.
        pull: a pull that merges weights at the end of a task also merges statistics that follow the data.

    Attributes:
        anchors: the statistics at the end of the last task, by name; only where they are merged.
    """

    def __init__(
        self,
        model: nn.Module,
        exclude: tuple[str, ...],
        held: Callable[[], Sequence[Tensor]],
        mode: str,
        pull: Pull | None,
    ) -> None:
        self.model, self.exclude, self.held, self.mode = model, exclude, held, mode
        self._merges = mode == "follow" and merges_weights(pull)
        self.anchors: State = {}
        self._frozen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._release = weakref.finalize(self, _thaw, self._frozen)
        self._release.atexit = False

    @property
    def frozen(self) -> int:
        """The number of layers whose statistics are frozen."""
        return len(self._frozen)

    def consolidate(self) -> None:
        """Remember the statistics at the end of a task, or freeze them."""
        if self.mode == "frozen":
            self.freeze()
        elif self._merges:
            self.anchors = {name: buffer.clone() for name, buffer in self._buffers().items()}

    def freeze(self) -> None:
        """Freeze the layers that are not frozen yet; some may have been added since."""
        for module in norm_modules(self.model, self.exclude, self.held()).values():
            if module not in self._frozen:
                _freeze(module)
                self._frozen.add(module)

    def load(self, anchors: State, tasks: int) -> None:
        """Continue from a saved state, after `tasks` tasks."""
        self.release()
        self.anchors = anchors if self._merges else {}
        if tasks and self.mode == "frozen":
            self.freeze()

    def release(self) -> None:
        """Make frozen layers follow the data again."""
        _thaw(self._frozen)

    def to_merge(self) -> list[tuple[Tensor, Tensor]]:
        """Return the statistics with their anchors that the end of a task merges; empty unless the pull merges weights.

        Weights that went back to their anchor do not give the old model with the statistics of the new data.
        """
        if not self.anchors:
            return []
        return [(buffer, self.anchors[name]) for name, buffer in self._buffers().items() if name in self.anchors]

    def _buffers(self) -> dict[str, Tensor]:
        return norm_buffers(self.model, self.exclude, self.held())


def merges_weights(pull: Pull | None) -> bool:
    """Return whether a pull acts once per task, on the weights that the task ended with."""
    return isinstance(pull, ParameterPull) and pull.every == "task"


_holders: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""The number of Moorings that freeze a layer."""


def _freeze(module: nn.Module) -> None:
    if not _holders.get(module):
        module.__class__ = frozen_class(type(module))  # type: ignore[arg-type]
    _holders[module] = _holders.get(module, 0) + 1


def _thaw(modules: weakref.WeakSet[nn.Module]) -> None:
    for module in list(modules):
        modules.discard(module)
        _holders[module] -= 1
        if not _holders[module] and (unfrozen := getattr(type(module), "unfrozen_class", None)):
            module.__class__ = unfrozen


@cache
def frozen_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a normalization layer that uses its running statistics in training mode too.

    A hook would not do: a graph that was compiled before does not see it, but it does see another class. A copied or
    unpickled layer has the class that it had before, like other hooks, which stay with the original.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> layer.__class__ = frozen_class(nn.BatchNorm1d)
        >>> layer.running_mean.add_(1.0)
        tensor([1., 1.])
        >>> layer.train()(layer.running_mean.expand(4, 2)).sum().item(), layer.running_mean
        (0.0, tensor([1., 1.]))
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        training, self.training = self.training, False
        try:
            return base.forward(self, *args, **kwargs)
        finally:
            self.training = training

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced: tuple[Any, ...] = base.__reduce_ex__(self, protocol)  # type: ignore[assignment]
        return (copyreg._reconstructor, (base, object, None), *reduced[2:])  # type: ignore[attr-defined]

    namespace = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "unfrozen_class": base,
        "forward": forward,
        "__reduce_ex__": reduce_ex,
    }
    return type(f"Frozen{base.__name__}", (base,), namespace)
