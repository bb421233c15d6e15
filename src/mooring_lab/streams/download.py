"""Download of one file over HTTP: resumed after an interruption, retried, and verified.

huggingface_hub can download too, but it discards the bytes of an interrupted download.
"""

import hashlib
import http.client
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooring.errors import MooringError, check_number

BLOCK_BYTES = 1 << 18
PROGRESS_BYTES = 1 << 20
"""An attempt that brings this many new bytes resets the count of failures."""


@dataclass(frozen=True)
class Retry:
    """How often to retry, and how long to wait.

    Attributes:
        attempts: the largest number of attempts in a row, including the first.
        wait: the seconds before the second attempt; they double before each further one, up to 30.
        timeout: the seconds without an answer after which an attempt fails.

    Example:
        >>> Retry(attempts=3).is_retryable(503), Retry().is_retryable(404)
        (True, False)
    """

    attempts: int = 5
    wait: float = 1.0
    timeout: float = 30.0

    def __post_init__(self) -> None:
        """Check that every value is allowed."""
        check_number("attempts", self.attempts, 1)
        check_number("wait", self.wait, 0)
        check_number("timeout", self.timeout, 0, above=True)

    def is_retryable(self, status: int | None) -> bool:
        """Return whether a retry may help: after no answer, a timeout, too many requests, or a server error."""
        return status is None or status in (408, 429) or status >= 500

    def pause(self, failures: int) -> None:
        """Wait, twice as long after each further failure."""
        time.sleep(min(self.wait * 2.0 ** (failures - 1), 30.0))


def download(
    url: str, path: Path, *, size: int, sha256: str, retry: Retry, report: Callable[[int], Any] = lambda done: None
) -> None:
    """Download a file, following redirects, and check its size in bytes and its hexadecimal SHA-256.

    A partial file is continued. `report` is called with the number of bytes that have arrived.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):  # retry once, in case the damage was accidental
        _get(url, path, size, retry, report)
        if path.stat().st_size == size and _sha256(path) == sha256:
            return
        path.unlink()
    raise MooringError(f"{path.name} from {url} arrived damaged twice (its SHA-256 is not {sha256[:12]}…): try later")


def _get(url: str, path: Path, size: int, retry: Retry, report: Callable[[int], Any]) -> None:
    failures = 0
    path.touch()
    while (start := path.stat().st_size) < size:
        status, problem = None, "the connection was dropped"
        try:
            _append(url, path, start, size, retry.timeout, report)
        except urllib.error.HTTPError as error:
            status, problem = error.code, f"HTTP {error.code}"
            error.close()
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", "") or error or type(error).__name__)
        arrived = path.stat().st_size - start
        if arrived == size - start:
            break
        failures = 1 if arrived >= PROGRESS_BYTES else failures + 1
        if failures >= retry.attempts or not retry.is_retryable(status):
            raise MooringError(f"cannot fetch {url} ({problem}): run it again later, it goes on where it stopped")
        retry.pause(failures)
    report(min(size, path.stat().st_size))


def _append(url: str, path: Path, start: int, size: int, timeout: float, report: Callable[[int], Any]) -> None:
    """Request the missing bytes and append them; start over if the server ignores the range."""
    headers = {"User-Agent": "mooring", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
        done = start if response.status == 206 else 0
        with path.open("r+b") as opened:
            opened.seek(done)
            opened.truncate()
            while done <= size and (block := response.read(BLOCK_BYTES)):
                _write(opened, block, path)
                done += len(block)
                report(min(done, size))


def _write(opened: Any, block: bytes, path: Path) -> None:
    try:
        opened.write(block)
        opened.flush()  # so that a killed process loses at most this block
    except OSError as error:
        free = shutil.disk_usage(path.parent).free / 1e6
        raise MooringError(f"cannot write {path} ({error.strerror}, {free:,.0f} MB free): make room") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
