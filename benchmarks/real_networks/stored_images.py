"""Images as they are stored, in Parquet files, in folders or packed into one file, and as tensors on a device."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

Encoded = list[tuple[bytes, int]]
"""Encoded images with their labels."""

DECODERS = 8
"""The number of threads that decode; more of them only wait for each other."""

RESIZED_TOGETHER = 256
"""The number of images that are resized at a time."""


def read_parquet(folder: Path, split: str, count: int) -> Encoded:
    """Return a seeded choice of the images in the Parquet files of a data set, in the layout of the Hub."""
    import pyarrow.parquet as parquet

    tables = [parquet.read_table(file) for file in sorted((folder / "data").glob(f"{split}-*.parquet"))]
    if not tables:
        raise SystemExit(f"error: no {split}-*.parquet in {folder / 'data'}: give --data the folder of the data sets")
    names = tables[0].column_names
    image = next(name for name in ("image", "img") if name in names)
    label = next(name for name in ("label", "fine_label") if name in names)
    rows = [(table, row) for table in tables for row in range(len(table))]
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[:count].tolist()
    return [(rows[i][0][image][rows[i][1]].as_py()["bytes"], rows[i][0][label][rows[i][1]].as_py()) for i in chosen]


def read_folder(folder: Path, count: int, test_count: int) -> tuple[Encoded, Encoded]:
    """Return training and test images from a folder with one folder for each class; every fifth is for the test."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [(file, number) for number, path in enumerate(classes) for file in sorted(path.iterdir())]
    if not files:
        raise SystemExit(f"error: no images in {folder}: it needs a folder of images for each class")
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(1)).tolist()
    parts = [[files[i] for k, i in enumerate(order) if bool(k % 5) == train] for train in (True, False)]
    pairs = [[(file.read_bytes(), number) for file, number in part] for part in (parts[0][:count], parts[1])]
    return pairs[0], pairs[1][:test_count]


def write_pack(path: Path, images: dict[str, Encoded]) -> None:
    """Write encoded images to one file, for a machine that has neither the data sets nor their packages."""
    tensors = {}
    for name, pairs in images.items():
        whole = torch.frombuffer(bytearray(b"".join(data for data, _ in pairs)), dtype=torch.uint8)
        lengths = torch.tensor([len(data) for data, _ in pairs])
        tensors[name] = {"bytes": whole, "lengths": lengths, "labels": torch.tensor([label for _, label in pairs])}
    torch.save(tensors, path)


def read_pack(path: Path) -> dict[str, Encoded]:
    """Return the images of a file that `write_pack` wrote."""
    images = {}
    for name, part in torch.load(path, weights_only=True).items():
        pieces = part["bytes"].split(part["lengths"].tolist())
        images[name] = [(p.numpy().tobytes(), label) for p, label in zip(pieces, part["labels"].tolist(), strict=True)]
    return images


def decoded(images: Sequence[tuple[bytes, int]], pixels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return images as (n, 3, pixels, pixels), uint8, and their labels, on a device, where they are resized too."""
    with ThreadPoolExecutor(DECODERS) as pool:
        arrays = list(pool.map(decode, (data for data, _ in images)))
    result = torch.empty((len(arrays), 3, pixels, pixels), dtype=torch.uint8, device=device)
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, array in enumerate(arrays):
        by_size.setdefault(array.shape, []).append(index)
    for indices in by_size.values():
        for start in range(0, len(indices), RESIZED_TOGETHER):
            part = indices[start : start + RESIZED_TOGETHER]
            stored = torch.from_numpy(np.stack([arrays[index] for index in part])).to(device)
            result[torch.tensor(part, device=device)] = resized(stored.permute(0, 3, 1, 2), pixels)
    return result, torch.tensor([label for _, label in images], device=device)


def decode(data: bytes) -> Any:
    """Return an image as an array (height, width, 3), uint8, in the size that it is stored in."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def resized(images: Tensor, pixels: int) -> Tensor:
    """Return images (n, 3, height, width), uint8, in another size, by Pillow's bicubic filter, which rounds twice.

    Example:
        >>> resized(torch.full((1, 3, 8, 8), 7, dtype=torch.uint8), 4)[0, 0, 0]
        tensor([7, 7, 7, 7], dtype=torch.uint8)
    """
    if images.shape[2:] == (pixels, pixels):
        return images
    values = images.float()
    for size in ((images.shape[2], pixels), (pixels, pixels)):
        values = interpolate(values, size=size, mode="bicubic", antialias=True).round_().clamp_(0, 255)
    return values.to(torch.uint8)
