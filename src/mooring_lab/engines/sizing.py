"""The size of fleets: as many runs as an estimate says fit into memory, up to where more are hardly faster."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from mooring_lab.fleet.grouping import fleet_shape
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import initial_network
from mooring_lab.streams.stream import Stream

MAX_RUNS = {"cpu": 128, "cuda": 512}
"""The largest fleet by default, by kind of device: larger ones were hardly faster."""

MEMORY_SHARE = 0.5
"""The share of the free memory that is used. A fleet that needs more than there is continues in halves."""

NOMINAL_BYTES = {"cpu": 4 << 30, "cuda": 16 << 30}
"""The free memory that is assumed if the number of runs must be the same each time."""


def fleet_sizes(
    streams: Mapping[str, Stream], device: str, free: Callable[[], int] | None = None
) -> Callable[[Sequence[RunSpec]], int]:
    """Return a function from runs of one shape to how many of them to train together at most.

    Args:
        streams: the streams by fingerprint.
        device: the device to train on.
        free: returns the free bytes of the device; None for a nominal number, so that sizes are the same each time.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> fleet_sizes({stream.fingerprint: stream}, "cpu")([RunSpec("digits", stream.fingerprint, "plain", 0)])
        128
    """
    kind, known = torch.device(device).type, dict[tuple[object, ...], int]()

    @cache
    def room() -> float:
        return MEMORY_SHARE * (free() if free else NOMINAL_BYTES[kind])

    def size(runs: Sequence[RunSpec]) -> int:
        shape = fleet_shape(runs[0])
        if shape not in known:
            run_bytes = estimate_run_bytes(runs[0], streams[runs[0].data])
            known[shape] = min(max(1, int(room()) // run_bytes), MAX_RUNS[kind])
        return known[shape]

    return size


def estimate_run_bytes(spec: RunSpec, stream: Stream) -> int:
    """Return about how much memory a run takes: 12 numbers for each weight, 200 for each pixel of a batch.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> estimate_run_bytes(RunSpec("digits", stream.fingerprint, "plain", 0, batch=10), stream)
        1357280
    """
    weights = sum(p.numel() for p in initial_network(spec.network, stream, 0).parameters())
    pixels = stream.train.images[0].numel() * spec.batch
    return (8 if spec.dtype == "float64" else 4) * (12 * weights + 200 * pixels)
