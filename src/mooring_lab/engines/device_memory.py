"""The memory of a device: how much is free, and whether it ran out."""

import gc
from pathlib import Path

import torch

ASSUMED_FREE_BYTES = 4 << 30
"""The free memory of a machine that does not report it."""

OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Parts of the messages with which PyTorch reports missing memory by an error of another type."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports missing memory.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")), is_out_of_memory(RuntimeError("shapes"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY_MESSAGES)


def release_memory(device: str) -> None:
    """Free objects that nothing references any more, reference cycles included."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def free_memory(device: str) -> int:
    """Return how many bytes can be allocated on a device.

    Example:
        >>> free_memory("cpu") > 0
        True
    """
    if torch.device(device).type == "cuda":
        release_memory(device)  # what PyTorch's allocator caches counts as free
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), _container_limit())


def _available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the free memory that the machine reports."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, LookupError, ValueError):
        return ASSUMED_FREE_BYTES


def _container_limit(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return what a container may take; beyond that a process is killed without an error."""
    try:
        return int(limit.read_text())
    except (OSError, ValueError):  # there is no container, or "max": no limit
        return 1 << 62
