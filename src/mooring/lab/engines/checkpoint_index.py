"""Unfinished fleets on disk: which runs continue from where."""

import hashlib
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooring.lab.fleet import checkpoint
from mooring.lab.model.spec import RunSpec

__all__ = ["Saved", "Unfinished"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
        path: where it is.
        runs: the keys of its runs, those that were lost on the way included.
        steps: how many steps they have behind them.
    """

    path: Path
    runs: frozenset[str]
    steps: int


@dataclass(frozen=True)
class Unfinished:
    """The checkpoints of fleets that sail in one way, in one folder.

    Args:
        folder: where they are.
        device: where the fleets compute.
        reject: whether they reject runs.
        deterministic: whether they give the same bits each time: they continue whole, and from their like only.

    Example:
        >>> Unfinished(Path("study.sqlite.fleets"), "cpu", reject=False).found()
        []
    """

    folder: Path
    device: str
    reject: bool
    deterministic: bool = False

    def path(self, runs: Collection[str]) -> Path:
        """Where the checkpoint of these runs together is, by their keys."""
        name = repr((sorted(runs), self.reject, self.device, *(["deterministic"] if self.deterministic else [])))
        return self.folder / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.safetensors"

    def found(self, note: Callable[[str], None] = lambda line: None) -> list[Saved]:
        """Every checkpoint there is: the furthest first, and of equals the smallest.

        A fleet that was split is on disk whole and in parts for a moment: the parts go before the whole.

        Args:
            note: told of those that cannot be read.
        """
        every = []
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                saved = Saved(path, frozenset(checkpoint.runs_in(path)), checkpoint.steps_in(path))
            except checkpoint.CheckpointError as error:
                note(f"{error}; its runs start again")
                continue
            if self.path(saved.runs) == path:
                every.append(saved)
        return sorted(every, key=lambda saved: (-saved.steps, len(saved.runs)))

    def sources(self, specs: Sequence[RunSpec]) -> list[Path]:
        """Where these runs can continue from: a checkpoint of their own, or else one that they share with others."""
        own = self.path(_keys(specs))
        shared = [saved.path for saved in self.covering(specs) if saved.path != own]
        return [own, *shared] if own.exists() else shared

    def covering(self, specs: Sequence[RunSpec]) -> list[Saved]:
        """The checkpoints that have all of these runs, the furthest first."""
        keys = _keys(specs)
        fits = operator.eq if self.deterministic else operator.ge
        return [saved for saved in self.found() if fits(saved.runs, keys)]

    def split(self, parts: Sequence[Sequence[RunSpec]]) -> int:
        """Give parts of a fleet checkpoints of their own, where it has one, and delete that.

        A kill in between leaves the whole and some of the parts, and no run without a checkpoint.

        Args:
            parts: the runs of each.

        Returns:
            How many steps they have behind them.
        """
        every = [spec for part in parts for spec in part]
        own = self.path(_keys(every))
        for source in self.sources(every):
            try:
                steps = checkpoint.split(source, {self.path(_keys(part)): _keys(part) for part in parts})
            except checkpoint.CheckpointError:
                continue  # told when the parts try to continue from it
            own.unlink(missing_ok=True)
            return steps
        return 0


def _keys(specs: Sequence[RunSpec]) -> frozenset[str]:
    return frozenset(spec.key for spec in specs)
