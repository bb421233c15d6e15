"""Inspection of an image folder: classes, counts, sizes and broken images."""

import io
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from PIL import Image

from mooring.errors import MooringError
from mooring_lab.streams.decode import decode, has_16_bits
from mooring_lab.streams.parquet import ParquetSplit
from mooring_lab.streams.progress_callback import ProgressCallback, throttled
from mooring_lab.streams.sources import scan_folder


@dataclass(frozen=True)
class Inspection:
    """The contents of an image folder.

    Attributes:
        folder: the folder.
        layout: "parquet" or "folders".
        classes: the names of the classes.
        train: the number of readable training images of each class.
        test: the number of readable test images of each class.
        sizes: every (height, width) that occurs, smallest area first.
        broken: the file and row of each image that cannot be read, or whose label has no class.
        deep: the number of images with 16 bits for each pixel.
        unused: folders beside those of the training and test images.
        scored: the folder of the test images, such as "val"; None if they have no folder of their own.
    """

    folder: str
    layout: str
    classes: tuple[str, ...]
    train: tuple[int, ...]
    test: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    broken: tuple[str, ...]
    deep: int = 0
    unused: tuple[str, ...] = ()
    scored: str | None = None

    @property
    def smallest(self) -> tuple[str, int]:
        """The class with the fewest training images, and their number."""
        return min(zip(self.classes, self.train, strict=True), key=itemgetter(1))

    @property
    def largest(self) -> tuple[str, int]:
        """The class with the most training images, and their number."""
        return max(zip(self.classes, self.train, strict=True), key=itemgetter(1))

    @property
    def empty(self) -> tuple[str, ...]:
        """The classes without training images or without test images.

        Example:
            >>> Inspection("folder", "folders", ("cat", "dog"), (3, 2), (1, 0), ((8, 8),), ()).empty
            ('dog',)
        """
        return tuple(c for c, *counts in zip(self.classes, self.train, self.test, strict=True) if 0 in counts)

    @property
    def per_task(self) -> tuple[int, ...]:
        """The possible numbers of classes of a task: the divisors of the number of classes.

        Example:
            >>> Inspection("folder", "folders", ("a", "b", "c", "d"), (1,) * 4, (1,) * 4, ((8, 8),), ()).per_task
            (1, 2, 4)
        """
        return tuple(k for k in range(1, len(self.classes) + 1) if len(self.classes) % k == 0)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serializable values."""
        counts = zip(self.classes, self.train, self.test, strict=True)
        return {
            "folder": self.folder,
            "layout": self.layout,
            "train": sum(self.train),
            "test": sum(self.test),
            "classes": {name: {"train": train, "test": test} for name, train, test in counts},
            "smallest": list(self.smallest),
            "largest": list(self.largest),
            "empty": list(self.empty),
            "sizes": [list(size) for size in self.sizes],
            "per_task": list(self.per_task),
            "broken": list(self.broken),
            "deep": self.deep,
            "unused": list(self.unused),
            "scored": self.scored,
        }


def inspect_folder(
    folder: Path | str,
    *,
    label: str | None = None,
    leave_out: tuple[str, ...] = (),
    size: tuple[int, int] = (32, 32),
    progress: ProgressCallback | None = None,
) -> Inspection:
    """Read and decode every image of a folder, and list the broken ones instead of stopping at the first.

    The options are those of `mooring_lab.streams.sources.from_folder`.
    """
    folder = Path(folder).expanduser()
    contents = scan_folder(folder, label=label, leave_out=leave_out)
    report = throttled(progress)
    counts: dict[str, list[int]] = {}
    sizes: set[tuple[int, int]] = set()
    broken, deep = [], 0
    for kind, split in (("train", contents.train), ("test", contents.test)):
        counts[kind] = [0] * len(contents.classes)
        total = split.count
        for done, image in enumerate(split.images(), start=1):
            try:
                decode(image, size)
                with Image.open(io.BytesIO(image.data)) as opened:
                    sizes.add((opened.height, opened.width))
                    deep += has_16_bits(opened)
            except MooringError:
                broken.append(image.where)
            else:
                if 0 <= image.label < len(contents.classes):
                    counts[kind][image.label] += 1
                else:
                    broken.append(f"{image.where} (label {image.label} of {len(contents.classes)} classes)")
            report(f"reading {kind} images", done, total)
    return Inspection(
        folder=str(folder),
        layout="parquet" if isinstance(contents.train, ParquetSplit) else "folders",
        classes=contents.classes,
        train=tuple(counts["train"]),
        test=tuple(counts["test"]),
        sizes=tuple(sorted(sizes, key=lambda size: (size[0] * size[1], size))),
        broken=tuple(broken),
        deep=deep,
        unused=contents.unused,
        scored=contents.scored,
    )
