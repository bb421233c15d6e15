"""A folder of Parquet files in the layout that the Hugging Face Hub uses for image sets."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mooring.errors import MooringError
from mooring.lab.streams.decode import EncodedImage, FolderContents

__all__ = ["ParquetSplit", "read_parquet"]

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("fine_label", "label", "labels")
MOST_CLASSES = 1_000_000
"""A label beyond is damage; a name for each class would fill the memory."""


@dataclass(frozen=True)
class ParquetSplit:
    """The files of one split, and which of their columns hold images and labels."""

    paths: tuple[Path, ...]
    image: str
    label: str

    @property
    def labels(self) -> tuple[int, ...]:
        """None: they are in the files."""
        return ()

    @property
    def count(self) -> int:
        """How many images there are, from the files' own tables of contents."""
        total = 0
        for path in self.paths:
            with _refused(path), pq.ParquetFile(path) as opened:
                total += opened.metadata.num_rows
        return total

    def images(self) -> Iterator[EncodedImage]:
        """Each image's bytes in file and row order, a row group at a time."""
        for path in self.paths:
            row = 0
            for images, labels in self._batches(path):
                for image, label in zip(images, labels, strict=True):
                    data = image.get("bytes") if isinstance(image, dict) else image
                    if not isinstance(label, int):
                        raise MooringError(f"{path}, row {row} has the label {label!r}: labels must be whole numbers")
                    yield EncodedImage(data or b"", f"{path}, row {row}", label)
                    row += 1

    def _batches(self, path: Path) -> Iterator[tuple[list[Any], list[Any]]]:
        with _refused(path), pq.ParquetFile(path) as opened:
            for name in (self.image, self.label):
                _column(opened.schema_arrow, (name,), path, "image" if name == self.image else "label")
            for batch in opened.iter_batches(batch_size=1024, columns=[self.image, self.label]):
                yield batch.column(self.image).to_pylist(), batch.column(self.label).to_pylist()


def read_parquet(folder: Path, *, label: str | None = None) -> FolderContents:
    """Files called train-*.parquet and test-*.parquet, in the folder or in its `data`.

    Images are a column of bytes, or of structs with `bytes`; labels are whole numbers. Class names are taken from the
    schema's metadata where it has them.

    Args:
        folder: the folder.
        label: the label column; by default fine_label or label.
    """
    splits = {}
    for kind in ("train", "test"):
        found = sorted(folder.glob(f"{kind}-*.parquet")) or sorted((folder / "data").glob(f"{kind}-*.parquet"))
        if not found:
            raise MooringError(f"{folder} has no {kind}-*.parquet, nor has its folder data")
        splits[kind] = found
    schema = _schema(splits["train"][0])
    image = _column(schema, IMAGE_COLUMNS, splits["train"][0], "image")
    label = _column(schema, (label,) if label else LABEL_COLUMNS, splits["train"][0], "label")
    held = schema.field(label).type
    if not pa.types.is_integer(held):
        raise MooringError(f"{splits['train'][0]} has a label column {label} of {held}: labels must be whole numbers")
    classes = _class_names(schema, label) or _count_classes(splits["train"] + splits["test"], label)
    made = {kind: ParquetSplit(tuple(files), image, label) for kind, files in splits.items()}
    return FolderContents(classes, made["train"], made["test"])


def _schema(path: Path) -> pa.Schema:
    with _refused(path):
        return pq.read_schema(path)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """A damaged file is named, wherever the damage shows."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise MooringError(f"{path} is not a Parquet file that can be read: fetch it again") from error


def _column(schema: pa.Schema, candidates: tuple[str, ...], path: Path, what: str) -> str:
    for name in candidates:
        if name in schema.names:
            return name
    raise MooringError(f"{path} has no {what} column {' or '.join(candidates)}; it has {', '.join(schema.names)}")


def _class_names(schema: pa.Schema, label: str) -> tuple[str, ...]:
    """The names the Hub keeps under `huggingface`, or nothing."""
    try:
        info: Any = json.loads((schema.metadata or {})[b"huggingface"])
        return tuple(str(name) for name in info["info"]["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _count_classes(files: list[Path], label: str) -> tuple[str, ...]:
    largest = -1
    for path in files:
        _column(_schema(path), (label,), path, "label")
        with _refused(path):
            values = pq.read_table(path, columns=[label]).column(0).to_pylist()
        # what is not a whole number is named with its row when it is read
        largest = max([largest, *(value for value in values if isinstance(value, int))])
    if largest >= MOST_CLASSES:
        raise MooringError(f"{files[0].parent} has the label {largest}: labels count the classes, from 0")
    if largest < 0:
        raise MooringError(f"{files[0].parent} holds no images: its Parquet files have no rows with a label")
    return tuple(str(number) for number in range(largest + 1))
