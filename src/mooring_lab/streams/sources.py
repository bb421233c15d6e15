"""Data sets from image folders, decoded once, and from map-style data sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring_lab.streams.cache import Tensors, content_key, load_or_build
from mooring_lab.streams.decode import EncodedSplit, FolderContents, Pixels, decode
from mooring_lab.streams.folders import read_folder
from mooring_lab.streams.parquet import read_parquet
from mooring_lab.streams.progress_callback import ProgressCallback, throttled
from mooring_lab.streams.stream import Source, Split

MAX_NAMED_CLASSES = 5
"""Classes without training or test images that the name of a data set lists."""


class MapDataset(Protocol):
    """A map-style data set as in torch.utils.data: a length, and (image, label) by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


def scan_folder(folder: Path, *, label: str | None = None, leave_out: tuple[str, ...] = ()) -> FolderContents:
    """List the classes and images of a folder without decoding any image; the options are those of `from_folder`."""
    if any(folder.glob("*.parquet")) or any((folder / "data").glob("*.parquet")):
        return read_parquet(folder, label=label)
    contents = read_folder(folder, leave_out=leave_out)
    if label is not None:
        raise MooringError(f"{folder} holds class folders, which have no label column {label!r}: leave the label out")
    return contents


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
    """Return the images of a folder as a data set.

    The images are decoded once, to uint8 of one size, and kept in the user's cache. The name says what is left out:
    broken images, folders beside those of the training and test images, and classes that are never scored or trained.

    Args:
        folder: a folder of Parquet files in the Hub's layout, or of class folders.
        name: the data set's name; by default the folder's name.
        size: the height and width of the decoded images.
        channels: 3 for RGB, 1 for grey.
        label: the label column of Parquet files; by default fine_label or label.
        leave_out: names of class folders to ignore.
        skip_broken: leave out images that cannot be read, and give their number in the name, instead of stopping.
        progress: called during decoding with the number of decoded images and their total number.
    """
    folder = Path(folder)
    contents = scan_folder(folder, label=label, leave_out=leave_out)
    files = [*contents.train.paths, *contents.test.paths]
    labels = (contents.train.labels, contents.test.labels)  # a file moved to another class has the same bytes
    key = content_key(files, size, channels, label, leave_out, skip_broken, labels)

    def build() -> Tensors:
        settings = (size, channels, skip_broken, throttled(progress))
        return _decode_split("train", contents.train, *settings) | _decode_split("test", contents.test, *settings)

    decoded = load_or_build(key, build)
    train, test = (Split(decoded[f"{kind}_images"], decoded[f"{kind}_labels"]) for kind in ("train", "test"))
    skipped = int(decoded["train_skipped"] + decoded["test_skipped"])
    remarks = [f"{skipped} broken images skipped"] if skipped else []
    remarks += [f"{unused}/ not used" for unused in contents.unused]
    remarks += _gaps(train, test, contents.classes)
    name = (name or folder.resolve().name) + (f" ({', '.join(remarks)})" if remarks else "")
    return Source(name, train, test, contents.classes)


def first_classes(source: Source, count: int) -> Source:
    """Return the first classes of a source.

    Example:
        >>> from mooring_lab.streams.digits import digits
        >>> first_classes(digits(), 8).classes[-1]
        '7'
    """
    if count == len(source.classes):
        return source
    train, test = (
        Split(split.images[split.labels < count], split.labels[split.labels < count])
        for split in (source.train, source.test)
    )
    return Source(source.name, train, test, source.classes[:count])


def from_dataset(name: str, train: MapDataset, test: MapDataset, classes: Sequence[str] | None = None) -> Source:
    """Return a data set from map-style data sets of (image, label).

    Images are uint8 tensors of shape (channels, height, width), uint8 arrays, or Pillow images, all of one size.

    Args:
        name: the data set's name.
        train: the training images.
        test: the test images.
        classes: the name of each class, by label; by default the label itself.

    Example:
        >>> pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
        >>> source = from_dataset("blank", [(pixels, 0), (pixels, 1)], [(pixels, 1)])
        >>> len(source.train), source.classes
        (2, ('0', '1'))
    """
    splits = [_read_all(name, part) for part in (train, test)]
    largest = max(int(split.labels.max()) for split in splits)
    names = tuple(classes or (str(label) for label in range(largest + 1)))
    remarks = _gaps(splits[0], splits[1], names)
    return Source(name + (f" ({', '.join(remarks)})" if remarks else ""), splits[0], splits[1], names)


def _gaps(train: Split, test: Split, classes: Sequence[str]) -> list[str]:
    """Return which classes have images of one split only, up to `MAX_NAMED_CLASSES` by name."""
    remarks = []
    trained, scored = (set(split.labels.tolist()) for split in (train, test))
    for labels, problem in ((trained - scored, "never scored"), (scored - trained, "never trained")):
        names = [classes[label] for label in sorted(labels) if 0 <= label < len(classes)]
        more = [] if len(names) <= MAX_NAMED_CLASSES else [f"{len(names) - MAX_NAMED_CLASSES} more"]
        if names:
            remarks.append(f"{problem}: {' '.join([*names[:MAX_NAMED_CLASSES], *more])}")
    return remarks


def _read_all(name: str, dataset: MapDataset) -> Split:
    images: list[Tensor] = []
    labels: list[int] = []
    for index in range(len(dataset)):
        image, label = dataset[index]
        pixels = torch.as_tensor(np.array(image)) if not isinstance(image, Tensor) else image
        if not isinstance(image, Tensor):  # arrays and Pillow images have their channels last
            pixels = pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
        if pixels.dtype != torch.uint8 or pixels.ndim != 3 or (images and pixels.shape != images[0].shape):
            kind = f"of one size, not {pixels.dtype} of shape {tuple(pixels.shape)}"
            raise MooringError(f"{name}, item {index}: images must be uint8, (channels, height, width), {kind}")
        images.append(pixels)
        labels.append(int(label))
    if not images:
        raise MooringError(f"{name} has no images")
    return Split(torch.stack(images), torch.tensor(labels, dtype=torch.int64))


def _decode_split(
    kind: str, split: EncodedSplit, size: tuple[int, int], channels: int, skip_broken: bool, report: ProgressCallback
) -> Tensors:
    pixels: list[Pixels] = []
    labels: list[int] = []
    total = split.count
    done = 0
    for done, image in enumerate(split.images(), start=1):
        try:
            pixels.append(decode(image, size, channels))
            labels.append(image.label)
        except MooringError:
            if not skip_broken:
                raise
        report(f"decoding {kind} images", done, total)
    empty = np.zeros((0, channels, *size), dtype=np.uint8)
    return {
        f"{kind}_images": torch.from_numpy(np.stack(pixels) if pixels else empty),
        f"{kind}_labels": torch.tensor(labels, dtype=torch.int64),
        f"{kind}_skipped": torch.tensor(done - len(pixels)),
    }
