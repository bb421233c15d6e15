"""Random mirrors and shifts of training images, drawn by each run's own seed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.lab.model.order import seeded_generator

__all__ = ["Augmentation", "move_images"]


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
    outside = _outside(rows, height)[:, :, None] | _outside(columns, width)[:, None, :]
    columns = torch.where(mirrored[:, None] != 0, width - 1 - columns, columns)
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    pixels = images[places[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return pixels.masked_fill_(outside[..., None], 0).permute(0, 3, 1, 2)


def _outside(pixels: Tensor, size: int) -> Tensor:
    return (pixels < 0) | (pixels >= size)
