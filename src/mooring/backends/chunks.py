"""Aligned pieces of several tensors, small enough that a rule's intermediate results stay in the cache."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

__all__ = ["tiled", "tiles"]

CPU_TILE = 5 << 16
DEVICE_TILE = 1 << 26


def tiles(tensors: Sequence[Tensor], size: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Flat views of the same elements of each tensor, piece by piece.

    Rules are elementwise, so they may run over pieces; their temporaries are then the size of a piece and
    not of the parameter. Tensors with a single element are passed as they are, to broadcast. Where the memory
    layouts differ, there is one piece: the tensors themselves. A tensor with fewer elements has one for each block of
    the others', and pieces are whole blocks.

    Args:
        tensors: tensors of one shape, the first of which decides; or of a single element, or one for each block.
        size: elements in a piece; by default what suits the device.

    Example:
        >>> import torch
        >>> a, one = torch.arange(5), torch.tensor(1)
        >>> [(x.tolist(), y.tolist()) for x, y in tiles([a, one], size=3)]
        [([0, 1, 2], 1), ([3, 4], 1)]
    """
    first = tensors[0]
    if size is None:
        size = CPU_TILE if first.device.type == "cpu" else DEVICE_TILE
    if first.numel() <= size or not all(t.is_contiguous() for t in tensors):
        yield tuple(tensors)
        return
    flat = [(t if t.ndim == 0 else t.view(-1), first.numel() // max(1, t.numel())) for t in tensors]
    size = max(1, size // (whole := max(block for t, block in flat if t.ndim))) * whole
    for start in range(0, first.numel(), size):
        yield tuple(t if t.ndim == 0 else t[start // block : (start + size) // block] for t, block in flat)


def tiled(named: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The same by name.

    Example:
        >>> import torch
        >>> [piece["a"].tolist() for piece in tiled({"a": torch.arange(3)})]
        [[0, 1, 2]]
    """
    for pieces in tiles(list(named.values())):
        yield dict(zip(named, pieces, strict=True))
