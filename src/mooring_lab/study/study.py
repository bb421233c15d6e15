"""A study: runs and their results in one file. It trains the runs that have no result yet."""

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mooring.errors import MooringError, check_whole
from mooring_lab.engines.checkpoint_index import CheckpointIndex
from mooring_lab.engines.engine import Engine, check_engine, open_engine
from mooring_lab.engines.runner import CHECKPOINT_SECONDS, Reporter, RunContext, SilentReporter, steps_per_run
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.grouping import group_into_fleets
from mooring_lab.methods import find_method
from mooring_lab.model.atomic_files import check_writable
from mooring_lab.model.gc_control import gc_frozen
from mooring_lab.model.known_methods import ALIASES
from mooring_lab.model.precision import configure_cublas
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row, summarize
from mooring_lab.model.training import Training
from mooring_lab.networks import versioned_name
from mooring_lab.networks.initialization import BackboneWeights, initial_network, read_weights
from mooring_lab.streams.options import StreamOptions, open_stream
from mooring_lab.streams.progress_callback import ProgressCallback
from mooring_lab.streams.stream import Stream
from mooring_lab.study.comparison import Comparison, comparison
from mooring_lab.study.store import Store, checkpoint_folder, lock_study

DEVICES = ("cpu", "cuda")
"""The kinds of devices that fleets train on."""

TEMPORARY_FILES = (".*.safetensors.*", ".driver-*")
"""Patterns of the files that a killed process leaves among the checkpoints."""


class Study:
    """A set of runs and their results, kept in one SQLite file.

    A run that has a result is never trained again: asking twice costs nothing, and adding a seed trains that seed. What
    was interrupted, by Ctrl-C or by a kill, continues from its last checkpoint when it is asked for again.

    Args:
        path: the file; it is created with the first result. Checkpoints go into a folder next to it.
        device: the device to train on.
        fleet: the most runs to train together; None decides by what fits into memory and what is fastest.
        every: seconds between checkpoints within a task.
        wait: wait for another process that runs this study, instead of refusing.
        reporter: the receiver of progress.
        engine: "local", one fleet after the other; or "ray", several at a time on this machine or on a cluster.
        address: the address of the Ray cluster; None starts one on this machine.
        share: with "ray", the part of a core or of a GPU that a fleet takes; several fleets share one.
        deterministic: give the same bits each time, on a GPU too. The size of fleets does not depend on measurements,
            and fleets are not split.

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
        self.device = check_device(device, local=engine == "local", deterministic=deterministic)
        self.fleet, self.every, self.wait = fleet, every, wait
        self.reporter = reporter or SilentReporter()
        if fleet is not None:
            check_whole("fleet", fleet, 1)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints of unfinished fleets."""
        return checkpoint_folder(self.store.path)

    def compare(self, asked: Comparison | None = None, *, baseline: str | None = None, **arguments: Any) -> list[Row]:
        """Train the runs of a comparison that have no result; return one row for each method at each setting.

        Args:
            asked: the comparison; None makes one of the arguments.
            baseline: a method to compare accuracy with, seed by seed.
            arguments: the arguments of `mooring_lab.study.comparison.comparison`.
        """
        asked = asked or comparison(**arguments)
        baseline = resolve_baseline(baseline, asked.methods)
        self.store.check_writable()
        specs: list[RunSpec] = []
        streams: dict[str, Stream] = {}
        weights: dict[str, BackboneWeights] = {}
        for source, options in asked.streams:
            training = options.on(self.device)
            stream, init, training = self.load(source, training, weights)
            streams[stream.fingerprint] = stream
            specs += asked.specs(training, stream.name, stream.fingerprint, init)
        return summarize(self.run(specs, streams, weights), baseline)

    def load(
        self, source: StreamOptions | Stream, training: Training, weights: dict[str, BackboneWeights]
    ) -> tuple[Stream, str, Training]:
        """Open a stream, read the backbone's initial weights, and refuse weights or networks that do not fit.

        Args:
            source: the stream, or the options to open it with.
            training: names the network and the file of weights.
            weights: receives the weights, by fingerprint.

        Returns:
            The stream; the fingerprint of the weights, empty for random weights; and the same training, in which a
            network of the user's own is named with a hash of what it is.
        """
        init = ""
        if training.init is not None:
            start = read_weights(training.init)
            init, weights[start.fingerprint] = start.fingerprint, start
        stream = self.open(source)
        network = initial_network(training.network, stream, 0, weights=weights.get(init))
        return stream, init, replace(training, network=versioned_name(training.network, network))

    def open(self, source: StreamOptions | Stream, progress: ProgressCallback | None = None) -> Stream:
        """Return the stream that the options describe, or the stream itself."""
        return source if isinstance(source, Stream) else open_stream(source, progress)

    def run(
        self,
        specs: Sequence[RunSpec],
        streams: Mapping[str, Stream],
        weights: Mapping[str, BackboneWeights] | None = None,
        *,
        reject: bool = False,
    ) -> list[Result]:
        """Train those runs that have no result, and return the results of all, in the order of `specs`.

        Args:
            specs: the runs.
            streams: the streams by fingerprint.
            weights: the initial weights of backbones by fingerprint.
            reject: stop runs whose penalty does not interpolate after the first task.
        """
        self.store.check_writable()
        with closing(self.reporter), gc_frozen():
            check_writable(self.store.path.parent)
            with lock_study(self.store.path, wait=self.wait):
                self._delete_leftovers()
                results = self._stored_results(specs, reject)
                missing = [spec for spec in dict.fromkeys(specs) if spec.key not in results]
                if missing:
                    shared = RunContext(
                        streams, weights or {}, self.device, self.every, self.reporter, self.deterministic
                    )
                    folder = self.checkpoints
                    engine = open_engine(self.engine, shared, folder, self.address, self.share)
                    planned = self._plan_fleets(missing, engine, reject, specs)
                    work = [len(fleet) * steps_per_run(fleet[0], streams[fleet[0].data]) for fleet in planned]
                    self.reporter.begin(planned, work, len(results))
                    engine.run(planned, self.store.add, reject=reject)
                    results = self._stored_results(specs, reject)
                    self._delete_leftovers()
                with suppress(OSError):
                    self.checkpoints.rmdir()  # it fails if a fleet is unfinished
        return [results[spec.key] for spec in dict.fromkeys(specs)]

    def results(self) -> list[Result]:
        """Return every result of the study."""
        return list(self.store.results())

    def _stored_results(self, specs: Sequence[RunSpec], reject: bool) -> dict[str, Result]:
        """Return the results that need no training. Without `reject`, a rejected run has to be trained."""
        results = self.store.get(specs)
        if reject:
            return {key: _reject_if_unstable(result) for key, result in results.items()}
        return {key: result for key, result in results.items() if result.status != "rejected"}

    def _plan_fleets(
        self, missing: Sequence[RunSpec], engine: Engine, reject: bool, specs: Sequence[RunSpec] = ()
    ) -> list[list[RunSpec]]:
        """Group runs into fleets: those of a checkpoint continue together, the others form new fleets.

        In a deterministic study the fleets are those of all runs that were asked for (`specs`), whatever is done.
        """
        waiting = {spec.key: spec for spec in missing}
        if self.deterministic:
            parts = [[spec for spec in fleet if spec.key in waiting] for fleet in self._group(list(specs), engine)]
            return [part for part in parts if part]
        planned = []
        for entry in CheckpointIndex(self.checkpoints, self.device, reject).entries(self.reporter.note):
            if fleet := [spec for key, spec in waiting.items() if key in entry.runs]:
                planned.append(fleet)
                waiting = {key: spec for key, spec in waiting.items() if key not in entry.runs}
        return planned + self._group(list(waiting.values()), engine)

    def _group(self, specs: list[RunSpec], engine: Engine) -> list[list[RunSpec]]:
        """Group runs into fleets of the size that the user or else the engine chose."""
        if not specs:
            return []
        limit = self.fleet
        return group_into_fleets(specs, engine.fleet_sizes(specs) if limit is None else lambda runs: limit)

    def _delete_leftovers(self) -> None:
        """Delete what a kill left: temporary files, and checkpoints of runs that all have their results."""
        for pattern in TEMPORARY_FILES:
            for path in self.checkpoints.glob(pattern):
                path.unlink(missing_ok=True)
        paths = sorted(self.checkpoints.glob("*.safetensors"))
        if not paths:
            return
        stored = {result.spec.key for result in self.store.results() if result.status != "rejected"}
        for path in paths:
            with suppress(MooringError):
                if checkpoint.runs_in(path) <= stored:
                    path.unlink(missing_ok=True)


def _reject_if_unstable(result: Result) -> Result:
    """Return the result as it would be if its penalty had been judged after the first task."""
    if not result.stability or not result.stability[0].warning or not find_method(result.spec.method).can_extrapolate:
        return result
    return replace(result, status="rejected", reason=result.stability[0].warning)


def resolve_baseline(baseline: str | None, methods: Sequence[str]) -> str | None:
    """Return the baseline by its registered name; refuse one that is not among the methods."""
    if baseline and ":" in baseline:
        baseline = find_method(baseline).name
    baseline = ALIASES.get(baseline, baseline) if baseline else None
    if baseline is not None and baseline not in methods:
        raise MooringError(
            f"the baseline {baseline!r} is not among the methods: they are {', '.join(methods)}; "
            "give one of them, or add it to --methods"
        )
    return baseline


def check_device(device: str, *, local: bool = True, deterministic: bool = False) -> str:
    """Return the device; refuse one that does not exist, and configure it.

    Args:
        device: its name.
        local: whether it must be on this machine.
        deterministic: whether it must give the same bits each time, which has to be configured before it starts.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in DEVICES:
        raise MooringError(f"unknown device {device!r}: give cpu, cuda or cuda:N")
    if not local:
        return device
    if kind == "cuda" and not torch.cuda.is_available():
        raise MooringError("cuda is not available here: give --device cpu")
    if deterministic:
        configure_cublas(device)
    index = torch.device(device).index
    if kind == "cuda" and index is not None:
        if index >= torch.cuda.device_count():
            raise MooringError(f"there is no {device} here: the last is cuda:{torch.cuda.device_count() - 1}")
        torch.cuda.set_device(device)  # our own kernels and CUDA graphs use the current device
    return device
