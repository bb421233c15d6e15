"""The training images of a stream on a device, which every run takes in its own order, mirrored or shifted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring_lab.fleet.gpu.convolution import gather_images, has_kernels
from mooring_lab.model.order import seeded_generator, task_order
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams.stream import Stream, task_outputs


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
        >>> from mooring_lab.streams import by_class, digits
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
        self.images, self.labels = stream.train.images.to(device), task_outputs(stream, "train").to(device)
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
        if self.augmentation is not None:
            flat, *moves = self.augmentation.decode(flat)
            x = move_images(self.images, flat, *moves)
            x = normalize_pixels(x if self.channels_last else x.contiguous(), self.dtype)
        elif self.channels_last:
            x = gather_images(self.images, flat, self.dtype)  # in one kernel
        else:
            x = normalize_pixels(self.images.index_select(0, flat), self.dtype)
        head = self.heads[flat].view_as(indices) if task is None else self.stream.head(task)
        return Batch(x.reshape(*indices.shape, *x.shape[1:]), self.labels[flat].view_as(indices), head)

    def epoch_order(
        self, specs: Sequence[RunSpec], task: int, epoch: int, order: Callable[[int], Tensor] | None = None
    ) -> Tensor:
        """Return the images of one epoch in each run's order, augmented if asked for: int64 of shape (runs, images).

        Args:
            specs: the runs.
            task: the number of the task.
            epoch: the number of the epoch within the task.
            order: a function from a run's seed to the images of the epoch; by default those of the task, shuffled.
        """
        part, orders = self.stream.tasks[task].train, {}
        for seed in dict.fromkeys(spec.seed for spec in specs):  # runs of one seed have the same order
            own = task_order(seed, task, epoch, part) if order is None else order(seed)
            if self.augmentation is not None:
                own = self.augmentation.encode(own, seed, task * specs[0].epochs + epoch)
            orders[seed] = own
        return torch.stack([orders[spec.seed] for spec in specs])


class EpochIndices:
    """Image indices of every step of an epoch, and a position that advances on the device.

    Epochs of one shape reuse the same memory, so that captured CUDA graphs stay valid.

    Args:
        device: where the indices are stored.

    Attributes:
        indices: the epoch's images in training order, int64 of shape (runs, images).
        sizes: the number of these images in each step.
        replay_indices: the replayed images of each step, int64 of shape (runs, steps, largest replay size).
        replay_sizes: the number of replayed images in each step.
        step: the current step, int64 of shape (1,).
        offset: the first column of `indices` that the current step reads, int64 of shape (1,).

    Example:
        >>> epoch = EpochIndices()
        >>> epoch.load(torch.arange(6).view(2, 3), [2, 1])
        >>> epoch.next_batch(2)
        tensor([[0, 1],
                [3, 4]])
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.indices = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.replay_indices = torch.zeros(0, 0, 0, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.offset = torch.zeros(1, dtype=torch.int64, device=device)
        self.sizes: list[int] = []
        self.replay_sizes: list[int] = []

    def load(self, indices: Tensor, sizes: Sequence[int], replayed: Sequence[Tensor] = (), step: int = 0) -> None:
        """Copy an epoch to the device.

        Args:
            indices: of shape (runs, images).
            sizes: of the steps; they sum to the number of images.
            replayed: the replayed images of each step, each of shape (runs, any).
            step: the step to start from.
        """
        self.sizes, self.replay_sizes = list(sizes), [drawn.shape[1] for drawn in replayed] or [0] * len(sizes)
        largest = max(self.replay_sizes, default=0)
        padded = torch.zeros(len(indices), len(self.sizes) if largest else 0, largest, dtype=torch.int64)
        for number, drawn in enumerate(replayed if largest else ()):
            padded[:, number, : drawn.shape[1]] = drawn
        self.indices, self.replay_indices = self._put(self.indices, indices), self._put(self.replay_indices, padded)
        self.step.fill_(step)
        self.offset.fill_(sum(self.sizes[:step]))

    def _put(self, old: Tensor, new: Tensor) -> Tensor:
        return old.copy_(new) if old.shape == new.shape else new.to(self.device)

    def next_batch(self, size: int) -> Tensor:
        """Return the indices of the current step, of shape (runs, size)."""
        return self.indices.index_select(1, self.offset + torch.arange(size, device=self.device))

    def replay_batch(self, size: int) -> Tensor:
        """Return the replayed indices of the current step, of shape (runs, size)."""
        return self.replay_indices.index_select(1, self.step).squeeze(1)[:, :size]

    def advance(self, size: int) -> None:
        """Move to the next step, after a step of this size."""
        self.step += 1
        self.offset += size

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        if self.sizes:
            self.indices, self.replay_indices = self.indices[rows], self.replay_indices[rows]


@dataclass(frozen=True)
class Augmentation:
    """Random mirrors and shifts, written into the indices of images.

    An augmented image has the index `place + images * code`. The code says whether the image is mirrored and by how
    many pixels it is shifted; code 0 changes nothing. So an epoch stays one int64 for each image of each run.

    Args:
        images: the number of images in memory.
        flips: whether half of the images are mirrored.
        shifts: the largest shift in pixels, in both directions.

    Example:
        >>> augmentation = Augmentation(images=5, flips=True, shifts=2)
        >>> places, mirrored, down, right = augmentation.decode(augmentation.encode(torch.arange(5), seed=0, epoch=0))
        >>> places
        tensor([0, 1, 2, 3, 4])
    """

    images: int
    flips: bool
    shifts: int

    def encode(self, places: Tensor, seed: int, epoch: int) -> Tensor:
        """Return the indices of randomly augmented images.

        Args:
            places: of the images of an epoch, int64 of shape (n,).
            seed: the run's.
            epoch: the epoch's number, counted over all tasks.
        """
        code, side = torch.zeros_like(places), 2 * self.shifts + 1
        if self.flips:
            code += torch.rand(len(places), generator=seeded_generator(seed, "flips", epoch)) < 0.5
        if self.shifts:
            random = seeded_generator(seed, "shifts", epoch)
            for shift in torch.randint(-self.shifts, self.shifts + 1, (2, len(places)), generator=random):
                code = code * side + shift % side  # modulo the side, so that no shift is 0
        return places + self.images * code

    def decode(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the place of each image, whether it is mirrored (0 or 1), and its shift down and to the right."""
        side = 2 * self.shifts + 1
        code, places = indices // self.images, indices % self.images
        down, right = ((part + self.shifts) % side - self.shifts for part in (code // side, code))
        return places, code // side**2, down, right


def move_images(images: Tensor, places: Tensor, mirrored: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Return images mirrored and then shifted, in one gather; pixels that nothing is shifted to are black, byte 0.

    Args:
        images: bytes, of shape (all, channels, height, width).
        places: of the images to return, int64 of shape (n,).
        mirrored: not 0 for an image that is mirrored, of shape (n,).
        down: pixels, of shape (n,).
        right: pixels, of shape (n,).

    Returns:
        Bytes of shape (n, channels, height, width), channels last in memory.

    Example:
        >>> images, one = torch.tensor([[[[1, 2, 3]]]], dtype=torch.uint8), torch.ones(1, dtype=torch.int64)
        >>> move_images(images, 0 * one, 0 * one, 0 * one, one).flatten().tolist()
        [0, 1, 2]
        >>> move_images(images, 0 * one, one, 0 * one, one).flatten().tolist()
        [0, 3, 2]
    """
    height, width = images.shape[2:]
    rows = torch.arange(height, device=images.device) - down[:, None]
    columns = torch.arange(width, device=images.device) - right[:, None]
    outside = ((rows < 0) | (rows >= height))[:, :, None] | ((columns < 0) | (columns >= width))[:, None, :]
    columns = torch.where(mirrored[:, None] != 0, width - 1 - columns, columns)
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    pixels = images[places[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return pixels.masked_fill_(outside[..., None], 0).permute(0, 3, 1, 2)
