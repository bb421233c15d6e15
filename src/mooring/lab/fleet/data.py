"""What a fleet sees: one memory of images, from which every run takes its own, in its own order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    ) -> None:
        self.stream, self.dtype = stream, dtype
        self.in_one = channels_last and has_kernels(device)
        self.images, self.labels = stream.train.images.to(device), stream.train.labels.to(device)
        heads = torch.zeros(len(stream.train), dtype=torch.int64)
        for number, task in enumerate(stream.tasks):
            heads[task.train] = stream.head(number)
        self.heads = heads.to(device)

    def take(self, indices: Tensor, task: int | None) -> Batch:
        """The images at these places, int64 of shape (runs, batch); with a task's head, or each image's own."""
        flat = indices.flatten()
        x = self.gathered(flat)
        x = x.reshape(*indices.shape, *x.shape[1:])
        head = self.heads[flat].view_as(indices) if task is None else self.stream.head(task)
        return Batch(x, self.labels[flat].view_as(indices), head)

    def gathered(self, places: Tensor) -> Tensor:
        """The images at these places as a network sees them: chosen, scaled and laid out in one pass on a GPU."""
        if not self.in_one:
            return normalize_pixels(self.images.index_select(0, places), self.dtype)
        return gather(self.images, places, self.dtype)

    def order(self, specs: Sequence[RunSpec], data: str, task: int, epoch: int) -> Tensor:
        """Where each run finds the images of one epoch: int64 of shape (runs, images).

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
        return torch.stack([drawn[spec.seed] for spec in specs])
