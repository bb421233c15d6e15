"""Pre-training: backbones trained on all classes of a stream at once, for streams to start from."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from mooring.errors import MooringError, check_whole, unknown
from mooring_lab.engines.device_memory import is_out_of_memory
from mooring_lab.engines.runner import steps_per_run
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.gpu.run_kernel import NEVER
from mooring_lab.fleet.measurements import finite_runs
from mooring_lab.model.atomic_files import check_writable, write_atomically
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.training import Training
from mooring_lab.streams.slices import merge_tasks
from mooring_lab.streams.stream import Stream
from mooring_lab.study.defaults import MAX_SEEDS

Report = Callable[[str, int, int | None], None]
Note = Callable[[str], None]

CHANCE_TOLERANCE = 0.01
"""Points of accuracy by which rounding may change that of a constant prediction."""

REPORT_STEPS = 50
"""Steps between two progress reports; each waits for the device to check that the runs are finite."""


@dataclass(frozen=True)
class Pretraining:
    """The settings of pre-training; the defaults are the paper's, for one backbone.

    Attributes:
        network: a name, or `package.module:function`.
        seed: of the initialization, the data order, the flips and the shifts.
        epochs: passes over the data set.
        lr: the learning rate of the first epoch.
        batch: samples in a batch.
        momentum: of SGD, or the first beta of AdamW.
        weight_decay: of the optimizer.
        flips: whether half of the images, chosen at random, are mirrored.
        shifts: the largest random shift of each image, in pixels, in both directions; black comes in.
        schedule: of the learning rate: "constant", "steps", "cosine" or "warmup-linear"; see `RunSpec`.
        optimizer: "sgd" or "adamw".
        seeds: the number of backbones, with this seed and those that follow it; each becomes what it becomes alone.
        dtype: of parameters and arithmetic; "auto" is tf32 on a GPU and float32 elsewhere.
        recipe: the name of the recipe that the settings started from; empty if there was none.
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
    optimizer: str = "sgd"
    seeds: int = 1
    dtype: str = "auto"
    recipe: str = ""

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
        del settings["seeds"], settings["recipe"]
        return RunSpec(stream, data, "plain", **settings)

    def on(self, device: str) -> "Pretraining":
        """Return settings whose dtype suits a device, as in a comparison.

        Example:
            >>> Pretraining().on("cuda").dtype, Pretraining().on("cpu").dtype
            ('tf32', 'float32')
        """
        return replace(self, dtype=Training(dtype=self.dtype).on(device).dtype)

    @property
    def all_seeds(self) -> range:
        """The seed and those that follow it."""
        return range(self.seed, self.seed + self.seeds)

    @property
    def description(self) -> str:
        """Network, recipe, epochs and seeds in a few words.

        Example:
            >>> Pretraining(seeds=5, recipe="paper").description, Pretraining("mlp", seed=3, epochs=1).description
            ('cnn6 (paper, 60 epochs, seeds 0 to 4)', 'mlp (1 epoch, seed 3)')
        """
        seeds = f"seeds {self.seed} to {self.all_seeds[-1]}" if self.seeds > 1 else f"seed {self.seed}"
        return f"{self.network} ({', '.join(filter(None, [self.recipe, pluralize(self.epochs, 'epoch'), seeds]))})"

    def files(self, path: Path) -> dict[int, Path]:
        """Return the backbone's file for each seed: `path` for one seed; names with the seed in them for several.

        Example:
            >>> [file.name for file in Pretraining(seed=3, seeds=2).files(Path("b.safetensors")).values()]
            ['b-3.safetensors', 'b-4.safetensors']
        """
        if self.seeds == 1:
            return {self.seed: path}
        return {seed: _file_of_seed(path, seed) for seed in self.all_seeds}


def _file_of_seed(path: Path, seed: int) -> Path:
    return path.with_name(f"{path.stem}-{seed}{path.suffix}")


def _partial(path: Path) -> Path:
    """Return the file of the checkpoint after each epoch."""
    return path.with_name(f"{path.name}.partial")


RECIPES = {
    "paper": Pretraining(epochs=60, lr=0.1, schedule="steps", weight_decay=1e-4, shifts=0, recipe="paper"),
    "strong": Pretraining(epochs=30, lr=0.05, schedule="cosine", weight_decay=5e-4, shifts=4, recipe="strong"),
}
"""Settings of pre-training by name: the paper's, and others that give a more accurate backbone in half the epochs."""


def settings_by_recipe(name: str, **overrides: Any) -> Pretraining:
    """Return the settings of a recipe, with overrides that are not None.

    Example:
        >>> settings = settings_by_recipe("strong", epochs=5, lr=None)
        >>> settings.epochs, settings.lr, settings.shifts, settings.recipe
        (5, 0.05, 4, 'strong')
    """
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return replace(RECIPES[name], **{field: value for field, value in overrides.items() if value is not None})


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
        report: called with what is trained, the number of finished steps and that of all steps.
        note: called with what a user should know.

    Returns:
        The backbones, by seed.

    Example:
        >>> import tempfile
        >>> from mooring_lab.streams import by_class, digits
        >>> settings = Pretraining("mlp", epochs=1, seeds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     backbones = pretrain(by_class(digits(), 5), settings, Path(folder) / "b.safetensors")
        >>> [(backbone.path.name, backbone.seed) for backbone in backbones]
        [('b-0.safetensors', 0), ('b-1.safetensors', 1)]
    """
    return _Pretrainer(stream, device, report, note).train(settings, path)


def pretrain_missing(
    stream: Stream,
    plans: Sequence[Pretraining],
    folder: Path,
    *,
    device: str = "cpu",
    report: Report | None = None,
    note: Note | None = None,
) -> list[list[Path]]:
    """Return a file for each backbone, all in one folder; train those that the folder does not have yet.

    A file is used again if it was trained with the same settings and seed on the same images, in any dtype. Another
    file with its name is replaced. An interrupted call continues. A network without normalization may stay at chance
    with some seeds, for example at a learning rate of 0.1. Such a backbone is left out, and the next seed replaces it.

    Args:
        stream: the images; its tasks become one.
        plans: settings, each for one or several seeds.
        folder: created if missing. The name of a file has network, recipe, epochs and seed.
        device: where to compute.
        report: called with what is trained, the number of finished steps and that of all steps.
        note: called with what a user should know.

    Returns:
        The files of each plan, by seed.

    Raises:
        MooringError: if more than half of the seeds of a plan stay at chance.

    Example:
        >>> import tempfile
        >>> from mooring_lab.streams import by_class, digits
        >>> plan = settings_by_recipe("paper", network="mlp", epochs=1, seeds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [files] = pretrain_missing(by_class(digits(), 5), [plan], Path(folder))
        >>> [file.name for file in files]
        ['mlp-paper-1-epoch-0.safetensors', 'mlp-paper-1-epoch-1.safetensors']
    """
    check_writable(folder)
    pretrainer = _Pretrainer(stream, device, report, note)
    return [pretrainer.files_that_learned(plan, folder) for plan in plans]


def is_at_chance(accuracy: float, stream: Stream) -> bool:
    """Return whether an accuracy, in percent, is no better than always naming the most frequent class.

    A network whose units have all died does exactly that; a weak one does better.

    Args:
        accuracy: on the test images.
        stream: has one task, as from `merge_tasks`.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = merge_tasks(by_class(digits(), 5))
        >>> is_at_chance(10.0, stream), is_at_chance(15.0, stream)
        (True, False)
    """
    counts = stream.test.labels[stream.tasks[0].test].bincount()
    return accuracy <= 100 * counts.max().item() / counts.sum().item() + CHANCE_TOLERANCE


def read_metadata(path: Path | str) -> dict[str, Any]:
    """Return what a backbone's file says about its pre-training, such as "accuracy"; empty if it says nothing.

    The accuracy may also be in the file's own metadata, as "test_accuracy".
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        ours = json.loads(metadata.get("mooring", "{}"))
        return {"accuracy": float(metadata["test_accuracy"]), **ours} if "test_accuracy" in metadata else dict(ours)
    except (OSError, SafetensorError, ValueError, TypeError):
        return {}


class _Pretrainer:
    """Pre-training on all classes of a stream, on one device."""

    def __init__(self, stream: Stream, device: str, report: Report | None, note: Note | None) -> None:
        self.stream, self.device, self.report, self.note = merge_tasks(stream), device, report, note

    def files_that_learned(self, plan: Pretraining, folder: Path) -> list[Path]:
        """Return as many files as the plan has seeds; seeds that stay at chance are replaced by those that follow."""
        name = f"{plan.network}-{plan.recipe or 'own'}-{pluralize(plan.epochs, 'epoch')}".replace(" ", "-")
        path = folder / f"{name}.safetensors"
        tried = plan
        while True:
            missing = self._missing_seeds(tried, path)
            for _, following in groupby(enumerate(missing), lambda pair: pair[1] - pair[0]):  # seeds without a gap
                seeds = [seed for _, seed in following]
                place = path if len(seeds) > 1 else _file_of_seed(path, seeds[0])
                self.train(replace(tried, seed=seeds[0], seeds=len(seeds)), place)
            files = [_file_of_seed(path, seed) for seed in tried.all_seeds]
            learned = [file for file in files if not is_at_chance(read_metadata(file)["accuracy"], self.stream)]
            if len(learned) >= plan.seeds:
                return learned[: plan.seeds]
            if tried.seeds >= 2 * plan.seeds:
                raise MooringError(
                    f"{len(files) - len(learned)} of {len(files)} seeds of {plan.network} stayed at chance when "
                    "pre-trained: give another recipe, or trained backbones with --init"
                )
            tried = replace(plan, seeds=plan.seeds + tried.seeds - len(learned))

    def _missing_seeds(self, plan: Pretraining, path: Path) -> list[int]:
        """Return the seeds without a file, and those that an interrupted call trained together with them."""
        missing = {s for s in plan.all_seeds if not self._is_trained(_file_of_seed(path, s), replace(plan, seed=s))}
        settings = plan.on(self.device)
        keys = {s: settings.spec(s, data=self.stream.fingerprint).key for s in plan.all_seeds if missing}
        try:
            runs = checkpoint.runs_in(_partial(path))
        except checkpoint.CheckpointError:
            runs = set()
        interrupted = {seed for seed, key in keys.items() if key in runs}
        return sorted(missing | interrupted if missing & interrupted else missing)

    def _is_trained(self, file: Path, settings: Pretraining) -> bool:
        """Return whether a file has the backbone that these settings give, in any dtype."""
        free = ("seeds", "dtype", "recipe")
        wanted = {name: value for name, value in asdict(settings).items() if name not in free}
        wanted["data"] = self.stream.fingerprint
        return wanted.items() <= {"optimizer": "sgd", **read_metadata(file)}.items()  # earlier files do not name it

    def train(self, settings: Pretraining, path: Path) -> list[PretrainedBackbone]:
        """Train the backbones of these settings, and write their files."""
        settings = settings.on(self.device)
        side = min(self.stream.train.images.shape[2:])
        if settings.shifts >= side:
            raise MooringError(f"shifts={settings.shifts} moves images of {side} pixels out of sight: give fewer")
        try:
            return self._train(settings, path)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = f"memory ran out with seeds={settings.seeds}, batch={settings.batch}"
            raise MooringError(f"{problem}: give fewer") from error

    def _train(self, settings: Pretraining, path: Path) -> list[PretrainedBackbone]:
        stream, files, partial = self.stream, settings.files(path), _partial(path)
        specs = [settings.spec(seed, stream.name, stream.fingerprint) for seed in files]
        fleet = self._resumed(specs, partial)
        epochs = _EpochCheckpoints(partial, steps_per_run(specs[0], stream), settings, self.report)
        if fleet.steps < epochs.steps:
            epochs.report_progress(fleet)
        results = fleet.run(epochs)
        epochs.check_finite(fleet)
        note = self.note or (lambda line: None)
        if fleet.recorder.failure:
            note(f"steps of {settings.network} could not be recorded, and took longer: {fleet.recorder.failure}")
        backbones = []
        for run, (result, (seed, file)) in enumerate(zip(results, files.items(), strict=True)):
            accuracy = result.matrix[0][0]
            metadata = asdict(replace(settings, seed=seed, seeds=1))  # as if alone
            metadata |= {"stream": stream.name, "data": stream.fingerprint, "accuracy": round(accuracy, 2)}
            metadata |= result.versions
            tensors = fleet.stack.network_of(run).backbone.state_dict()
            tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
            write_atomically(file, to_bytes(tensors, metadata={"mooring": json.dumps(metadata)}))
            backbones.append(PretrainedBackbone(file, seed, accuracy))
            if is_at_chance(accuracy, stream):
                note(
                    f"seed {seed} of {settings.network} stayed at chance ({accuracy:.2f} %): "
                    "use another seed or a lower lr"
                )
        partial.unlink(missing_ok=True)
        return backbones

    def _resumed(self, specs: list[RunSpec], path: Path) -> Fleet:
        """Return the fleet where a checkpoint of exactly these runs left it, or a fresh one."""
        fleet = Fleet(specs, self.stream, device=self.device)
        try:
            if checkpoint.runs_in(path) == {spec.key for spec in specs}:
                checkpoint.restore(fleet, path)
        except checkpoint.CheckpointError:
            return Fleet(specs, self.stream, device=self.device)
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
            self.report(f"pre-training {self.settings.description}", fleet.steps, self.steps)

    def check_finite(self, fleet: Fleet) -> None:
        """Refuse to go on with a run that is not finite, by the step in which that was first seen."""
        steps = {result.spec.seed: result.steps for result in fleet.measured.results if result.status == "unstable"}
        finite = finite_runs([p.detach() for p in fleet.stack.parameters.values()]).tolist()
        for spec, bad, fine in zip(fleet.specs, fleet.first_bad.tolist(), finite, strict=False):
            if bad < NEVER or not fine:
                steps[spec.seed] = min(bad, fleet.steps - 1)
        if steps:
            seed = min(steps)
            whose = f" of seed {seed}" if self.settings.seeds > 1 else ""
            epoch = steps[seed] // self.epoch_steps + 1
            raise MooringError(f"the loss{whose} is not finite in epoch {epoch}: lower the learning rate")
