"""How many runs sail together: as many as fit into memory, and no more than make it faster."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mooring.lab.engines.device_memory import free
from mooring.lab.engines.runner import steps_of
from mooring.lab.engines.size_probe import Tried, tried
from mooring.lab.fleet.evaluation import resident_bytes
from mooring.lab.fleet.grouping import fleet_shape, split_evenly
from mooring.lab.methods import find_method
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import BackboneWeights, initial_network
from mooring.lab.streams.stream import Stream

__all__ = ["AT_ONCE", "Size", "Sizes"]

AT_ONCE = {"cpu": 128, "cuda": 512}
"""The most runs that sail together unless asked for, by kind of device. On a CPU more no longer fit into its caches."""

FEW = 16
"""So many sail together without further ado."""

WORTH = {"cpu": 100_000, "cuda": 1_000_000}
"""How many run-steps must lie ahead for a trial to pay, by kind of device. A GPU is faster, and compiles first."""

FIRST = 8
"""Runs in the first trial; each other has twice as many as the one before."""

FASTER = 1.08
"""By what factor twice as many runs must be faster for twice as many again to be tried."""

SHARE = 0.02
"""After two trials, which are warm by then, no other may take more than this part of the work that lies ahead."""

SOME_MORE = 1.5
"""So many times the best size still sail together, where splitting them would leave much smaller fleets."""

ROOM, ROUGH_ROOM = 0.8, 0.5
"""What part of the free memory is used, where a run's share was measured and where it was counted."""


NOMINAL = {"cpu": 4 << 30, "cuda": 16 << 30}
"""Bytes that a machine is taken to have free where the number of runs must be the same each time."""


@dataclass(frozen=True)
class Size:
    """How large fleets of a shape are.

    Attributes:
        best: the number of runs that is fastest, of those that fit.
        fits: the number of runs that fit into memory.
        why: what was found out, where there was a trial.
    """

    best: int
    fits: int
    why: str = ""

    def of(self, runs: int) -> int:
        """The most runs in a fleet, of so many in all.

        Example:
            >>> [Size(best=64, fits=1000).of(runs) for runs in (40, 96, 97)]
            [40, 96, 64]
        """
        return runs if runs <= min(self.fits, SOME_MORE * self.best) else min(self.best, self.fits)


@dataclass
class Sizes:
    """Decides how many runs of a shape sail together, each shape once.

    Args:
        streams: by fingerprint.
        weights: what backbones start from, by fingerprint.
        device: where to compute.
        note: told what was chosen and why, where there was a trial.
        trial: lets runs sail a little way; see `mooring.lab.engines.size_probe.tried`.
        free: bytes that could be had on the device.
        fixed: the same number each time, by a rough count and a nominal memory: nothing is measured.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> specs = [RunSpec("digits", stream.fingerprint, "plain", seed) for seed in range(12)]
        >>> Sizes({stream.fingerprint: stream})(specs)
        12
    """

    streams: Mapping[str, Stream]
    weights: Mapping[str, BackboneWeights] = field(default_factory=dict)
    device: str = "cpu"
    note: Callable[[str], None] = lambda line: None
    trial: Callable[..., Tried | None] = tried
    free: Callable[[str], int] = free
    fixed: bool = False

    def __post_init__(self) -> None:
        """Nothing is known yet."""
        self.kind = torch.device(self.device).type
        self.known: dict[tuple[object, ...], Size] = {}

    def __call__(self, runs: Sequence[RunSpec]) -> int:
        """The most of these runs, which are of one shape, to sail together."""
        key = fleet_shape(runs[0])
        if key not in self.known:
            self.known[key] = self._size(runs)
            if self.known[key].why:
                parts = split_evenly(runs, self.known[key].of(len(runs)))
                how = f"{len(parts[0])} at a time" if len(parts) > 1 else "all at once"
                self.note(f"{len(runs)} runs of {runs[0].network}, {how}: {self.known[key].why}")
        return self.known[key].of(len(runs))

    def _size(self, runs: Sequence[RunSpec]) -> Size:
        """By a trial where one pays, else by a rough count."""
        spec, stream = runs[0], self.streams[runs[0].data]
        counted = self._counted(spec, stream)
        work = len(runs) * steps_of(spec, stream)
        small = self.kind == "cpu" and counted.best < 2 * FIRST  # memory decides, and there it is only counted
        if self.fixed or len(runs) <= FEW or work < WORTH[self.kind] or small:
            return counted
        return self._tried(sorted(runs, key=_weight, reverse=True), stream, counted, work)

    def _counted(self, spec: RunSpec, stream: Stream) -> Size:
        """By what a run takes, roughly: a dozen numbers for each weight, a few hundred for each pixel of a batch."""
        weights = sum(p.numel() for p in initial_network(spec.network, stream, 0).parameters())
        pixels = stream.train.images[0].numel() * spec.batch
        each = (8 if spec.dtype == "float64" else 4) * (12 * weights + 200 * pixels)
        room = NOMINAL[self.kind] if self.fixed else self.free(self.device)
        fits = max(1, int(ROUGH_ROOM * room) // each)
        return Size(min(fits, AT_ONCE[self.kind]), fits)

    def _tried(self, runs: Sequence[RunSpec], stream: Stream, counted: Size, work: int) -> Size:
        """By fleets that sail a little way, each twice as large as the one before, while that makes them faster.

        Args:
            runs: the runs, those that take most memory first.
            stream: what they go through.
            counted: what a rough count says.
            work: how many run-steps lie ahead.
        """
        room = ROOM * self.free(self.device) - stream.train.images.nbytes - resident_bytes(stream.test)
        tries: list[Tried] = []
        size = FIRST
        while True:
            found = self._faster(runs[:size], stream, tries)
            if found is None:
                best = tries[-1].runs if tries else size // 2
                return Size(best, best, _why(tries, "more do not fit into memory"))
            if found.runs < size:
                return counted  # some were lost all the same
            tries.append(found)
            fits = counted.fits if found.peak is None else _fits(tries, room)
            if len(tries) > 1 and tries[-2].each < FASTER * found.each:
                return Size(min(tries, key=lambda t: t.each).runs, fits, _why(tries, "more at once are no faster"))
            if len(runs) <= min(fits, SOME_MORE * size):
                return Size(size, fits, _why(tries))
            more = min(2 * size, fits, AT_ONCE[self.kind], len(runs))
            if more < SOME_MORE * size:
                reason = "more do not fit into memory" if more == fits else "more are seldom faster"
                return Size(more, fits, _why(tries, reason))
            if len(tries) > 1 and 2 * found.took > SHARE * work * found.each:
                return Size(min(fits, AT_ONCE[self.kind]), fits)  # to know better would cost more than it saves
            size = more

    def _faster(self, runs: Sequence[RunSpec], stream: Stream, tries: Sequence[Tried]) -> Tried | None:
        """A trial; once more where it is no faster than the one before: something else may have used the machine."""
        found = self.trial(runs, stream, device=self.device, weights=self.weights)
        if found is not None and tries and tries[-1].each < FASTER * found.each:
            again = self.trial(runs, stream, device=self.device, weights=self.weights)
            found = again and min(found, again, key=lambda each: each.each)
        return found


def _weight(spec: RunSpec) -> int:
    """How much is kept for a run beside its weights: nothing, some, or more."""
    importance = find_method(spec.method).importance
    return 0 if importance is None else 1 + importance(0).needs_step


def _fits(tries: Sequence[Tried], room: float) -> int:
    """How many runs fit by what the last trials took: so much for a fleet, and so much for each run.

    Example:
        >>> _fits([Tried(8, 0.1, 1, peak=1800), Tried(16, 0.1, 1, peak=2600)], room=11_000)
        100
        >>> _fits([Tried(8, 0.1, 1, peak=1800)], room=11_000)  # at least: a fleet's share may be in it
        48
    """
    before, last = (tries[-2] if len(tries) > 1 else Tried(0, 0.0, 0.0)), tries[-1]
    taken = last.peak or 0
    each = max(1.0, (taken - (before.peak or 0)) / (last.runs - before.runs))
    return max(1, int((room - taken) / each + last.runs))


def _why(tries: Sequence[Tried], reason: str = "") -> str:
    """What was found out, in a few words."""
    each = min((found.each for found in tries), default=0.0)
    told = f"{each * 1e6:.0f} us" if each < 1e-3 else f"{each * 1e3:.1f} ms"
    return ", and ".join(part for part in (f"{told} for a step of each" if tries else "", reason) if part)
