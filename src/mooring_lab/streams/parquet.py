"""Images in Parquet files, in the layout of the Hugging Face Hub."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mooring.errors import MooringError
from mooring_lab.streams.decode import EncodedImage, FolderContents

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("fine_label", "label", "labels")
MAX_CLASSES = 1_000_000
"""A larger label means a damaged file; a name for each class would fill the memory."""


@dataclass(frozen=True)
class ParquetSplit:
    """One split of a data set in Parquet files, and its image and label columns."""

    paths: tuple[Path, ...]
    image: str
    label: str
    labels: tuple[int, ...] = ()  # they are in the files

    @property
    def count(self) -> int:
        """The number of images, from the metadata of the files."""
        total = 0
        for path in self.paths:
            with _name_damaged_file(path), pq.ParquetFile(path) as opened:
                total += opened.metadata.num_rows
        return total

    def images(self) -> Iterator[EncodedImage]:
        """Yield the images in file and row order, read one batch of rows at a time."""
        for path in self.paths:
            with _name_damaged_file(path), pq.ParquetFile(path) as opened:
                _column(opened.schema_arrow, (self.image,), path, "image")
                _column(opened.schema_arrow, (self.label,), path, "label")
                batches = opened.iter_batches(batch_size=1024, columns=[self.image, self.label])
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(rows):
                    image, label = row[self.image], row[self.label]
                    data = image.get("bytes") if isinstance(image, dict) else image
                    where = f"{path}, row {number}"
                    if not isinstance(label, int):
                        raise MooringError(f"{where} has the label {label!r}: labels must be whole numbers")
                    yield EncodedImage(data or b"", where, label)


def read_parquet(folder: Path, *, label: str | None = None) -> FolderContents:
    """List the images of files train-*.parquet and test-*.parquet, in the folder or in its subfolder `data`.

    The image column has bytes, or structs with a field `bytes`; the label column, by default fine_label or label, has
    integers. Class names come from the metadata of the schema if it has any.
    """
    files = {}
    for kind in ("train", "test"):
        files[kind] = sorted(folder.glob(f"{kind}-*.parquet")) or sorted((folder / "data").glob(f"{kind}-*.parquet"))
        if not files[kind]:
            raise MooringError(f"{folder} has no {kind}-*.parquet, nor has its folder data")
    first = files["train"][0]
    with _name_damaged_file(first):
        schema = pq.read_schema(first)
    image = _column(schema, IMAGE_COLUMNS, first, "image")
    label = _column(schema, (label,) if label else LABEL_COLUMNS, first, "label")
    label_type = schema.field(label).type
    if not pa.types.is_integer(label_type):
        raise MooringError(f"{first} has a label column {label} of {label_type}: labels must be whole numbers")
    classes = _class_names(schema, label) or _count_classes(files["train"] + files["test"], label)
    train, test = (ParquetSplit(tuple(files[kind]), image, label) for kind in ("train", "test"))
    return FolderContents(classes, train, test)


@contextmanager
def _name_damaged_file(path: Path) -> Iterator[None]:
    """Turn a read error into an error that names the file."""
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
    """Return the class names that the Hub stores in the metadata under `huggingface`, if any."""
    try:
        info: Any = json.loads((schema.metadata or {})[b"huggingface"])
        return tuple(str(name) for name in info["info"]["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _count_classes(files: list[Path], label: str) -> tuple[str, ...]:
    largest = -1
    for path in files:
        with _name_damaged_file(path):
            _column(pq.read_schema(path), (label,), path, "label")
            values = pq.read_table(path, columns=[label]).column(0).to_pylist()
        # `images` reports a label that is not an integer, with its row
        largest = max([largest, *(value for value in values if isinstance(value, int))])
    if largest >= MAX_CLASSES:
        raise MooringError(f"{files[0].parent} has the label {largest}: labels count the classes, from 0")
    if largest < 0:
        raise MooringError(f"{files[0].parent} holds no images: its Parquet files have no rows with a label")
    return tuple(str(number) for number in range(largest + 1))
