"""The checkpoints of unfinished fleets on disk, and which runs can continue from which of them."""

import hashlib
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooring_lab.fleet import checkpoint
from mooring_lab.model.spec import RunSpec


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint on disk.

    Attributes:
        path: the file.
        runs: the keys of its runs, including those that were stopped before the checkpoint.
        steps: how many steps its runs have taken.
    """

    path: Path
    runs: frozenset[str]
    steps: int


@dataclass(frozen=True)
class CheckpointIndex:
    """The checkpoints in one folder of fleets that are trained with the same options.

    Args:
        folder: the folder of checkpoints.
        device: the device of the fleets.
        reject: whether the fleets reject runs.
        deterministic: whether the fleets are deterministic. Such a fleet continues whole, and only from a checkpoint
            of a deterministic fleet.

    Example:
        >>> CheckpointIndex(Path("study.sqlite.fleets"), "cpu", reject=False).entries()
        []
    """

    folder: Path
    device: str
    reject: bool
    deterministic: bool = False

    def path(self, runs: Collection[str]) -> Path:
        """Return the path of the checkpoint of a fleet of these runs, given by their keys."""
        name = repr((sorted(runs), self.reject, self.device, *(["deterministic"] if self.deterministic else [])))
        return self.folder / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.safetensors"

    def entries(self, note: Callable[[str], None] = lambda line: None) -> list[CheckpointEntry]:
        """Return every checkpoint: most steps first, and with equal steps fewest runs first.

        While a fleet is split, both the whole and its parts are on disk; the parts come before the whole.

        Args:
            note: called with a line for each checkpoint that cannot be read.
        """
        entries = []
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                entry = CheckpointEntry(path, frozenset(checkpoint.runs_in(path)), checkpoint.steps_in(path))
            except checkpoint.CheckpointError as error:
                note(f"{error}; its runs start again")
                continue
            if self.path(entry.runs) == path:
                entries.append(entry)
        return sorted(entries, key=lambda entry: (-entry.steps, len(entry.runs)))

    def sources(self, specs: Sequence[RunSpec]) -> list[Path]:
        """Return the checkpoints from which these runs can continue: their own first, then those of larger fleets."""
        own = self.path(_keys(specs))
        shared = [entry.path for entry in self.covering(specs) if entry.path != own]
        return [own, *shared] if own.exists() else shared

    def covering(self, specs: Sequence[RunSpec]) -> list[CheckpointEntry]:
        """Return the checkpoints that contain all of these runs, most steps first."""
        keys = _keys(specs)
        covers = operator.eq if self.deterministic else operator.ge
        return [entry for entry in self.entries() if covers(entry.runs, keys)]

    def split(self, parts: Sequence[Sequence[RunSpec]]) -> int:
        """Split the checkpoint of a fleet, if it has one, by the runs of each part; return the steps they have taken.

        A kill during the split leaves the whole and some of the parts, and no run without a checkpoint.
        """
        specs = [spec for part in parts for spec in part]
        own = self.path(_keys(specs))
        for source in self.sources(specs):
            try:
                steps = checkpoint.split(source, {self.path(_keys(part)): _keys(part) for part in parts})
            except checkpoint.CheckpointError:
                continue  # reported when the parts try to continue from it
            own.unlink(missing_ok=True)
            return steps
        return 0


def _keys(specs: Sequence[RunSpec]) -> frozenset[str]:
    return frozenset(spec.key for spec in specs)
