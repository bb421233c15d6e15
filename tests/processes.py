"""Real processes for tests, forked from one that has imported torch already, so that they start quickly."""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mooring_lab.cli.paper_command", "sklearn.datasets", "torch._dynamo"])
PATIENCE = 60
PORTS = range(20_000, 32_000)
"""Below those that systems give to connections: another process could get one of these before it is used."""


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said."""

    status: int
    out: str
    err: str


class Child:
    """A function in a process of its own, in a folder of its own, its output in files there."""

    def __init__(
        self, folder: Path, target, *args, terminal: str | None = None, patience: float = PATIENCE, **env: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.patience = patience
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        places = (terminal, terminal) if terminal else (str(self.out), str(self.err))
        self.process = CONTEXT.Process(target=_inside, args=(str(folder), places, env, target, args))
        self.process.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def running(self) -> bool:
        return self.process.is_alive()

    def ended(self) -> Ended:
        self.process.join(self.patience)
        if self.process.is_alive():
            self.kill()
            raise AssertionError(f"still running after {self.patience} s: {self.err.read_text()}")
        output = [path.read_text() if path.exists() else "" for path in (self.out, self.err)]
        return Ended(self.process.exitcode, *output)


def two_ranks() -> list[dict[str, str]]:
    """Return the environments of two ranks that can reach each other."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**world, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


def free_port() -> int:
    """Return a port at which nothing listens."""
    choice = random.Random()
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port := choice.choice(PORTS)))
            return port


def gloo_threads() -> int:
    """Return how many threads of this process run gloo's collectives; 0 where the system does not list threads."""
    count = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            count += task.read_text().strip() == "pt_gloo_runloop"
    return count


def wait_for(condition, child: Child) -> bool:
    """Whether it came true while the process ran."""
    end = time.monotonic() + child.patience
    while time.monotonic() < end:
        if condition():
            return True
        if not child.running():
            return bool(condition())
        time.sleep(0.002)
    raise AssertionError("waited in vain")


def _inside(folder: str, places: tuple[str, str], env: dict[str, str], target, args) -> None:
    os.chdir(folder)
    os.environ.update(env)
    for number, place in zip((1, 2), places, strict=True):
        handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    import torch

    torch.set_num_threads(1)
    status = target(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status or 0)
