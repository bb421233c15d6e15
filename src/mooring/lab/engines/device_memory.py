"""Memory of a device: how much is free, how much something takes, and whether there was too little."""

import gc
from pathlib import Path

import torch

__all__ = ["Peak", "free", "ran_out", "release"]

UNKNOWN = 4 << 30
"""What a machine is taken to have free where it does not say."""

WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""How PyTorch says that there is too little memory where it has no error of its own for it."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was too little memory.

    Example:
        >>> ran_out(torch.OutOfMemoryError("CUDA out of memory")), ran_out(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def release(device: str) -> None:
    """Give back what nobody holds any more, also what was held in a circle."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def free(device: str) -> int:
    """Bytes that could be had on a device.

    Example:
        >>> free("cpu") > 0
        True
    """
    if torch.device(device).type == "cuda":
        release(device)  # what PyTorch keeps for later counts as free
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), _allowed())


def _available(told: Path = Path("/proc/meminfo")) -> int:
    """What the machine has left, where it says so."""
    try:
        lines = dict(line.split(":", 1) for line in told.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, LookupError, ValueError):
        return UNKNOWN


def _allowed(told: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """What a container may take: past that a process is killed, not told."""
    try:
        return int(told.read_text())
    except (OSError, ValueError):  # there is no container, or "max": no limit
        return 1 << 62


class Peak:
    """The most bytes that were taken on a device since this was made; None where nobody counts them.

    What counts is what the device no longer has for others: recorded steps keep memory that no tensor is in.

    Example:
        >>> Peak("cpu").bytes() is None
        True
    """

    def __init__(self, device: str) -> None:
        self.device, self.before = device, 0
        self.counted = torch.device(device).type == "cuda"
        if self.counted:
            release(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_reserved(device)

    def bytes(self) -> int | None:
        """Above what was taken before."""
        return torch.cuda.max_memory_reserved(self.device) - self.before if self.counted else None
