"""Tests of named data sets: their entries, their folders, and the paper's tasks as default."""

import io
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mooring.errors import MooringError
from mooring_lab.streams.cache import cache_size
from mooring_lab.streams.named_datasets import NAMED_DATASETS, default_folder, fetched_folder, find_dataset
from mooring_lab.streams.options import StreamOptions, open_stream


@pytest.mark.parametrize(
    ("name", "tasks", "classes"),
    [("cifar100", 10, 10), ("flowers102", 17, 6), ("caltech256", 32, 8), ("caltech101", 12, 8)],
)
def test_tasks_of_the_paper_are_the_default(name, tasks, classes):
    assert NAMED_DATASETS[name].tasks == tasks
    assert NAMED_DATASETS[name].per_task == classes
    assert NAMED_DATASETS[name].classes == tasks * classes
    assert StreamOptions(name).classes_per_task == classes


@pytest.mark.parametrize("dataset", NAMED_DATASETS.values(), ids=lambda dataset: dataset.name)
def test_entry_names_a_commit_or_says_how_to_get_the_data(dataset):
    assert NAMED_DATASETS[dataset.name] is dataset
    assert dataset.classes % dataset.per_task == 0
    assert "\n" not in dataset.description + dataset.note + dataset.how_to_get
    if dataset.repository:
        assert re.fullmatch(r"[0-9a-f]{40}", dataset.revision), "a branch can change"
        assert {kind for _, kind in dataset.files} == {"train", "test"}
        assert f"mooring data fetch {dataset.name}" in dataset.how_to_get
    else:
        assert "--data" in dataset.how_to_get
        assert "https://" in dataset.how_to_get


def test_unknown_name_raises_an_error_with_the_closest_name():
    with pytest.raises(MooringError, match=r"unknown data set 'flowers' .did you mean 'flowers102'"):
        find_dataset("flowers")


def test_default_folder_depends_on_the_environment(monkeypatch, tmp_path):
    for name in ("MOORING_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder("cifar10") == tmp_path / ".cache" / "mooring" / "data" / "cifar10"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder("cifar10") == tmp_path / "xdg" / "mooring" / "data" / "cifar10"
    monkeypatch.setenv("MOORING_DATA", str(tmp_path / "data"))
    assert default_folder("cifar10") == tmp_path / "data" / "cifar10"
    assert fetched_folder(NAMED_DATASETS["cifar10"]) is None
    default_folder("cifar10").mkdir(parents=True)
    assert fetched_folder(NAMED_DATASETS["cifar10"]) == tmp_path / "data" / "cifar10"


# Caltech-256, on a small folder in its public layout


@pytest.fixture
def caltech(tmp_path):
    """Create four classes and the clutter; the grey value of an image is five times its number in its class."""
    root = tmp_path / "unpacked" / "256_ObjectCategories"
    counts = {"001.ak47": 10, "002.american-flag": 7, "003.backpack": 5, "004.baseball-bat": 12, "257.clutter": 9}
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for number in range(1, count + 1):
            picture = Image.fromarray(np.full((48, 40 + number, 3), 5 * number, np.uint8))
            picture.save(root / folder / f"{folder[:3]}_{number:04d}.jpg", quality=100)
    (root / "004.baseball-bat" / "RENAME2").write_text("the public archive has such a file")
    return root


def test_caltech_is_split_by_file_order_without_its_clutter(caltech):
    stream = open_stream(StreamOptions(name="caltech256", data=str(caltech), per_task=2))
    assert [task.name for task in stream.tasks] == ["001.ak47 002.american-flag", "003.backpack 004.baseball-bat"]
    assert stream.name == "caltech256 (2 classes a task)"
    assert stream.shape == (3, 32, 32)
    expected = {  # image numbers of each class: the first four fifths, then the others
        "train": [[*range(1, 9)], [*range(1, 7)], [*range(1, 5)], [*range(1, 11)]],
        "test": [[9, 10], [7], [5], [11, 12]],
    }
    for kind, split in (("train", stream.train), ("test", stream.test)):
        numbers = []
        for task in stream.tasks:
            indices = getattr(task, kind)
            for label in (0, 1):
                chosen = indices[split.labels[indices] == label]
                numbers.append((split.images[chosen][:, 0, 0, 0].float() / 5).round().int().tolist())
        assert numbers == expected[kind]


def test_folder_of_the_unpacked_archive_is_accepted(caltech):
    inside = open_stream(StreamOptions(name="caltech256", data=str(caltech), per_task=2))
    above = open_stream(StreamOptions(name="caltech256", data=str(caltech.parent), per_task=2))
    assert above.fingerprint == inside.fingerprint


def test_folder_with_another_number_of_classes_raises_an_error(caltech):
    with pytest.raises(
        MooringError, match="has 4 classes and caltech256 has 256: give its own folder, or say per_task"
    ):
        open_stream(StreamOptions(name="caltech256", data=str(caltech)))
    assert cache_size() == 0, "nothing was decoded"


# Caltech-101, on generated images in the layout of the Hub


@pytest.fixture
def caltech101(tmp_path):
    """Create 101 classes with 2 to 5 training images and 1 test image each; the grey value is the class."""
    names = [f"class {number:03d}" for number in range(101)]
    schema = pa.schema([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())])
    info = {"info": {"features": {"label": {"names": names}}}}
    schema = schema.with_metadata({"huggingface": json.dumps(info)})
    for kind in ("train", "test"):
        rows = []
        for label in range(101):
            buffer = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), label, np.uint8)).save(buffer, "PNG")
            count = 2 + label % 4 if kind == "train" else 1
            rows += [{"image": {"bytes": buffer.getvalue(), "path": None}, "label": label}] * count
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "data" / f"{kind}-00000-of-00001.parquet")
    return tmp_path


def test_caltech101_has_twelve_tasks_of_eight_unbalanced_classes_and_leaves_the_last_classes_out(caltech101):
    stream = open_stream(StreamOptions("caltech101", data=str(caltech101)))
    assert [len(task.classes) for task in stream.tasks] == [8] * 12
    assert stream.tasks[-1].classes == tuple(range(88, 96))
    assert int(stream.train.images.max()) == int(stream.test.images.max()) == 95
    assert [len(task.train) for task in stream.tasks] == [2 * (2 + 3 + 4 + 5)] * 12
    assert [len(task.test) for task in stream.tasks] == [8] * 12
    fewer = open_stream(StreamOptions("caltech101", data=str(caltech101), per_task=4, tasks=3))
    assert [task.classes for task in fewer.tasks] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
