"""The training images of a stream on a device, from which every run takes its own, in its own order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.lab.fleet.augment import Augmentation, move_images
from mooring.lab.fleet.gpu.convolution import gather_images, has_kernels
from mooring.lab.model.order import joint_order, task_order
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.streams.stream import Stream

__all__ = ["Batch", "TrainingData"]


@dataclass(frozen=True)
class Batch:
    """One batch of every run.

    Attributes:
        x: images, of shape (runs, batch, channels, height, width).
        labels: int64 of shape (runs, batch).
        head: one head for all samples, or one for each, int64 of shape (runs, batch).
    """

    x: Tensor
    labels: Tensor
    head: int | Tensor


class TrainingData:
    """The training images of a stream, kept on a device as bytes.

    Args:
        stream: the tasks.
        device: where the images are stored.
        dtype: of the images in a batch.
        channels_last: whether a batch on a GPU has its channels last in memory.
        flips: whether images are mirrored at random; see `RunSpec`.
        shifts: the largest shift of an image in pixels; see `RunSpec`.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> data = TrainingData(by_class(digits(), per_task=2))
        >>> data.batch(torch.zeros(3, 7, dtype=torch.int64), task=0).x.shape
        torch.Size([3, 7, 1, 8, 8])
    """

    def __init__(
        self,
        stream: Stream,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        flips: bool = False,
        shifts: int = 0,
    ) -> None:
        self.stream, self.dtype = stream, dtype
        self.channels_last = channels_last and has_kernels(device)
        self.images, self.labels = stream.train.images.to(device), stream.train.labels.to(device)
        heads = torch.zeros(len(stream.train), dtype=torch.int64)
        for number, task in enumerate(stream.tasks):
            heads[task.train] = stream.head(number)
        self.heads = heads.to(device)
        self.augmentation = Augmentation(len(stream.train), flips, shifts) if flips or shifts else None

    def batch(self, indices: Tensor, task: int | None) -> Batch:
        """Return the batch of these indices.

        Args:
            indices: from `epoch_order`, of shape (runs, batch).
            task: the number of the task, whose head is used; None for each image's own head.
        """
        flat = indices.flatten()
        if self.augmentation is None:
            x = self._gather(flat)
        else:
            flat, *moves = self.augmentation.decode(flat)
            x = move_images(self.images, flat, *moves)
            x = normalize_pixels(x if self.channels_last else x.contiguous(), self.dtype)
        head = self.heads[flat].view_as(indices) if task is None else self.stream.head(task)
        return Batch(x.reshape(*indices.shape, *x.shape[1:]), self.labels[flat].view_as(indices), head)

    def _gather(self, indices: Tensor) -> Tensor:
        """Return the images at these indices, scaled as network inputs; one kernel on a GPU if channels are last."""
        if not self.channels_last:
            return normalize_pixels(self.images.index_select(0, indices), self.dtype)
        return gather_images(self.images, indices, self.dtype)

    def epoch_order(self, specs: Sequence[RunSpec], data: str, task: int, epoch: int) -> Tensor:
        """Return the images of one epoch in each run's order, augmented if asked for: int64 of shape (runs, images).

        Args:
            specs: the runs.
            data: what the method trains on; "joint" is all tasks.
            task: the number of the task.
            epoch: the number of the epoch within the task.
        """
        parts, epochs = [part.train for part in self.stream.tasks], specs[0].epochs
        seeds = dict.fromkeys(spec.seed for spec in specs)  # runs of one seed have the same order
        if data == "joint":
            orders = {seed: joint_order(seed, task, epoch, parts, epochs) for seed in seeds}
        else:
            orders = {seed: task_order(seed, task, epoch, parts[task]) for seed in seeds}
        if self.augmentation is not None:
            orders = {seed: self.augmentation.encode(o, seed, task * epochs + epoch) for seed, o in orders.items()}
        return torch.stack([orders[spec.seed] for spec in specs])
