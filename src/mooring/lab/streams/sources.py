"""Sources of images: folders on disk, decoded once, and map-style data sets from Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.lab.streams.cache import Arrays, content_key, load_or_build
from mooring.lab.streams.decode import EncodedSplit, FolderContents, Pixels, decode_all
from mooring.lab.streams.folders import read_folder
from mooring.lab.streams.parquet import read_parquet
from mooring.lab.streams.progress_callback import ProgressCallback, throttled
from mooring.lab.streams.stream import Source, Split

__all__ = ["from_dataset", "from_folder", "scan_folder"]


class MapDataset(Protocol):
    """A data set as torch.utils.data has them: a length, and (image, label) by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


def scan_folder(folder: Path, *, label: str | None = None, leave_out: tuple[str, ...] = ()) -> FolderContents:
    """What is in a folder of Parquet files in the Hub's layout, or of class folders, before any image is decoded.

    Args:
        folder: the folder.
        label: the label column of Parquet files; by default fine_label or label.
        leave_out: class folders to ignore.
    """
    if any(folder.glob("*.parquet")) or any((folder / "data").glob("*.parquet")):
        return read_parquet(folder, label=label)
    found = read_folder(folder, leave_out=leave_out)
    if label is not None:
        raise MooringError(f"{folder} holds class folders, which have no label column {label!r}: leave the label out")
    return found


def from_folder(
    folder: Path | str,
    *,
    name: str | None = None,
    size: tuple[int, int] = (32, 32),
    channels: int = 3,
    label: str | None = None,
    leave_out: tuple[str, ...] = (),
    skip_broken: bool = False,
    progress: ProgressCallback | None = None,
) -> Source:
    """Images from a folder of Parquet files in the Hub's layout, or of class folders.

    They are decoded once, to uint8 of one size, and kept beside the data.

    Args:
        folder: the folder.
        name: what to call it; by default as the folder is called.
        size: height and width that the network wants.
        channels: 3 for RGB, 1 for grey.
        label: the label column of Parquet files; by default fine_label or label.
        leave_out: class folders to ignore.
        skip_broken: leave out images that cannot be read, and count them in the name, instead of stopping.
        progress: told about every so often while images are decoded, with how many are done and how many there are.
    """
    folder = Path(folder)
    found = scan_folder(folder, label=label, leave_out=leave_out)
    files = [*found.train.paths, *found.test.paths]
    labels = (found.train.labels, found.test.labels)  # a file moved to another class has the same bytes
    key = content_key(files, size, channels, label, leave_out, skip_broken, labels)

    def build() -> Arrays:
        arrays: Arrays = {}
        for kind, split in (("train", found.train), ("test", found.test)):
            arrays |= _decoded(kind, split, size, channels, skip_broken, throttled(progress))
        return arrays

    arrays = load_or_build(folder, key, build)
    splits = [_split(arrays[f"{kind}_images"], arrays[f"{kind}_labels"]) for kind in ("train", "test")]
    skipped = int(arrays["train_skipped"][0] + arrays["test_skipped"][0])
    called = (name or folder.resolve().name) + (f" ({skipped} broken images skipped)" if skipped else "")
    return Source(called, splits[0], splits[1], found.classes)


def from_dataset(name: str, train: MapDataset, test: MapDataset, classes: Sequence[str] | None = None) -> Source:
    """Images from map-style data sets of (image, label): uint8 tensors or arrays, or Pillow images, of one size.

    Args:
        name: what to call it.
        train: what is learned from.
        test: what is scored on.
        classes: the name of each label; by default its number.

    Example:
        >>> pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
        >>> source = from_dataset("blank", [(pixels, 0), (pixels, 1)], [(pixels, 1)])
        >>> len(source.train), source.classes
        (2, ('0', '1'))
    """
    splits = [Split(*_collected(name, part)) for part in (train, test)]
    largest = max((int(split.labels.max()) for split in splits if len(split)), default=-1)
    return Source(name, splits[0], splits[1], tuple(classes or (str(label) for label in range(largest + 1))))


def _collected(name: str, part: MapDataset) -> tuple[Tensor, Tensor]:
    images: list[Tensor] = []
    labels: list[int] = []
    for index in range(len(part)):
        image, label = part[index]
        pixels = torch.as_tensor(np.array(image)) if not isinstance(image, Tensor) else image
        if not isinstance(image, Tensor):  # arrays and Pillow images have their channels last
            pixels = pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
        if pixels.dtype != torch.uint8 or pixels.ndim != 3 or (images and pixels.shape != images[0].shape):
            kind = f"{pixels.dtype} of shape {tuple(pixels.shape)}"
            raise MooringError(
                f"{name}, item {index}: images must be uint8, (channels, height, width), of one size, not {kind}"
            )
        images.append(pixels)
        labels.append(int(label))
    if not images:
        raise MooringError(f"{name} has no images")
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)


def _decoded(
    kind: str, split: EncodedSplit, size: tuple[int, int], channels: int, skip_broken: bool, report: ProgressCallback
) -> Arrays:
    kept: list[tuple[Pixels, int]] = []
    skipped = 0
    what, total = f"decoding {kind} images", split.count
    for done, result in enumerate(decode_all(split.images(), size, channels, skip_broken=skip_broken), start=1):
        if result is None:
            skipped += 1
        else:
            kept.append(result)
        report(what, done, total)
    blank = np.zeros((0, channels, *size), dtype=np.uint8)
    return {
        f"{kind}_images": np.stack([pixels for pixels, _ in kept]) if kept else blank,
        f"{kind}_labels": np.array([label for _, label in kept], dtype=np.int64),
        f"{kind}_skipped": np.array([skipped], dtype=np.int64),
    }


def _split(images: Any, labels: Any) -> Split:
    return Split(torch.from_numpy(images), torch.from_numpy(labels))
