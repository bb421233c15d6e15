"""What a fleet sees: one memory of images, from which every run takes its own, in its own order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.lab.fleet.augment import Augmentation, move_images
from mooring.lab.fleet.gpu.convolution import gather, has_kernels
from mooring.lab.model.order import joint_order, task_order
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.streams.stream import Stream

__all__ = ["Batch", "Batches"]


@dataclass(frozen=True)
class Batch:
    """One batch of every run.

    Attributes:
        x: images, of shape (runs, batch, channels, height, width).
        labels: int64 of shape (runs, batch).
        head: the head of all samples, or of each, int64 of shape (runs, batch).
    """

    x: Tensor
    labels: Tensor
    head: int | Tensor


class Batches:
    """A stream's training images on a device, as bytes, and how to gather batches from them.

    Args:
        stream: whose images.
        device: where they stay.
        dtype: what they become when they are gathered.
        channels_last: how they lie in memory then, on a GPU.
        flips: whether images are mirrored at random; see `RunSpec`.
        shifts: by how many pixels images are shifted at most; see `RunSpec`.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> batches = Batches(by_class(digits(), per_task=2))
        >>> batches.take(torch.zeros(3, 7, dtype=torch.int64), task=0).x.shape
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
        self.in_one = channels_last and has_kernels(device)
        self.images, self.labels = stream.train.images.to(device), stream.train.labels.to(device)
        heads = torch.zeros(len(stream.train), dtype=torch.int64)
        for number, task in enumerate(stream.tasks):
            heads[task.train] = stream.head(number)
        self.heads = heads.to(device)
        self.augmentation = Augmentation(len(stream.train), flips, shifts) if flips or shifts else None

    def take(self, indices: Tensor, task: int | None) -> Batch:
        """Return the batch of these indices; with a task's head, or with each image's own.

        Args:
            indices: from `order`, of shape (runs, batch).
            task: the task's number; None for each image's own head.
        """
        flat = indices.flatten()
        if self.augmentation is None:
            x = self._gather(flat)
        else:
            flat, *moves = self.augmentation.decode(flat)
            x = move_images(self.images, flat, *moves)
            x = normalize_pixels(x if self.in_one else x.contiguous(), self.dtype)
        head = self.heads[flat].view_as(indices) if task is None else self.stream.head(task)
        return Batch(x.reshape(*indices.shape, *x.shape[1:]), self.labels[flat].view_as(indices), head)

    def _gather(self, places: Tensor) -> Tensor:
        """Return images as a network sees them: chosen, scaled and laid out in one pass on a GPU."""
        if not self.in_one:
            return normalize_pixels(self.images.index_select(0, places), self.dtype)
        return gather(self.images, places, self.dtype)

    def order(self, specs: Sequence[RunSpec], data: str, task: int, epoch: int) -> Tensor:
        """Return the images of one epoch in each run's order, augmented if asked for: int64 of shape (runs, images).

        Args:
            specs: the runs.
            data: what they draw from; "joint" is all tasks.
            task: the task's number.
            epoch: the epoch's number within the task.
        """
        parts, epochs = [part.train for part in self.stream.tasks], specs[0].epochs
        seeds = dict.fromkeys(spec.seed for spec in specs)  # runs of one seed see the same
        if data == "joint":
            drawn = {seed: joint_order(seed, task, epoch, parts, epochs) for seed in seeds}
        else:
            drawn = {seed: task_order(seed, task, epoch, parts[task]) for seed in seeds}
        if self.augmentation is not None:
            drawn = {seed: self.augmentation.encode(o, seed, task * epochs + epoch) for seed, o in drawn.items()}
        return torch.stack([drawn[spec.seed] for spec in specs])
