"""Pre-training: backbones trained on all classes of a stream at once, for streams to start from."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors.torch import save as to_bytes

from mooring.errors import MooringError, check_whole
from mooring.lab.engines.device_memory import is_out_of_memory
from mooring.lab.engines.runner import steps_per_run
from mooring.lab.fleet import checkpoint
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.gpu.run_kernel import NEVER
from mooring.lab.fleet.measurements import finite_runs
from mooring.lab.model.atomic_files import write_atomically
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.training import Training
from mooring.lab.streams.slices import merge_tasks
from mooring.lab.streams.stream import Stream
from mooring.lab.study.defaults import MAX_SEEDS

Report = Callable[[str, int, int | None], None]
Note = Callable[[str], None]

REPORT_STEPS = 50
"""Steps between two progress reports; each waits for the device to check that the runs are finite."""


@dataclass(frozen=True)
class Pretraining:
    """The settings of pre-training; the defaults train one backbone as in the paper.

    Attributes:
        network: a name, or `package.module:function`.
        seed: of the initialization, the data order, the flips and the shifts.
        epochs: passes over the data set.
        lr: the learning rate of the first epoch.
        batch: samples in a batch.
        momentum: of SGD.
        weight_decay: of SGD.
        flips: whether half of the images, chosen at random, are mirrored.
        shifts: the largest random shift of each image, in pixels, in both directions; black comes in.
        schedule: of the learning rate: "constant", "steps" or "cosine"; see `RunSpec`.
        seeds: the number of backbones, with this seed and those that follow it; each becomes what it becomes alone.
        dtype: of parameters and arithmetic; "auto" is tf32 on a GPU and float32 elsewhere.
    """

    network: str = "cnn6"
    seed: int = 0
    epochs: int = 60
    lr: float = 0.1
    batch: int = 128
    momentum: float = 0.9
    weight_decay: float = 1e-4
    flips: bool = True
    shifts: int = 0
    schedule: str = "steps"
    seeds: int = 1
    dtype: str = "auto"

    def __post_init__(self) -> None:
        """Refuse numbers outside their range, and unknown names."""
        check_whole("seeds", self.seeds, 1, MAX_SEEDS)
        self.spec(self.seed)

    def spec(self, seed: int, stream: str = "", data: str = "") -> RunSpec:
        """Return the run that trains the backbone of a seed.

        Args:
            seed: the run's.
            stream: the stream's name.
            data: the stream's fingerprint.
        """
        settings = asdict(self) | {"seed": seed, "dtype": "float32" if self.dtype == "auto" else self.dtype}
        del settings["seeds"]
        return RunSpec(stream, data, "plain", **settings)

    def on(self, device: str) -> "Pretraining":
        """Return settings whose dtype suits a device, as in a comparison.

        Example:
            >>> Pretraining().on("cuda").dtype, Pretraining().on("cpu").dtype
            ('tf32', 'float32')
        """
        return replace(self, dtype=Training(dtype=self.dtype).on(device).dtype)

    def files(self, path: Path) -> dict[int, Path]:
        """Return the backbone's file for each seed: `path` for one seed; names with the seed in them for several.

        Example:
            >>> [file.name for file in Pretraining(seed=3, seeds=2).files(Path("b.safetensors")).values()]
            ['b-3.safetensors', 'b-4.safetensors']
        """
        if self.seeds == 1:
            return {self.seed: path}
        seeds = range(self.seed, self.seed + self.seeds)
        return {seed: path.with_name(f"{path.stem}-{seed}{path.suffix}") for seed in seeds}


@dataclass(frozen=True)
class PretrainedBackbone:
    """A backbone that pre-training wrote.

    Attributes:
        path: its file.
        seed: the seed that it was trained with.
        accuracy: on the test images, in percent.
    """

    path: Path
    seed: int
    accuracy: float


def pretrain(
    stream: Stream,
    settings: Pretraining,
    path: Path,
    *,
    device: str = "cpu",
    report: Report | None = None,
    note: Note | None = None,
) -> list[PretrainedBackbone]:
    """Train backbones on all classes of a stream at once, and write each to a safetensors file.

    The seeds train side by side in one fleet, and each becomes what it becomes alone. After every epoch the fleet is
    saved next to `path`; an interrupted call continues from there.

    Args:
        stream: the images; its tasks become one.
        settings: how to train.
        path: the backbone's file; with several seeds, the name of each file contains its seed.
        device: where to compute.
        report: called with the number of finished steps and of all steps.
        note: called with what a user should know.

    Returns:
        The backbones, by seed.

    Example:
        >>> import tempfile
        >>> from mooring.lab.streams import by_class, digits
        >>> settings = Pretraining("mlp", epochs=1, seeds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     backbones = pretrain(by_class(digits(), 5), settings, Path(folder) / "b.safetensors")
        >>> [(backbone.path.name, backbone.seed) for backbone in backbones]
        [('b-0.safetensors', 0), ('b-1.safetensors', 1)]
    """
    settings = settings.on(device)
    side = min(stream.train.images.shape[2:])
    if settings.shifts >= side:
        raise MooringError(f"shifts={settings.shifts} moves images of {side} pixels out of sight: give fewer")
    try:
        return _pretrain(merge_tasks(stream), settings, path, device, report, note)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MooringError(f"memory ran out with seeds={settings.seeds}, batch={settings.batch}: give fewer") from error


def _pretrain(
    stream: Stream, settings: Pretraining, path: Path, device: str, report: Report | None, note: Note | None
) -> list[PretrainedBackbone]:
    files, partial = settings.files(path), path.with_name(f"{path.name}.partial")
    specs = [settings.spec(seed, stream.name, stream.fingerprint) for seed in files]
    fleet = _resumed(specs, stream, device, partial)
    epochs = _EpochCheckpoints(partial, steps_per_run(specs[0], stream), settings, report)
    if fleet.steps < epochs.steps:
        epochs.report_progress(fleet)
    results = fleet.run(epochs)
    epochs.check_finite(fleet)
    if note and fleet.recorder.failure:
        note(f"steps of {settings.network} could not be recorded, and took longer: {fleet.recorder.failure}")
    backbones = []
    for run, (result, (seed, file)) in enumerate(zip(results, files.items(), strict=True)):
        accuracy = result.matrix[0][0]
        metadata = asdict(replace(settings, seed=seed, seeds=1))  # as if alone
        metadata |= {"stream": stream.name, "accuracy": round(accuracy, 2), **result.versions}
        tensors = fleet.stack.network_of(run).backbone.state_dict()
        tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        write_atomically(file, to_bytes(tensors, metadata={"mooring": json.dumps(metadata)}))
        backbones.append(PretrainedBackbone(file, seed, accuracy))
    partial.unlink(missing_ok=True)
    return backbones


def _resumed(specs: list[RunSpec], stream: Stream, device: str, path: Path) -> Fleet:
    """Return the fleet where a checkpoint of exactly these runs left it, or a fresh one."""
    fleet = Fleet(specs, stream, device=device)
    try:
        if checkpoint.runs_in(path) == {spec.key for spec in specs}:
            checkpoint.restore(fleet, path)
    except checkpoint.CheckpointError:
        return Fleet(specs, stream, device=device)
    return fleet


class _EpochCheckpoints:
    """A callback that reports progress, stops at the first run that is not finite, and saves after each epoch."""

    def __init__(self, path: Path, steps: int, settings: Pretraining, report: Report | None) -> None:
        self.path, self.steps, self.settings, self.report = path, steps, settings, report
        self.epoch_steps = steps // settings.epochs

    def on_step(self, fleet: Fleet) -> None:
        epoch_ends = fleet.steps % self.epoch_steps == 0
        if epoch_ends or fleet.steps % REPORT_STEPS == 0:
            self.check_finite(fleet)
            self.report_progress(fleet)
        if epoch_ends:
            checkpoint.save(fleet, self.path)

    def on_task_end(self, fleet: Fleet) -> None:
        pass

    def report_progress(self, fleet: Fleet) -> None:
        if self.report:
            self.report("pre-training", fleet.steps, self.steps)

    def check_finite(self, fleet: Fleet) -> None:
        """Refuse to go on with a run that is not finite, by the step in which that was first seen."""
        steps = {result.spec.seed: result.steps for result in fleet.results if result.status == "unstable"}
        finite = finite_runs([p.detach() for p in fleet.stack.parameters.values()]).tolist()
        for spec, bad, fine in zip(fleet.specs, fleet.first_bad.tolist(), finite, strict=False):
            if bad < NEVER or not fine:
                steps[spec.seed] = min(bad, fleet.steps - 1)
        if steps:
            seed = min(steps)
            whose = f" of seed {seed}" if self.settings.seeds > 1 else ""
            epoch = steps[seed] // self.epoch_steps + 1
            raise MooringError(f"the loss{whose} is not finite in epoch {epoch}: lower the learning rate")
