"""Images as they are stored, in Parquet files, in folders or packed into one file, and as tensors on a device."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

Encoded = list[tuple[bytes, int]]
"""Encoded images with their labels."""


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
    """Return images as (n, 3, pixels, pixels), uint8, and their labels, on a device."""

    def one(pair: tuple[bytes, int]) -> Tensor:
        return decode(pair[0], pixels)

    with ThreadPoolExecutor() as pool:
        tensors = list(pool.map(one, images))
    return torch.stack(tensors).to(device), torch.tensor([label for _, label in images], device=device)


def decode(data: bytes, pixels: int) -> Tensor:
    """Return an image as (3, pixels, pixels), uint8."""
    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    if image.size != (pixels, pixels):
        image = image.resize((pixels, pixels), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
