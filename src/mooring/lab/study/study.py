"""A study: runs, their results in one file, and whatever is still missing."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mooring.backends.gc_control import gc_frozen
from mooring.errors import MooringError, check_whole
from mooring.lab.engines.checkpoint_index import Unfinished
from mooring.lab.engines.choice import Engine, check_engine, engine
from mooring.lab.engines.reporting import Reporter, Silent
from mooring.lab.engines.runner import CHECKPOINT_SECONDS, Aboard, steps_of
from mooring.lab.engines.sizing import AT_ONCE
from mooring.lab.fleet import checkpoint
from mooring.lab.fleet.grouping import group_into_fleets
from mooring.lab.methods import find_method
from mooring.lab.methods.registry import ALIASES
from mooring.lab.model.atomic_files import check_writable
from mooring.lab.model.determinism import configure_cublas
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import Row, summarize
from mooring.lab.model.training import Training
from mooring.lab.networks.initialization import BackboneWeights, initial_network, read_weights
from mooring.lab.streams.options import StreamOptions, open_stream
from mooring.lab.streams.progress_callback import ProgressCallback
from mooring.lab.streams.stream import Stream
from mooring.lab.study.comparison import Comparison, comparison
from mooring.lab.study.lock import lock_study
from mooring.lab.study.store import Store, checkpoint_folder

__all__ = ["Study", "read_start"]

SCRATCH = (".*.safetensors.*", ".driver-*")
"""What a process that was killed leaves among its checkpoints."""


class Study:
    """A set of runs and their results, kept in one SQLite file.

    A run that has a result is never trained again: asking twice costs nothing, and adding a seed runs that seed. What
    is interrupted, by Ctrl-C or by a kill, continues where it was when it is asked for again.

    Args:
        path: the file; it is made when there is something to keep. Checkpoints go into a folder beside it.
        device: where to compute.
        fleet: the most runs to train together; None decides by what fits into memory and what is fastest.
        every: seconds between checkpoints within a task.
        wait: wait for another process that runs this study, instead of refusing.
        reporter: who is told how it gets on.
        engine: "local", here; or "ray", side by side on this machine or on a cluster.
        address: of the Ray cluster; None for one on this machine.
        share: with "ray", the part of a core or of a GPU that a fleet takes; several fleets share one.
        deterministic: the same bits each time, on a GPU too: fleets are of a size that nothing is measured for, and
            stay whole.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     study = Study(Path(folder) / "digits.sqlite")
        ...     rows = study.compare(stream="digits", methods=["plain", "explicit-mas"], seeds=2, epochs=1)
        >>> [row.label for row in rows]
        ['plain', 'explicit-mas']
    """

    def __init__(
        self,
        path: Path | str,
        *,
        device: str = "cpu",
        fleet: int | None = None,
        every: float = CHECKPOINT_SECONDS,
        wait: bool = False,
        reporter: Reporter | None = None,
        engine: str = "local",
        address: str | None = None,
        share: float = 1.0,
        deterministic: bool = False,
    ) -> None:
        self.store = Store(path)
        check_engine(engine, address, share)
        self.engine, self.address, self.share, self.deterministic = engine, address, share, deterministic
        self.device = checked_device(device, here=engine == "local", deterministic=deterministic)
        self.fleet, self.every, self.wait = fleet, every, wait
        self.reporter = reporter or Silent()
        if fleet is not None:
            check_whole("fleet", fleet, 1)

    @property
    def checkpoints(self) -> Path:
        """The folder of unfinished fleets."""
        return checkpoint_folder(self.store.path)

    def compare(self, asked: Comparison | None = None, *, baseline: str | None = None, **told: Any) -> list[Row]:
        """Run what is missing of a comparison; one row for each method at each setting.

        Args:
            asked: the comparison; or give the arguments of `mooring.lab.study.comparison.comparison`.
            baseline: a method to compare accuracy with, seed by seed.
            told: those arguments.
        """
        asked = asked or comparison(**told)
        baseline = checked_baseline(baseline, asked.methods)
        self.store.check_writable()
        specs: list[RunSpec] = []
        streams: dict[str, Stream] = {}
        weights: dict[str, BackboneWeights] = {}
        for source, training in ((each, how.on(self.device)) for each, how in asked.streams):
            init = read_start(training, weights)
            stream = self.open(source)
            initial_network(training.network, stream, 0, weights=weights.get(init))  # refused here, if it is to be
            streams[stream.fingerprint] = stream
            specs += asked.specs(training, stream.name, stream.fingerprint, init)
        return summarize(self.run(specs, streams, weights), baseline)

    def open(self, source: StreamOptions | Stream, progress: ProgressCallback | None = None) -> Stream:
        """The stream that options ask for; a stream made in Python is one already."""
        return source if isinstance(source, Stream) else open_stream(source, progress)

    def run(
        self,
        specs: Sequence[RunSpec],
        streams: Mapping[str, Stream],
        weights: Mapping[str, BackboneWeights] | None = None,
        *,
        reject: bool = False,
    ) -> list[Result]:
        """The results of these runs, in their order; those that are missing are trained first.

        Args:
            specs: the runs.
            streams: by fingerprint.
            weights: what backbones start from, by fingerprint.
            reject: take out runs whose penalty does not interpolate after the first task.
        """
        self.store.check_writable()
        try:
            with gc_frozen():
                return self._run(specs, streams, weights or {}, reject)
        finally:
            self.reporter.close()

    def _run(
        self,
        specs: Sequence[RunSpec],
        streams: Mapping[str, Stream],
        weights: Mapping[str, BackboneWeights],
        reject: bool,
    ) -> list[Result]:
        check_writable(self.store.path.parent)
        with lock_study(self.store.path, wait=self.wait):
            self._tidy()
            found = self._done(specs, reject)
            missing = [spec for spec in dict.fromkeys(specs) if spec.key not in found]
            if missing:
                aboard = Aboard(streams, weights, self.device, self.every, self.reporter, self.deterministic)
                runner = engine(self.engine, aboard, self.checkpoints, self.address, self.share)
                planned = self._planned(missing, runner, reject, specs)
                work = [len(fleet) * steps_of(fleet[0], streams[fleet[0].data]) for fleet in planned]
                self.reporter.begin(planned, work, len(found))
                runner.run(planned, self.store.add, reject=reject)
                found = self._done(specs, reject)
                self._tidy()
            with suppress(OSError):
                self.checkpoints.rmdir()  # where nothing is unfinished
        return [found[spec.key] for spec in dict.fromkeys(specs)]

    def results(self) -> list[Result]:
        """Every result there is."""
        return list(self.store.results())

    def _done(self, specs: Sequence[RunSpec], reject: bool) -> dict[str, Result]:
        """What need not be trained. A rejected run is trained where nothing is to be rejected."""
        found = self.store.get(specs)
        if reject:
            return {key: _rejected(result) for key, result in found.items()}
        return {key: result for key, result in found.items() if result.status != "rejected"}

    def _planned(
        self, missing: Sequence[RunSpec], runner: Engine, reject: bool, asked: Sequence[RunSpec] = ()
    ) -> list[list[RunSpec]]:
        """Runs that were interrupted together go on together; the rest is put together anew.

        Where the same bits are to come each time, fleets are those of all that was asked for, whatever is done.
        """
        waiting = {spec.key: spec for spec in missing}
        if self.deterministic:
            every = self._fleets(list(asked), runner)
            parts = [[spec for spec in fleet if spec.key in waiting] for fleet in every]
            return [part for part in parts if part]
        planned = []
        for saved in Unfinished(self.checkpoints, self.device, reject).found(self.reporter.note):
            if fleet := [spec for key, spec in waiting.items() if key in saved.runs]:
                planned.append(fleet)
                waiting = {key: spec for key, spec in waiting.items() if key not in saved.runs}
        return planned + self._fleets(list(waiting.values()), runner)

    def _fleets(self, specs: list[RunSpec], runner: Engine) -> list[list[RunSpec]]:
        """Runs put together, as many as was asked for or as is best."""
        most = self.fleet
        return group_into_fleets(specs, runner.sizes(specs) if most is None else lambda runs: most) if specs else []

    def _tidy(self) -> None:
        """Delete what a kill left: files half written, and checkpoints of runs that have their results."""
        for scratch in (each for kind in SCRATCH for each in self.checkpoints.glob(kind)):
            scratch.unlink(missing_ok=True)
        left = sorted(self.checkpoints.glob("*.safetensors"))
        kept = {result.spec.key for result in self.store.results() if result.status != "rejected"} if left else set()
        for path in left:
            with suppress(MooringError):
                if checkpoint.runs_in(path) <= kept:
                    path.unlink(missing_ok=True)


def _rejected(result: Result) -> Result:
    """The result as it would be had its penalty been judged after the first task."""
    if not result.stability or not result.stability[0].warning or not find_method(result.spec.method).can_extrapolate:
        return result
    return replace(result, status="rejected", reason=result.stability[0].warning)


def read_start(training: Training, known: dict[str, BackboneWeights]) -> str:
    """The fingerprint of the weights to start from, read and remembered; nothing for a random start."""
    if training.init is None:
        return ""
    found = read_weights(training.init)
    known[found.fingerprint] = found
    return found.fingerprint


def checked_baseline(baseline: str | None, methods: Sequence[str]) -> str | None:
    """The baseline by its own name; refused where it is not compared."""
    baseline = ALIASES.get(baseline, baseline) if baseline else None
    if baseline is not None and baseline not in methods:
        among = f"the baseline {baseline!r} is not among the methods: they are {', '.join(methods)}"
        raise MooringError(f"{among}; give one of them, or add it to --methods")
    return baseline


def checked_device(device: str, *, here: bool = True, deterministic: bool = False) -> str:
    """The device, refused where there is none.

    Args:
        device: its name.
        here: whether it must be on this machine.
        deterministic: whether it must give the same bits each time, which is settled before it starts.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in AT_ONCE:
        raise MooringError(f"unknown device {device!r}: give cpu, cuda or cuda:N")
    if not here:
        return device
    if kind == "cuda" and not torch.cuda.is_available():
        raise MooringError("cuda is not available here: give --device cpu")
    if deterministic:
        configure_cublas(device)
    number = torch.device(device).index
    if kind == "cuda" and number is not None:
        if number >= torch.cuda.device_count():
            raise MooringError(f"there is no {device} here: the last is cuda:{torch.cuda.device_count() - 1}")
        torch.cuda.set_device(device)  # kernels of our own and recordings go to the current one
    return device
