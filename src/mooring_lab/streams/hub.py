"""Fetching of a named data set from the Hub: verified, and complete or absent."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

from huggingface_hub import HfApi, hf_hub_download

from mooring.errors import MooringError, first_line
from mooring_lab.streams.named_datasets import NamedDataset, default_folder

MANIFEST = "manifest.json"
HUB = "https://huggingface.co"
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch: its path in the repository and in the data set's folder, its size in bytes, and its hash."""

    path: str
    local: str
    size: int
    sha256: str


@dataclass(frozen=True)
class FetchPlan:
    """The files to fetch for a data set, in order, from the Hub's address `endpoint` at the revision `commit`."""

    dataset: NamedDataset
    endpoint: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        """The size of all files in bytes.

        Example:
            >>> from mooring_lab.streams.named_datasets import NAMED_DATASETS
            >>> file = RemoteFile("data/train.parquet", "data/train-00000-of-00001.parquet", 100, "0" * 64)
            >>> FetchPlan(NAMED_DATASETS["cifar10"], "https://huggingface.co", "main", (file, file)).bytes
            200
        """
        return sum(file.size for file in self.files)


def plan_fetch(dataset: NamedDataset, endpoint: str | None = None) -> FetchPlan:
    """Ask the Hub for a data set's files, sizes and hashes, without fetching them; `fetch` explains the options."""
    if not dataset.repository:
        raise MooringError(f"{dataset.name} is not fetched from the Hub: {dataset.manual_steps}")
    endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        # public data sets need no token
        info = HfApi(endpoint=endpoint, token=False).dataset_info(
            dataset.repository, revision=dataset.revision, files_metadata=True, timeout=TIMEOUT_SECONDS, token=False
        )
    except Exception as error:  # huggingface_hub has changed its HTTP library, and its exceptions, twice
        raise _request_error(dataset, endpoint, error) from error
    files = sorted((file.rfilename, file.size, file.lfs.sha256 if file.lfs else None) for file in info.siblings or ())
    return FetchPlan(dataset, endpoint, info.sha or dataset.revision, _choose_files(dataset, files))


def is_fetched(dataset: NamedDataset, folder: Path) -> bool:
    """Return whether a folder has the data set; raise an error if it has anything else.

    Example:
        >>> from mooring_lab.streams.named_datasets import NAMED_DATASETS
        >>> is_fetched(NAMED_DATASETS["cifar10"], Path("nowhere"))
        False
    """
    if not folder.exists():
        return False
    try:
        name = json.loads((folder / MANIFEST).read_text())["name"]
    except (OSError, ValueError, KeyError, TypeError):
        name = None
    if name != dataset.name:
        problem = f"exists and was not made by fetching {dataset.name}"
        raise MooringError(f"{folder} {problem}: give another folder with --to")
    return True


def fetch(
    dataset: NamedDataset,
    folder: Path | str | None = None,
    *,
    endpoint: str | None = None,
    planned: FetchPlan | None = None,
) -> Path:
    """Fetch a data set and return its folder; huggingface_hub shows the progress.

    Files are collected in FOLDER.partial, where an interrupted fetch continues with the file that was interrupted. The
    folder is renamed when it is complete. The SHA-256 of every file is compared with the Hub's.

    Args:
        dataset: the data set.
        folder: the folder to create; by default the one where streams expect the data set.
        endpoint: the Hub's address; by default $HF_ENDPOINT, or huggingface.co.
        planned: the result of `plan_fetch`, to avoid another request.
    """
    folder = Path(folder).expanduser() if folder else default_folder(dataset.name)
    if is_fetched(dataset, folder):
        return folder
    planned = planned or plan_fetch(dataset, endpoint)
    partial = folder.with_name(f"{folder.name}.partial")
    with _locked(partial) as manifest:
        if is_fetched(dataset, folder):  # another process was faster
            shutil.rmtree(partial)
            return folder
        missing = planned.bytes - sum(path.stat().st_size for path in partial.glob("data/*.parquet"))
        if missing > (free := shutil.disk_usage(partial).free):
            sizes = f"takes {missing / 1e6:,.0f} MB more and {partial} has {free / 1e6:,.0f} MB"
            raise MooringError(f"{dataset.name} {sizes}: make room")
        for file in planned.files:
            if not (partial / file.local).exists():
                _fetch_file(planned, file, partial)
        shutil.rmtree(partial / "hub", ignore_errors=True)
        entries = {file.local: {"path": file.path, "bytes": file.size, "sha256": file.sha256} for file in planned.files}
        contents = {"name": dataset.name, "repository": dataset.repository, "commit": planned.commit, "files": entries}
        json.dump(contents, manifest, indent=1)
        manifest.flush()
        os.fsync(manifest.fileno())
        try:
            os.rename(partial, folder)
        except OSError as error:
            raise MooringError(f"cannot rename {partial} to {folder} ({error.strerror}): rename it yourself") from error
    return folder


def _fetch_file(planned: FetchPlan, file: RemoteFile, partial: Path) -> None:
    """Download a file, check it, and move it to its place, where only whole files are."""
    try:
        arrived = hf_hub_download(
            planned.dataset.repository,
            file.path,
            repo_type="dataset",
            revision=planned.commit,
            local_dir=partial / "hub",
            endpoint=planned.endpoint,
            token=False,
        )
    except Exception as error:  # of several HTTP libraries, and of the disk
        raise _request_error(planned.dataset, planned.endpoint, error) from error
    with open(arrived, "rb") as opened:
        digest = hashlib.sha256()
        while block := opened.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != file.sha256:
        os.unlink(arrived)
        raise MooringError(f"{file.path} arrived damaged (its SHA-256 is not {file.sha256[:12]}…): fetch it again")
    (partial / file.local).parent.mkdir(exist_ok=True)
    os.replace(arrived, partial / file.local)


def _choose_files(dataset: NamedDataset, files: list[tuple[str, int | None, str | None]]) -> tuple[RemoteFile, ...]:
    """Return the files that the data set needs, with the local names that streams read."""
    by_split: dict[str, list[tuple[str, int | None, str | None]]] = {}
    for pattern, split in dataset.files:
        matching = [file for file in files if fnmatchcase(file[0], pattern)]
        if not matching:
            raise MooringError(f"{dataset.repository} on the Hub has no {pattern}: it has changed, please report it")
        by_split.setdefault(split, []).extend(matching)
    chosen = []
    for split, matching in by_split.items():
        for number, (path, size, sha256) in enumerate(matching):
            if size is None or sha256 is None:
                raise MooringError(f"the Hub has no checksum for {path} of {dataset.repository}: it cannot be checked")
            local = f"data/{split}-{number:05d}-of-{len(matching):05d}.parquet"
            chosen.append(RemoteFile(path, local, size, sha256))
    return tuple(chosen)


def _request_error(dataset: NamedDataset, endpoint: str, error: Exception) -> MooringError:
    """Return what a failed request means, in one line."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return MooringError(f"cannot fetch {dataset.name}: HF_HUB_OFFLINE is set")
    responses = (getattr(cause, "response", None) for cause in (error, error.__cause__))  # one may wrap another
    status = next((response.status_code for response in responses if response is not None), None)
    if status in (401, 403, 404):
        revision = f"{dataset.repository} at {dataset.revision[:7]}"
        return MooringError(f"{endpoint} does not have {revision} (HTTP {status}): it has moved, please report it")
    if status is not None:
        return MooringError(f"{endpoint} answers with HTTP {status}: try again later")
    reason = f"{type(error).__name__}: {first_line(error)[:120]}"
    return MooringError(f"cannot fetch from {endpoint} ({reason}): check network and disk, or set HF_ENDPOINT")


@contextmanager
def _locked(partial: Path) -> Iterator[TextIO]:
    """Create the folder and lock it for this process; the lock is its manifest, which is empty until the end."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        opened = (partial / MANIFEST).open("a")
    except OSError as error:
        raise MooringError(f"cannot write {partial} ({error.strerror}): give another folder with --to") from error
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it when the process ends
        except OSError as error:
            raise MooringError(f"{partial} is being fetched by another process: wait for it") from error
        opened.truncate(0)
        yield opened
