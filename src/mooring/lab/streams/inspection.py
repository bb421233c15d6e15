"""A look at every image of a folder, before anything is made of it."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mooring.errors import MooringError
from mooring.lab.streams.decode import decode
from mooring.lab.streams.parquet import ParquetSplit
from mooring.lab.streams.progress_callback import ProgressCallback, throttled
from mooring.lab.streams.sources import scan_folder

__all__ = ["Inspection", "inspect_folder"]


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        folder: where.
        layout: "parquet" or "folders".
        classes: the name of each.
        train: how many training images of each class can be read.
        test: how many test images.
        sizes: every (height, width) there is, the smallest area first.
        broken: file and row of each image that cannot be read, or whose label is not one of the classes.
    """

    folder: str
    layout: str
    classes: tuple[str, ...]
    train: tuple[int, ...]
    test: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    broken: tuple[str, ...]

    @property
    def smallest(self) -> tuple[str, int]:
        """The class with the fewest training images, and how many."""
        return min(zip(self.classes, self.train, strict=True), key=lambda found: found[1])

    @property
    def largest(self) -> tuple[str, int]:
        """The class with the most training images, and how many."""
        return max(zip(self.classes, self.train, strict=True), key=lambda found: found[1])

    @property
    def empty(self) -> tuple[str, ...]:
        """Classes that there is nothing to learn or nothing to score of.

        Example:
            >>> Inspection("folder", "folders", ("cat", "dog"), (3, 2), (1, 0), ((8, 8),), ()).empty
            ('dog',)
        """
        return tuple(c for c, *counts in zip(self.classes, self.train, self.test, strict=True) if 0 in counts)

    @property
    def per_task(self) -> tuple[int, ...]:
        """How many classes a task may have: what divides their number.

        Example:
            >>> Inspection("folder", "folders", ("a", "b", "c", "d"), (1,) * 4, (1,) * 4, ((8, 8),), ()).per_task
            (1, 2, 4)
        """
        return tuple(k for k in range(1, len(self.classes) + 1) if len(self.classes) % k == 0)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
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
        }


def inspect_folder(
    folder: Path | str,
    *,
    label: str | None = None,
    leave_out: tuple[str, ...] = (),
    size: tuple[int, int] = (32, 32),
    progress: ProgressCallback | None = None,
) -> Inspection:
    """Read and decode every image of a folder, and note what is broken instead of stopping at it.

    Args:
        folder: the folder: Parquet files in the Hub's layout, or class folders.
        label: the label column of Parquet files.
        leave_out: class folders to ignore.
        size: height and width to decode to.
        progress: told about every so often, with how many images are done and how many there are.
    """
    folder = Path(folder).expanduser()
    found = scan_folder(folder, label=label, leave_out=leave_out)
    report = throttled(progress)
    counts: dict[str, list[int]] = {}
    sizes: set[tuple[int, int]] = set()
    broken = []
    for kind, split in (("train", found.train), ("test", found.test)):
        counts[kind] = [0] * len(found.classes)
        total = split.count
        for done, image in enumerate(split.images(), start=1):
            try:
                decode(image, size)
                with Image.open(io.BytesIO(image.data)) as opened:
                    sizes.add((opened.height, opened.width))
            except MooringError:
                broken.append(image.where)
            else:
                if 0 <= image.label < len(found.classes):
                    counts[kind][image.label] += 1
                else:
                    broken.append(f"{image.where} (label {image.label} of {len(found.classes)} classes)")
            report(f"reading {kind} images", done, total)
    return Inspection(
        folder=str(folder),
        layout="parquet" if isinstance(found.train, ParquetSplit) else "folders",
        classes=found.classes,
        train=tuple(counts["train"]),
        test=tuple(counts["test"]),
        sizes=tuple(sorted(sizes, key=lambda size: (size[0] * size[1], size))),
        broken=tuple(broken),
    )
