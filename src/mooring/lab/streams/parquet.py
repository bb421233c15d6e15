"""A folder of Parquet files in the layout that the Hugging Face Hub uses for image sets."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mooring.errors import MooringError
from mooring.lab.streams.decode import Encoded, Found

__all__ = ["ParquetSplit", "read_parquet"]

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("fine_label", "label", "labels")


@dataclass(frozen=True)
class ParquetSplit:
    """The files of one split, and which of their columns hold images and labels."""

    paths: tuple[Path, ...]
    image: str
    label: str

    def images(self) -> Iterator[Encoded]:
        """Each image's bytes in file and row order, a row group at a time."""
        for path in self.paths:
            row = 0
            for batch in pq.ParquetFile(path).iter_batches(batch_size=1024, columns=[self.image, self.label]):
                for image, label in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                    data = image.get("bytes") if isinstance(image, dict) else image
                    yield Encoded(data or b"", f"{path}, row {row}", int(label))
                    row += 1


def read_parquet(folder: Path, *, label: str | None = None) -> Found:
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
    classes = _class_names(schema, label) or _count_classes(splits["train"] + splits["test"], label)
    made = {kind: ParquetSplit(tuple(files), image, label) for kind, files in splits.items()}
    return Found(classes, made["train"], made["test"])


def _schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
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
    columns = (pq.read_table(path, columns=[label]).column(0) for path in files)
    largest = max((value for column in columns for value in column.to_pylist()), default=-1)
    return tuple(str(number) for number in range(largest + 1))
