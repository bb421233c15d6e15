"""Inspection of an image folder: classes, counts, sizes and broken images."""

import io
from pathlib import Path
from typing import Any

from PIL import Image

from mooring.errors import MooringError
from mooring_lab.streams.decode import decode, has_16_bits
from mooring_lab.streams.parquet import ParquetSplit
from mooring_lab.streams.progress_callback import ProgressCallback, throttled
from mooring_lab.streams.sources import scan_folder


def inspect_folder(
    folder: Path | str,
    *,
    label: str | None = None,
    leave_out: tuple[str, ...] = (),
    size: tuple[int, int] = (32, 32),
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Read and decode every image of a folder, and list the broken ones instead of stopping at the first.

    The options are those of `mooring_lab.streams.sources.from_folder`.

    Returns:
        Plain values. `folder` and `layout` ("parquet" or "folders"); `train`, `test` and `classes`, the number of
        readable images in total and of each class; `empty`, the classes without training or without test images;
        `sizes`, the heights and widths that occur, smallest first; `per_task`, the possible numbers of classes of a
        task; `broken`, the images that cannot be read; `deep`, how many have 16 bits for each pixel; `unused`, folders
        beside those of the training and test images; and `scored`, the folder of the test images if they have one, such
        as "val".
    """
    folder = Path(folder).expanduser()
    contents = scan_folder(folder, label=label, leave_out=leave_out)
    report = throttled(progress)
    counts = {name: {"train": 0, "test": 0} for name in contents.classes}
    sizes: set[tuple[int, int]] = set()
    broken, deep = [], 0
    for kind, split in (("train", contents.train), ("test", contents.test)):
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
                    counts[contents.classes[image.label]][kind] += 1
                else:
                    broken.append(f"{image.where} (label {image.label} of {len(contents.classes)} classes)")
            report(f"reading {kind} images", done, total)
    return {
        "folder": str(folder),
        "layout": "parquet" if isinstance(contents.train, ParquetSplit) else "folders",
        **{kind: sum(count[kind] for count in counts.values()) for kind in ("train", "test")},
        "classes": counts,
        "empty": [name for name, count in counts.items() if 0 in count.values()],
        "sizes": [list(pair) for pair in sorted(sizes, key=lambda pair: (pair[0] * pair[1], pair))],
        "per_task": [number for number in range(1, len(counts) + 1) if len(counts) % number == 0],
        "broken": broken,
        "deep": deep,
        "unused": list(contents.unused),
        "scored": contents.scored,
    }
