"""Tests of data sets from folders and from Python, their decoding, and the cache of decoded images."""

import io
import json
import multiprocessing
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mooring.errors import MooringError
from mooring_lab.streams import cache
from mooring_lab.streams.cache import cache_folder, content_key, load_or_build
from mooring_lab.streams.decode import EncodedImage, decode
from mooring_lab.streams.sources import from_dataset, from_folder


def encoded(pixels, file_format="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, file_format)
    return buffer.getvalue()


def picture(seed, height=32, width=32):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_parquet(folder, kind, rows, names=("cat", "dog"), part="00000-of-00001"):
    folder.mkdir(parents=True, exist_ok=True)
    images = pa.array([{"bytes": data, "path": None} for data, _ in rows])
    table = pa.table({"img": images, "fine_label": [label for _, label in rows]})
    info = {"info": {"features": {"fine_label": {"names": list(names)}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, folder / f"{kind}-{part}.parquet")


@pytest.fixture(autouse=True)
def _cache(_own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "set"
    write_parquet(folder / "data", "train", [(encoded(picture(i)), i % 2) for i in range(6)], part="00000-of-00002")
    write_parquet(folder / "data", "train", [(encoded(picture(i)), i % 2) for i in range(6, 8)], part="00001-of-00002")
    write_parquet(folder / "data", "test", [(encoded(picture(i)), i % 2) for i in range(8, 11)])
    return folder


def test_parquet_files_are_read_in_file_and_row_order(hub):
    source = from_folder(hub)
    assert source.name == "set"
    assert source.classes == ("cat", "dog")
    assert source.train.labels.tolist() == [0, 1] * 4
    for index in range(8):
        assert torch.equal(source.train.images[index], torch.from_numpy(picture(index)).permute(2, 0, 1))
    assert len(source.test) == 3


def test_train_and_test_folders_are_read_as_splits(tmp_path):
    for split in ("train", "test"):
        for label in ("b", "a"):
            for number in range(3):
                path = tmp_path / "split" / split / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encoded(picture(number)))
    source = from_folder(tmp_path / "split")
    assert source.classes == ("a", "b")
    assert source.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(source.test) == 6


def write_images(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(np.full((4, 4, 3), len(name), np.uint8)))


@pytest.mark.parametrize("scored", ["test", "val", "valid"])
def test_first_test_folder_is_scored_and_the_others_are_named(tmp_path, scored):
    names = ("test", "val", "valid", "validation")
    present = names[names.index(scored) :]
    write_images(tmp_path / "set", "train/a/0.png", *(f"{name}/a/0.png" for name in present))
    source = from_folder(tmp_path / "set", size=(4, 4))
    assert source.test.images[:, 0, 0, 0].tolist() == [len(f"{scored}/a/0.png")]
    assert source.name == f"set ({', '.join(f'{name}/ not used' for name in present[1:])})"


def test_classes_without_test_or_training_images_are_named(tmp_path):
    write_images(tmp_path / "set", "train/a/0.png", "train/b/0.png", "test/a/0.png", "test/c/0.png")
    assert from_folder(tmp_path / "set").name == "set (never scored: b, never trained: c)"
    pixels = torch.zeros(1, 2, 2, dtype=torch.uint8)
    train, test = [(pixels, label) for label in range(8)], [(pixels, 0)]
    assert from_dataset("blank", train, test).name == "blank (never scored: 1 2 3 4 5 2 more)"


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "PPM"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_are_scaled_to_8(file_format, channels):
    deep = np.array([[0, 257, 32_896, 65_535]], dtype=np.uint16)
    pixels = decode(EncodedImage(encoded(deep, file_format), "file", 0), (1, 4), channels)
    assert pixels.tolist() == [[[0, 1, 128, 255]]] * channels


def test_pixels_without_a_fixed_range_are_refused(tmp_path):
    data = encoded(np.array([[0.5, 3.0]], dtype=np.float32), "TIFF")
    with pytest.raises(MooringError, match=r"file .*mode F have no fixed range, save it with 8 or 16 bits"):
        decode(EncodedImage(data, "file", 0), (1, 2))


def test_class_folders_are_split_by_file_order(tmp_path):
    """The layout of Caltech-256: 256_ObjectCategories/001.ak47/001_0001.jpg, and 257.clutter, which is ignored."""
    root = tmp_path / "256_ObjectCategories"
    for number, name, count in ((1, "ak47", 10), (2, "american-flag", 7), (257, "clutter", 5)):
        for index in range(1, count + 1):
            path = root / f"{number:03d}.{name}" / f"{number:03d}_{index:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(np.full((50, 40, 3), 10 * index, np.uint8), "JPEG"))
        (root / f"{number:03d}.{name}" / "RENAME2").write_text("not an image")
    source = from_folder(root, leave_out=("257.clutter",))
    assert source.classes == ("001.ak47", "002.american-flag")
    assert [int((source.train.labels == k).sum()) for k in (0, 1)] == [8, 6]
    assert [int((source.test.labels == k).sum()) for k in (0, 1)] == [2, 1]
    assert source.test.images[:, 0, 0, 0].tolist() == [90, 100, 70]  # the last files of each class


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "RGB"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_is_decoded_to_the_requested_size_and_channels(mode, channels):
    grey = np.full((45, 70), 128, np.uint8)
    image = Image.fromarray(grey)
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16))
    elif mode != "L":
        image = image.convert("RGB").convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "TIFF")
    pixels = decode(EncodedImage(buffer.getvalue(), "file", 0), (32, 24), channels)
    assert pixels.shape == (channels, 32, 24)
    assert pixels.dtype == np.uint8


def test_resizing_is_bilinear_and_antialiased():
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    pixels = decode(EncodedImage(encoded(stripes), "file", 0), (16, 16))
    assert abs(pixels.astype(int) - 128).max() < 40, "aliased stripes would be black or white"
    expected = np.asarray(Image.fromarray(picture(3, 50, 40)).resize((32, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(
        decode(EncodedImage(encoded(picture(3, 50, 40)), "file", 0), (32, 32)), expected.transpose(2, 0, 1)
    )


def test_broken_image_is_named_or_skipped_and_counted(tmp_path):
    good = encoded(picture(0))
    for name, bad in (("cut", good[: len(good) // 2]), ("text", b"hello"), ("empty", b"")):
        folder = tmp_path / name
        write_parquet(folder, "train", [(good, 0), (bad, 1), (good, 1)])
        write_parquet(folder, "test", [(good, 0)])
        with pytest.raises(MooringError, match=r"train-00000-of-00001\.parquet, row 1 is not an image") as error:
            from_folder(folder)
        assert "\n" not in str(error.value)
        source = from_folder(folder, skip_broken=True)
        assert source.name == f"{name} (1 broken images skipped, never scored: dog)"
        assert source.train.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: None, "there is no folder .*set: give a folder with one for each class"),
        (lambda f: f.write_text("text"), "set is a file: give a folder with one for each class"),
        (lambda f: f.mkdir(), "holds no images"),
        (lambda f: (f / "cat").mkdir(parents=True), "holds no images"),
        (lambda f: write_parquet(f, "train", [(b"", 0)]), "has no test-\\*.parquet"),
    ],
)
def test_folder_without_images_raises_a_one_line_error(make, message, tmp_path):
    make(tmp_path / "set")
    with pytest.raises(MooringError, match=message) as error:
        from_folder(tmp_path / "set")
    assert "\n" not in str(error.value)


def test_unreadable_parquet_file_or_missing_column_is_named(hub):
    (hub / "data" / "train-00000-of-00002.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(MooringError, match=r"train-00000-of-00002\.parquet is not a Parquet file"):
        from_folder(hub)
    write_parquet(hub / "data", "train", [(b"", 0)], part="00000-of-00002")
    with pytest.raises(MooringError, match="no label column nothing; it has img, fine_label"):
        from_folder(hub, label="nothing")


# The cache


def test_images_are_decoded_again_only_when_data_or_options_change(hub, monkeypatch):
    calls = []
    write = cache.write_atomically
    monkeypatch.setattr(cache, "write_atomically", lambda path, data: (calls.append(1), write(path, data)))
    first = from_folder(hub)
    again = from_folder(hub)
    assert len(calls) == 1
    assert torch.equal(first.train.images, again.train.images)
    from_folder(hub, size=(16, 16))
    assert len(calls) == 2
    write_parquet(hub / "data", "test", [(encoded(picture(99)), 1)])
    assert torch.equal(from_folder(hub).test.images[0], torch.from_numpy(picture(99)).permute(2, 0, 1))
    assert len(calls) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damaged_cache_is_rebuilt(hub, damage):
    expected = from_folder(hub).train.images.clone()
    (target,) = cache_folder().iterdir()
    data = bytearray(target.read_bytes())
    if damage == "flip":
        data[-5] ^= 255
        target.write_bytes(data)
    elif damage == "lose":
        target.unlink()
    else:
        target.write_bytes(data[: len(data) // 2])
    assert torch.equal(from_folder(hub).train.images, expected)
    assert sorted(p.name for p in cache_folder().iterdir()) == [target.name], "temporary files must be removed"


def test_modifying_the_images_does_not_change_the_cache(hub):
    source = from_folder(hub)
    source.train.images[0] = 0
    assert torch.equal(from_folder(hub).train.images[0], torch.from_numpy(picture(0)).permute(2, 0, 1))


def _build_concurrently(arguments):
    folder, number = arguments
    os.environ["XDG_CACHE_HOME"] = folder
    arrays = load_or_build("key", lambda: {"a": torch.full((200_000,), number)})
    return int(arrays["a"][0]), int(arrays["a"][-1])


def test_concurrent_builds_agree(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(_build_concurrently, [(str(tmp_path / "cache"), n) for n in range(1, 9)], chunksize=1)
    assert all(first == last for first, last in results), "no process reads a file that another is writing"
    assert [p.name for p in cache_folder().iterdir()] == ["key.safetensors"]


def test_failed_build_leaves_no_files(tmp_path):
    def fail():
        raise MooringError("photo.jpg is broken")

    with pytest.raises(MooringError, match=r"photo\.jpg is broken"):
        load_or_build("key", fail)
    assert list(cache_folder().iterdir()) == []


def test_full_disk_raises_a_one_line_error_and_leaves_no_files(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MooringError, match="No space left on device") as error:
        load_or_build("key", lambda: {"a": torch.zeros(3)})
    assert "\n" not in str(error.value)
    assert list(cache_folder().iterdir()) == []


def test_unwritable_cache_is_reported_in_one_line(hub, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(MooringError, match="for decoded images, cannot be written: set XDG_CACHE_HOME") as error:
        from_folder(hub)
    assert "\n" not in str(error.value)


def test_content_key_does_not_depend_on_folder_or_time(hub, tmp_path):
    files = sorted((hub / "data").iterdir())
    moved = shutil.copytree(hub, tmp_path / "elsewhere")
    os.utime(moved / "data" / files[0].name, (0, 0))
    assert content_key(files, 1) == content_key(sorted((moved / "data").iterdir()), 1)
    assert content_key(files, 1) != content_key(files, 2)
    assert content_key(files) != content_key(files[::-1])


# Data sets from Python


def test_dataset_of_tensors_arrays_or_pillow_images():
    array = picture(1, 8, 8)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    for image in (array, tensor, Image.fromarray(array)):
        source = from_dataset("custom", [(image, 0), (image, 2)], [(image, 1)])
        assert torch.equal(source.train.images[0], tensor)
        assert source.classes == ("0", "1", "2")
    grey = from_dataset("grey", [(array[:, :, 0], 0)], [(array[:, :, 0], 0)], classes=["only"])
    assert grey.train.images.shape == (1, 1, 8, 8)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "custom has no images"),
        ([(torch.zeros(3, 4, 4), 0)], "item 0: images must be uint8"),
        ([(torch.zeros(3, 4, 4, dtype=torch.uint8), 0), (torch.zeros(3, 5, 4, dtype=torch.uint8), 0)], "item 1"),
    ],
)
def test_invalid_dataset_raises_a_one_line_error(items, message):
    with pytest.raises(MooringError, match=message) as error:
        from_dataset("custom", items, [(torch.zeros(3, 4, 4, dtype=torch.uint8), 0)])
    assert "\n" not in str(error.value)
