"""Pre-training: backbones taught on a whole data set at once, for streams to start from. Start with `_Lesson._step`."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.nn.functional import cross_entropy

from mooring.errors import MooringError, check_number, check_whole, unknown
from mooring.lab.engines.device_memory import ran_out
from mooring.lab.fleet.augment import drawn, moved
from mooring.lab.fleet.data import Batches
from mooring.lab.fleet.epoch_indices import Feed
from mooring.lab.fleet.evaluation import Exam
from mooring.lab.fleet.gpu.cuda_graphs import Recorder
from mooring.lab.fleet.measurements import finite_runs
from mooring.lab.fleet.record import versions
from mooring.lab.fleet.sgd import SGD
from mooring.lab.fleet.stack.stack import Stack, laid_out
from mooring.lab.model.atomic_files import write_atomically
from mooring.lab.model.order import batch_sizes, task_order
from mooring.lab.model.precision import parameter_dtype, product_dtype, tf32_mode
from mooring.lab.model.spec import DTYPES
from mooring.lab.model.training import Training
from mooring.lab.networks.initialization import initial_network
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.streams.slices import merge_tasks
from mooring.lab.streams.stream import Stream
from mooring.lab.study.comparison import MOST_SEEDS

__all__ = ["Pretraining", "Taught", "pretrain"]

Report = Callable[[str, int, int | None], None]
Note = Callable[[str], None]

SCHEDULES = ("steps", "cosine")

LOOK = 50
"""After so many steps the device is waited for, to see whether the losses are finite."""


@dataclass(frozen=True)
class Pretraining:
    """How backbones are taught; by default one, as in the paper.

    Attributes:
        network: a name, or `package.module:function`.
        seed: of the initialisation, the data order, the flips and the shifts.
        epochs: passes over the data set.
        lr: the learning rate of the first epoch.
        batch: samples in a batch.
        momentum: of SGD.
        weight_decay: of SGD.
        flips: whether half of the images, at random, are mirrored.
        shifts: how many pixels each image is moved at most, at random, in both directions; black comes in.
        schedule: "steps" is a tenth of the rate after 5/12 of the epochs and a hundredth after 10/12; "cosine" falls
            from epoch to epoch along half a cosine towards 0.
        seeds: how many backbones, each as if alone: of this seed and of those that follow it.
        dtype: of parameters and arithmetic; "auto" is tf32 on a GPU and float32 elsewhere.

    Example:
        >>> [round(Pretraining(epochs=60).rate(epoch), 6) for epoch in (0, 25, 50)]
        [0.1, 0.01, 0.001]
        >>> [round(Pretraining(epochs=60, schedule="cosine").rate(epoch), 6) for epoch in (0, 30)]
        [0.1, 0.05]
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
        check_number("lr", self.lr, 0, above=True)
        check_number("momentum", self.momentum, 0, 1)
        check_number("weight_decay", self.weight_decay, 0)
        check_whole("seeds", self.seeds, 1, MOST_SEEDS)
        for name, value, low in (
            ("epochs", self.epochs, 1),
            ("batch", self.batch, 1),
            ("seed", self.seed, 0),
            ("shifts", self.shifts, 0),
        ):
            check_whole(name, value, low)
        for name, given, allowed in (
            ("schedule", self.schedule, SCHEDULES),
            ("dtype", self.dtype, ("auto", *DTYPES)),
        ):
            if given not in allowed:
                raise unknown(name, given, allowed)

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch."""
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        drops = sum(12 * epoch >= part * self.epochs for part in (5, 10))
        return self.lr * (1.0, 0.1, 0.01)[drops]

    def on(self, device: str) -> "Pretraining":
        """With the dtype that suits a device where none was asked for, as in a comparison.

        Example:
            >>> Pretraining().on("cuda").dtype, Pretraining().on("cpu").dtype
            ('tf32', 'float32')
        """
        return replace(self, dtype=Training(dtype=self.dtype).on(device).dtype)

    def files(self, path: Path) -> dict[int, Path]:
        """Where the backbone of each seed goes: one to `path` itself, several to files with the seed in their names.

        Example:
            >>> [file.name for file in Pretraining(seed=3, seeds=2).files(Path("b.safetensors")).values()]
            ['b-3.safetensors', 'b-4.safetensors']
        """
        if self.seeds == 1:
            return {self.seed: path}
        every = range(self.seed, self.seed + self.seeds)
        return {seed: path.with_name(f"{path.stem}-{seed}{path.suffix}") for seed in every}


@dataclass(frozen=True)
class Taught:
    """A backbone that was written.

    Attributes:
        path: where.
        seed: what it began from.
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
) -> list[Taught]:
    """Teach backbones all classes of a stream at once, and write each as safetensors.

    Several seeds are taught as one computation, and each becomes what it becomes alone. An interrupted one continues
    with the epoch it was in: what it needs lies in a file beside `path`.

    Args:
        stream: whose images; its tasks become one.
        settings: how.
        path: where the backbone goes; with several, each has its seed in the name.
        device: where to compute.
        report: told how many of the steps are done.
        note: told what a user should know.

    Returns:
        What was written, by seed.

    Example:
        >>> import tempfile
        >>> from mooring.lab.streams import by_class, digits
        >>> settings = Pretraining("mlp", epochs=1, seeds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     taught = pretrain(by_class(digits(), 5), settings, Path(folder) / "b.safetensors")
        >>> [(each.path.name, each.seed) for each in taught]
        [('b-0.safetensors', 0), ('b-1.safetensors', 1)]
    """
    settings = settings.on(device)
    side = min(stream.train.images.shape[2:])
    if settings.shifts >= side:
        raise MooringError(f"shifts={settings.shifts} moves images of {side} pixels out of sight: give fewer")
    try:
        with tf32_mode(settings.dtype):
            return _pretrain(merge_tasks(stream), settings, path, device, report, note)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise MooringError(f"memory ran out with seeds={settings.seeds}, batch={settings.batch}: give fewer") from error


def _pretrain(
    stream: Stream, settings: Pretraining, path: Path, device: str, report: Report | None, note: Note | None
) -> list[Taught]:
    partial = path.with_name(f"{path.name}.partial")
    lesson = _Lesson(stream, settings, device)
    for epoch in range(_resumed(partial, lesson), settings.epochs):
        lesson.teach(epoch, report)
        state = {f"{kind}/{name}": t for kind, told in lesson.parts().items() for name, t in told.items()}
        _write(partial, state, {"mooring": json.dumps({**lesson.header(), "epochs": epoch + 1})})
    if note and lesson.recorder.failed:
        note(f"steps of {settings.network} could not be recorded, and took longer: {lesson.recorder.failed}")
    lesson.recorder.clear()
    accuracies = Exam(stream).score(lesson.stack, [0], parameter_dtype(settings.dtype)).flatten().tolist()
    taught = []
    for run, (seed, file) in enumerate(settings.files(path).items()):
        told = asdict(replace(settings, seed=seed, seeds=1))  # as if alone
        told |= {"stream": stream.name, "accuracy": round(accuracies[run], 2), **versions(device)}
        _write(file, lesson.stack.alone(run).backbone.state_dict(), {"mooring": json.dumps(told)})
        taught.append(Taught(file, seed, accuracies[run]))
    partial.unlink(missing_ok=True)
    return taught


class _Lesson:
    """Backbones of several seeds on their way. What a step reads lies on the device before the epoch begins."""

    def __init__(self, stream: Stream, settings: Pretraining, device: str) -> None:
        self.stream, self.settings = stream, settings
        self.seeds, dtype = list(range(settings.seed, settings.seed + settings.seeds)), parameter_dtype(settings.dtype)
        networks = [initial_network(settings.network, stream, seed, dtype=dtype) for seed in self.seeds]
        self.stack = Stack(networks, device, self.seeds, product_dtype(settings.dtype))
        lr = torch.full((len(self.seeds),), settings.lr, dtype=dtype, device=device)
        self.sgd = SGD(lr, settings.momentum, settings.weight_decay)
        self.batches = Batches(stream, device, dtype, settings.dtype in ("tf32", "bf16"))
        self.feed = Feed(device)
        self.recorder = Recorder(on=self.stack.device.type == "cuda" and self.stack.way != "in turn")
        self.bad = torch.zeros(len(self.seeds), dtype=torch.bool, device=device)

    def teach(self, epoch: int, report: Report | None) -> None:
        """One pass over the data set."""
        self._lay_out(epoch)
        steps = len(self.feed.sizes)
        for step in range(steps):
            if report and step % LOOK == 0:
                report("pre-training", epoch * steps + step, self.settings.epochs * steps)
            self._iterate(epoch, step)
            if (step + 1) % LOOK == 0:
                self._check(epoch)
        self.bad |= ~finite_runs([p.detach() for p in self.stack.parameters.values()])  # after the last step
        self._check(epoch)
        if report:
            report("pre-training", (epoch + 1) * steps, self.settings.epochs * steps)

    def _lay_out(self, epoch: int) -> None:
        """Put places, flips and shifts of every run's images on the device, and the rate where steps read it."""
        task, settings = self.stream.tasks[0].train, self.settings
        order = torch.stack([task_order(seed, 0, epoch, task) for seed in self.seeds])
        rest = drawn(self.seeds, epoch, len(task), flips=settings.flips, shifts=settings.shifts)
        self.feed.load(torch.cat([order, *rest]), batch_sizes(len(task), settings.batch))
        self.sgd.lr.fill_(settings.rate(epoch))
        for p in self.stack.parameters.values():
            p.requires_grad_(True)

    def _iterate(self, epoch: int, step: int) -> None:
        """Take a step, as told or as recorded."""
        sizes, size = self.feed.sizes, self.feed.sizes[step]
        left = sizes[step:].count(size) + (self.settings.epochs - epoch - 1) * sizes.count(size)
        self.recorder.run(size, left, lambda: self._step(size))

    def _step(self, size: int) -> None:
        """One step of every run; nothing in it waits for the device."""
        places, *rest = self.feed.next(size).view(4, -1)
        x, labels = self._images(places, *rest), self.batches.labels[places]
        logits = self.stack(x.view(-1, size, *x.shape[1:]), 0, train=True)
        losses = cross_entropy(logits.flatten(0, 1), labels, reduction="none").view(-1, size).mean(1)
        self.bad |= ~losses.detach().isfinite()
        gradients = torch.autograd.grad(losses.sum(), list(self.stack.parameters.values()))
        self.sgd.step(self.stack.parameters, dict(zip(self.stack.parameters, gradients, strict=True)))
        self.feed.move(size)

    def _images(self, places: Tensor, mirrored: Tensor, down: Tensor, right: Tensor) -> Tensor:
        """What the networks see, of shape (runs * batch, channels, height, width)."""
        if not self.settings.flips and not self.settings.shifts:
            return self.batches.gathered(places)
        x = moved(self.batches.images, places, mirrored, down, right)
        return normalize_pixels(x if self.batches.in_one else x.contiguous(), self.batches.dtype)

    def _check(self, epoch: int) -> None:
        bad = [seed for seed, lost in zip(self.seeds, self.bad.tolist(), strict=True) if lost]
        if bad:
            whose = f" of seed {bad[0]}" if len(self.seeds) > 1 else ""
            raise MooringError(f"the loss{whose} is not finite in epoch {epoch + 1}: lower the learning rate")

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """All that changes from epoch to epoch."""
        return {"parameter": self.stack.parameters, "buffer": self.stack.buffers, "velocity": self.sgd.velocity}

    def header(self) -> dict[str, object]:
        """What an interrupted one must agree with, and how often networks drew random numbers."""
        return {"settings": asdict(self.settings), "data": self.stream.fingerprint, "calls": self.stack.calls}


def _resumed(path: Path, lesson: _Lesson) -> int:
    """How many epochs are done already; the weights are then as they were after them."""
    try:
        header = json.loads(_metadata(path)["mooring"])
        tensors = load_file(path, device=str(lesson.stack.device))
    except (OSError, SafetensorError, KeyError, ValueError):
        return 0
    if any(header.get(name) != lesson.header()[name] for name in ("settings", "data")):
        return 0
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        lesson.parts()[kind][rest] = laid_out(tensor)
    lesson.stack.calls = header["calls"]
    return int(header["epochs"])


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return opened.metadata() or {}


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    whole_tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write_atomically(path, to_bytes(whole_tensors, metadata=metadata))
