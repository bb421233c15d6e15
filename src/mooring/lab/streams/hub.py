"""Fetching a named set from the Hub: its size said first, resumed, checked, and there whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

from huggingface_hub import HfApi, hf_hub_url

from mooring.errors import MooringError
from mooring.lab.streams.download import Retry, download
from mooring.lab.streams.named import NamedDataset, default_folder
from mooring.lab.streams.progress_callback import ProgressCallback, throttled

try:
    import fcntl
except ImportError:  # Windows: two fetches at once are the user's to avoid
    fcntl = None  # type: ignore[assignment]

__all__ = ["MANIFEST", "FetchPlan", "RemoteFile", "Retry", "fetch", "is_fetched", "plan_fetch"]

MANIFEST = "manifest.json"
HUB = "https://huggingface.co"


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch.

    Attributes:
        path: in the repository.
        local: in the folder that it is fetched to.
        size: in bytes.
        sha256: of its content.
    """

    path: str
    local: str
    size: int
    sha256: str


@dataclass(frozen=True)
class FetchPlan:
    """What fetching a set takes.

    Attributes:
        named: the set.
        endpoint: the Hub's address.
        commit: the revision that is fetched.
        files: each file, in order.
    """

    named: NamedDataset
    endpoint: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        """How much that is.

        Example:
            >>> from mooring.lab.streams.named import NAMED_DATASETS
            >>> file = RemoteFile("data/train.parquet", "data/train-00000-of-00001.parquet", 100, "0" * 64)
            >>> FetchPlan(NAMED_DATASETS["cifar10"], "https://huggingface.co", "main", (file, file)).bytes
            200
        """
        return sum(file.size for file in self.files)


def plan_fetch(named: NamedDataset, *, endpoint: str | None = None, retry: Retry | None = None) -> FetchPlan:
    """Ask the Hub which files the set has, how large they are and what they hash to. Nothing is fetched.

    Args:
        named: the set.
        endpoint: the Hub's address; by default $HF_ENDPOINT, or huggingface.co.
        retry: how often to ask again.
    """
    if not named.repository:
        raise MooringError(f"{named.name} is not fetched from the Hub: {named.manual_steps}")
    endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    retry = retry or Retry()
    failures = 0
    while True:
        try:
            # public sets need no token, and none is sent
            info = HfApi(endpoint=endpoint, token=False).dataset_info(
                named.repository, revision=named.revision, files_metadata=True, timeout=retry.timeout, token=False
            )
            break
        except Exception as error:  # huggingface_hub has changed its HTTP library, and so what it raises, twice
            failures += 1
            status = getattr(getattr(error, "response", None), "status_code", None)
            if failures >= retry.attempts or not retry.is_retryable(status):
                raise _no_answer(named, endpoint, status, error) from error
            retry.pause(failures)
    held = sorted((s.rfilename, s.size, s.lfs.sha256 if s.lfs else None) for s in info.siblings or ())
    return FetchPlan(named, endpoint, info.sha or named.revision, _chosen(named, held))


def is_fetched(named: NamedDataset, folder: Path) -> bool:
    """Whether the folder holds the set already; anything else in the way is an error.

    Example:
        >>> from mooring.lab.streams.named import NAMED_DATASETS
        >>> is_fetched(NAMED_DATASETS["cifar10"], Path("nowhere"))
        False
    """
    if not folder.exists():
        return False
    try:
        held = json.loads((folder / MANIFEST).read_text())["name"]
    except (OSError, ValueError, KeyError, TypeError):
        held = None
    if held != named.name:
        raise MooringError(
            f"{folder} is there and was not made by fetching {named.name}: give another folder with --to"
        )
    return True


def fetch(
    named: NamedDataset,
    folder: Path | str | None = None,
    *,
    endpoint: str | None = None,
    progress: ProgressCallback | None = None,
    planned: FetchPlan | None = None,
    retry: Retry | None = None,
) -> Path:
    """Fetch a set. It is put together in FOLDER.partial, where an interrupted fetch goes on, and renamed when whole.

    The size and SHA-256 of every file are compared with what the Hub says; a damaged file is fetched once more.

    Args:
        named: the set.
        folder: where to; by default where streams look for it.
        endpoint: the Hub's address; by default $HF_ENDPOINT, or huggingface.co.
        progress: told about every so often, with the bytes that are there and those there will be.
        planned: what `plan_fetch` said, to spare asking again.
        retry: how often to try again, and how long to wait.

    Returns:
        The folder.
    """
    folder = Path(folder).expanduser() if folder else default_folder(named.name)
    if is_fetched(named, folder):
        return folder
    planned = planned or plan_fetch(named, endpoint=endpoint, retry=retry)
    partial = folder.with_name(f"{folder.name}.partial")
    report = throttled(progress)
    with _held(partial) as manifest:
        if is_fetched(named, folder):  # another process was quicker
            shutil.rmtree(partial)
            return folder
        _check_room(partial, planned)
        before = 0
        for file in planned.files:
            url = hf_hub_url(
                named.repository, file.path, repo_type="dataset", revision=planned.commit, endpoint=planned.endpoint
            )
            download(
                url,
                partial / file.local,
                size=file.size,
                sha256=file.sha256,
                retry=retry or Retry(),
                report=_behind(report, f"fetching {named.name}", before, planned.bytes),
            )
            before += file.size
        json.dump(_told(planned), manifest, indent=1)
        manifest.flush()
        os.fsync(manifest.fileno())
        try:
            os.rename(partial, folder)
        except OSError as error:
            raise MooringError(f"cannot rename {partial} to {folder} ({error.strerror}): rename it yourself") from error
    return folder


def _behind(report: ProgressCallback, what: str, before: int, total: int) -> Callable[[int], None]:
    """A file's progress as part of the whole set's."""
    return lambda done: report(what, before + done, total)


def _chosen(named: NamedDataset, held: list[tuple[str, int | None, str | None]]) -> tuple[RemoteFile, ...]:
    """The repository's files that the set wants, named and numbered as streams read them."""
    wanted: dict[str, list[tuple[str, int | None, str | None]]] = {}
    for pattern, kind in named.files:
        matching = [file for file in held if fnmatchcase(file[0], pattern)]
        if not matching:
            raise MooringError(f"{named.repository} on the Hub has no {pattern}: it has changed, please report it")
        wanted.setdefault(kind, []).extend(matching)
    files = []
    for kind, found in wanted.items():
        for number, (path, size, sha256) in enumerate(found):
            if size is None or sha256 is None:
                raise MooringError(f"the Hub tells no checksum for {path} of {named.repository}: it cannot be checked")
            files.append(RemoteFile(path, f"data/{kind}-{number:05d}-of-{len(found):05d}.parquet", size, sha256))
    return tuple(files)


def _no_answer(named: NamedDataset, endpoint: str, status: int | None, error: Exception) -> MooringError:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return MooringError(f"cannot fetch {named.name}: HF_HUB_OFFLINE is set")
    if status in (401, 403, 404):
        revision = f"{named.repository} at {named.revision[:7]}"
        return MooringError(f"{endpoint} does not have {revision} (HTTP {status}): it has moved, please report it")
    if status is not None:
        return MooringError(f"{endpoint} answers with HTTP {status}: try again later")
    return MooringError(f"cannot reach {endpoint} ({type(error).__name__}): check the network, or set HF_ENDPOINT")


@contextmanager
def _held(partial: Path) -> Iterator[TextIO]:
    """The folder to work in, ours alone: its manifest, empty until the end, is the lock."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        opened = (partial / MANIFEST).open("a")
    except OSError as error:
        raise MooringError(f"cannot write {partial} ({error.strerror}): give another folder with --to") from error
    with opened:
        if fcntl is not None:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back by the system, whatever happens to us
            except OSError as error:
                raise MooringError(f"{partial} is being fetched by another process: wait for it") from error
        opened.truncate(0)
        yield opened


def _check_room(partial: Path, planned: FetchPlan) -> None:
    there = sum(path.stat().st_size for path in partial.rglob("*.parquet"))
    free = shutil.disk_usage(partial).free
    if planned.bytes - there > free:
        wanted = f"{(planned.bytes - there) / 1e6:,.0f} MB"
        raise MooringError(
            f"{planned.named.name} takes {wanted} more and {partial} has {free / 1e6:,.0f} MB: make room"
        )


def _told(planned: FetchPlan) -> dict[str, object]:
    return {
        "name": planned.named.name,
        "repository": planned.named.repository,
        "commit": planned.commit,
        "files": {file.local: {"path": file.path, "bytes": file.size, "sha256": file.sha256} for file in planned.files},
    }
