"""Encoded images, and their decoding to uint8 pixels of one size and mode."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from mooring.errors import MooringError, first_line

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
MODES = {1: "L", 3: "RGB"}
DEEP_FORMATS = ("PNG", "PPM")
"""Formats whose pixels have 16 bits when Pillow gives them 32."""


@dataclass(frozen=True)
class EncodedImage:
    """An image before decoding: the bytes of its file, the file and row where it is, for messages, and its label."""

    data: bytes
    where: str
    label: int


class EncodedSplit(Protocol):
    """One split of a data set on disk, before decoding."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the split."""

    @property
    def labels(self) -> tuple[int, ...]:
        """The labels if they come from the folders of the files; empty if they are in the files."""

    @property
    def count(self) -> int:
        """The number of images, known without reading them."""

    def images(self) -> Iterator[EncodedImage]:
        """Yield the images in a fixed order, read one at a time."""


@dataclass(frozen=True)
class FolderContents:
    """The classes and encoded images of a folder.

    Attributes:
        classes: the names of the classes.
        train: the training images.
        test: the test images.
        unused: the names of folders beside those splits, which are not used.
        scored: the name of the folder of the test images; None if they have no folder of their own.
    """

    classes: tuple[str, ...]
    train: EncodedSplit
    test: EncodedSplit
    unused: tuple[str, ...] = ()
    scored: str | None = None


def decode(image: EncodedImage, size: tuple[int, int], channels: int = 3) -> Pixels:
    """Return uint8 pixels of shape (channels, height, width), resized bilinearly with antialiasing.

    Args:
        image: the image, in any format and mode that Pillow reads. Transparent pixels become black; of 16 bits, 65535
            becomes 255.
        size: the height and width of the result.
        channels: 3 for RGB, 1 for grey.
    """
    try:
        with Image.open(io.BytesIO(image.data)) as opened:
            picture: Image.Image = _to_8_bits(opened) if opened.mode[0] in "IF" else opened
            if "transparency" in opened.info or opened.mode in ("LA", "PA"):
                picture = picture.convert("RGBA")
            if picture.mode == "RGBA":
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, (0, 0, 0, 255)), picture)
            picture = picture.convert(MODES[channels])
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = first_line(error)[:120]
        problem = f"is not an image that can be read ({reason})"
        raise MooringError(f"{image.where} {problem}: repair it or skip broken images") from error
    height, width = size
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def has_16_bits(image: Image.Image) -> bool:
    """Return whether the pixels of an opened image have 16 bits, which Pillow calls I;16, or I in some formats."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in DEEP_FORMATS)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Return an image of 16 bits in grey of 8 bits; Pillow's own conversion makes everything above 255 white."""
    if not has_16_bits(image):
        raise ValueError(f"pixels of mode {image.mode} have no fixed range, save it with 8 or 16 bits")
    return Image.fromarray(np.round(np.asarray(image, dtype=np.float64) / 257).astype(np.uint8))
