"""Pre-training: a backbone taught on a whole data set at once, for streams to start from."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.nn.functional import cross_entropy

from mooring.errors import MooringError, check_number, check_whole
from mooring.lab.files import write_whole
from mooring.lab.fleet.batches import Batches
from mooring.lab.fleet.logbook import versions
from mooring.lab.fleet.measure import score
from mooring.lab.fleet.sgd import SGD
from mooring.lab.fleet.stack import Stack
from mooring.lab.networks.start import start
from mooring.lab.order import generator, task_order
from mooring.lab.streams.slices import whole
from mooring.lab.streams.stream import Stream

__all__ = ["Pretraining", "pretrain"]

Report = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Pretraining:
    """How a backbone is taught; by default as in the paper.

    Attributes:
        network: a name, or `package.module:function`.
        seed: of the initialisation, the data order and the flips.
        epochs: passes over the data set.
        lr: the learning rate; a tenth of it after 5/12 of the epochs, a hundredth after 10/12.
        batch: samples in a batch.
        momentum: of SGD.
        weight_decay: of SGD.
        flips: whether half of the images, at random, are mirrored.

    Example:
        >>> [round(Pretraining(epochs=60).rate(epoch), 6) for epoch in (0, 25, 50)]
        [0.1, 0.01, 0.001]
    """

    network: str = "cnn6"
    seed: int = 0
    epochs: int = 60
    lr: float = 0.1
    batch: int = 128
    momentum: float = 0.9
    weight_decay: float = 1e-4
    flips: bool = True

    def __post_init__(self) -> None:
        """Refuse numbers outside their range."""
        check_number("lr", self.lr, 0, above=True)
        check_number("momentum", self.momentum, 0, 1)
        check_number("weight_decay", self.weight_decay, 0)
        for name, value in (("epochs", self.epochs), ("batch", self.batch)):
            check_whole(name, value, 1)
        check_whole("seed", self.seed, 0)

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch."""
        drops = sum(12 * epoch >= part * self.epochs for part in (5, 10))
        return self.lr * (1.0, 0.1, 0.01)[drops]


def pretrain(
    stream: Stream, settings: Pretraining, path: Path, *, device: str = "cpu", report: Report | None = None
) -> float:
    """Teach a backbone all classes of a stream at once, and write it as safetensors.

    An interrupted one continues with the epoch it was in: what it needs lies in a file beside `path`.

    Args:
        stream: whose images; its tasks become one.
        settings: how.
        path: where the backbone goes.
        device: where to compute.
        report: told how many of the epochs are done.

    Returns:
        The accuracy on the test images, in percent.
    """
    stream = whole(stream)
    one = torch.tensor([settings.lr], device=device)
    stack = Stack([start(settings.network, stream, settings.seed)], device, [settings.seed])
    sgd = SGD(one, settings.momentum, settings.weight_decay)
    partial = path.with_name(f"{path.name}.partial")
    first = _resumed(partial, settings, stream, stack, sgd)
    batches = Batches(stream, device)
    for epoch in range(first, settings.epochs):
        sgd.lr = torch.full_like(one, settings.rate(epoch))
        _epoch(stack, sgd, batches, settings, epoch)
        if report:
            report("pre-training", epoch + 1, settings.epochs)
        state = {f"{kind}/{name}": t for kind, told in _parts(stack, sgd).items() for name, t in told.items()}
        header = {"settings": asdict(settings), "data": stream.fingerprint, "epochs": epoch + 1, "calls": stack.calls}
        _write(partial, state, {"mooring": json.dumps(header)})
    accuracy = float(score(stack, stream, [0], torch.float32))
    told = {**asdict(settings), "stream": stream.name, "accuracy": round(accuracy, 2), **versions(device)}
    _write(path, stack.alone(0).backbone.state_dict(), {"mooring": json.dumps(told)})
    partial.unlink(missing_ok=True)
    return accuracy


def _epoch(stack: Stack, sgd: SGD, batches: Batches, settings: Pretraining, epoch: int) -> None:
    order = task_order(settings.seed, 0, epoch, batches.stream.tasks[0].train)
    mirrored = torch.rand(len(order), generator=generator(settings.seed, "flips", epoch)) < 0.5
    for p in stack.parameters.values():
        p.requires_grad_(True)
    for indices, flips in zip(torch.split(order, settings.batch), torch.split(mirrored, settings.batch), strict=True):
        batch = batches.take(indices[None].to(stack.device), 0)
        x = batch.x
        if settings.flips:
            x = torch.where(flips.to(stack.device)[None, :, None, None, None], x.flip(-1), x)
        loss = cross_entropy(stack(x, 0, train=True)[0], batch.labels[0])
        if not bool(loss.isfinite()):
            raise MooringError(f"the loss is not finite in epoch {epoch + 1}: lower the learning rate")
        gradients = torch.autograd.grad(loss, list(stack.parameters.values()))
        sgd.step(stack.parameters, dict(zip(stack.parameters, gradients, strict=True)))


def _parts(stack: Stack, sgd: SGD) -> dict[str, dict[str, Tensor]]:
    return {"parameter": stack.parameters, "buffer": stack.buffers, "velocity": sgd.velocity}


def _resumed(path: Path, settings: Pretraining, stream: Stream, stack: Stack, sgd: SGD) -> int:
    """How many epochs are done already; the weights are then as they were after them."""
    try:
        header = json.loads(_metadata(path)["mooring"])
        tensors = load_file(path, device=str(stack.device))
    except (OSError, SafetensorError, KeyError, ValueError):
        return 0
    if header["settings"] != asdict(settings) or header["data"] != stream.fingerprint:
        return 0
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        _parts(stack, sgd)[kind][rest] = tensor
    stack.calls = header["calls"]
    return int(header["epochs"])


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return opened.metadata() or {}


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    whole_tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write_whole(path, to_bytes(whole_tensors, metadata=metadata))
