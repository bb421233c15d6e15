"""Tests of stream options: the streams they open, and the errors before any data is read."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mooring.errors import MooringError
from mooring_lab.streams import Split, Stream, Task, by_class, digits, permuted, rotated
from mooring_lab.streams.cache import cache_size
from mooring_lab.streams.named_datasets import NAMED_DATASETS
from mooring_lab.streams.options import StreamOptions, open_stream, stream_descriptions
from mooring_lab.streams.progress_callback import throttled
from mooring_lab.streams.slices import limit_images, limit_source, select_tasks
from mooring_lab.streams.sources import from_folder


@pytest.fixture
def folder(tmp_path):
    """Create six class folders of four images; the grey value of an image encodes its class and number."""
    for label in range(6):
        for number in range(4):
            path = tmp_path / "photos" / f"class{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((10, 12, 3), 40 * label + number, np.uint8)).save(path)
    return tmp_path / "photos"


def same_stream(one, other):
    return one.fingerprint == other.fingerprint and [t.name for t in one.tasks] == [t.name for t in other.tasks]


# Opened streams


def test_digits_are_the_default():
    assert same_stream(open_stream(StreamOptions()), by_class(digits(), 2))
    assert same_stream(open_stream(StreamOptions("digits", per_task=5, shuffle=3)), by_class(digits(), 5, shuffle=3))
    assert same_stream(open_stream(StreamOptions("digits-permuted", tasks=3, seed=7)), permuted(digits(), 3, seed=7))
    assert same_stream(open_stream(StreamOptions("digits-rotated", degrees=90.0)), rotated(digits(), 5, degrees=90.0))


def test_folder_is_cut_by_class_or_by_rotation(folder):
    stream = open_stream(StreamOptions("folder", data=str(folder), per_task=3, size=8, channels=1))
    assert stream.shape == (1, 8, 8)
    assert stream.name == "photos (3 classes a task)"
    assert [len(task.train) for task in stream.tasks] == [9, 9]
    rotations = open_stream(StreamOptions("folder-rotated", data=str(folder), tasks=2))
    assert rotations.shape == (3, 32, 32)
    assert rotations.outputs == 6


def test_named_data_set_is_read_from_its_default_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MOORING_DATA", str(tmp_path / "home"))
    with pytest.raises(MooringError, match="cifar10 is not on this machine: run `mooring data fetch cifar10`, or give"):
        open_stream(StreamOptions("cifar10"))
    with pytest.raises(MooringError, match=r"caltech256 is not on this machine: get 256_ObjectCategories\.tar"):
        open_stream(StreamOptions("caltech256"))
    data = tmp_path / "home" / "cifar10" / "data"
    data.mkdir(parents=True)
    png = (folder / "class0" / "0.png").read_bytes()
    for kind in ("train", "test"):
        table = pa.table({"img": [{"bytes": png, "path": None}] * 10, "label": list(range(10)), "other": [0] * 10})
        names = {"info": {"features": {"label": {"names": [f"thing {n}" for n in range(10)]}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(names)})
        pq.write_table(table, data / f"{kind}-00000-of-00001.parquet")
    stream = open_stream(StreamOptions("cifar10"))
    assert stream.name == "cifar10 (2 classes a task)"
    assert [task.name for task in stream.tasks][:2] == ["thing 0 thing 1", "thing 2 thing 3"]


def test_skip_and_tasks_keep_only_the_images_of_those_tasks():
    stream = by_class(digits(), 2)
    part = open_stream(StreamOptions("digits", skip=1, tasks=2))
    assert [task.classes for task in part.tasks] == [(2, 3), (4, 5)]
    for kind in ("train", "test"):
        full, kept = getattr(stream, kind), getattr(part, kind)
        assert len(kept) == sum(len(getattr(task, kind)) for task in part.tasks)
        for before, after in zip(stream.tasks[1:3], part.tasks, strict=True):
            old, new = getattr(before, kind), getattr(after, kind)
            assert torch.equal(full.images[old], kept.images[new])
            assert torch.equal(full.labels[old], kept.labels[new])


def test_skip_does_not_change_the_other_permutations():
    stream = permuted(digits(), 4, seed=1)
    part = open_stream(StreamOptions("digits-permuted", tasks=4, skip=3, seed=1))
    assert [task.name for task in part.tasks] == ["permutation 3"]
    assert torch.equal(part.train.images[part.tasks[0].train], stream.train.images[stream.tasks[3].train])


def uneven():
    """Return one task of three classes with 1, 3 and 6 images, shuffled; pixels are the images' numbers."""
    labels = torch.tensor([2, 1, 2, 2, 0, 1, 2, 2, 1, 2])
    split = Split(torch.arange(10, dtype=torch.uint8).reshape(10, 1, 1, 1), labels)
    return Stream("uneven", split, split, (Task("all", torch.arange(10), torch.arange(10), (0, 1, 2)),), "domain")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [4]),  # class 0
        (3, [0, 1, 4]),  # the first of each class
        (5, [0, 1, 2, 4, 5]),  # then the second of each that has one
        (7, [0, 1, 2, 3, 4, 5, 8]),
        (8, [0, 1, 2, 3, 4, 5, 6, 8]),
        (10, list(range(10))),
        (99, list(range(10))),
    ],
)
def test_limit_takes_the_first_images_of_each_class_in_turn(limit, expected):
    kept = limit_images(uneven(), limit)
    assert kept.train.images.flatten().tolist() == expected
    assert kept.tasks[0].train.tolist() == list(range(len(expected)))
    assert torch.equal(kept.train.labels, uneven().train.labels[expected])


def test_limit_applies_to_every_task_and_to_both_splits():
    stream = open_stream(StreamOptions("digits", limit=30))
    for task in stream.tasks:
        assert len(task.train) == len(task.test) == 30
        assert stream.train.labels[task.train].sum() == 15
    assert len(stream.train) == 150
    rotations = open_stream(StreamOptions("digits-rotated", limit=30, tasks=3))
    assert same_stream(rotations, rotated(limit_source(digits(), 30), 3))
    assert same_stream(rotations, limit_images(rotated(digits(), 3), 30)), "before the cut or after it"


# Fingerprints


def test_fingerprint_does_not_depend_on_names():
    stream = by_class(digits(), 2)
    assert stream.fingerprint == by_class(digits(), 2).fingerprint
    renamed = Stream("other", stream.train, stream.test, stream.tasks, stream.scenario)
    assert renamed.fingerprint == stream.fingerprint
    assert len(stream.fingerprint) == 32


@pytest.mark.parametrize("change", ["pixel", "label", "test", "order", "scenario", "classes", "split"])
def test_fingerprint_depends_on_everything_that_is_trained_or_evaluated(change):
    stream = uneven()
    train, test, task, scenario = stream.train, stream.test, stream.tasks[0], stream.scenario
    if change in ("pixel", "test"):
        images = train.images.clone()
        images[3] += 1
        train, test = (Split(images, train.labels), test) if change == "pixel" else (train, Split(images, test.labels))
    elif change == "label":
        train = Split(train.images, train.labels.flip(0))
    elif change == "order":
        task = Task(task.name, task.train.flip(0), task.test, task.classes)
    elif change == "split":
        task = Task(task.name, task.train[:9], task.test, task.classes)
    elif change == "classes":
        task = Task(task.name, task.train, task.test, (0, 2, 1))
    else:
        scenario = "task"
    assert Stream(stream.name, train, test, (task,), scenario).fingerprint != stream.fingerprint


def test_fingerprint_depends_on_the_shape():
    task = Task("all", torch.arange(2), torch.arange(2), (0,))
    splits = [
        Split(torch.zeros(2, 1, *size, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
        for size in ((1, 4), (2, 2))
    ]
    assert len({Stream("blank", split, split, (task,), "domain").fingerprint for split in splits}) == 2


def test_fingerprint_is_the_same_for_memory_mapped_images(folder):
    mapped = open_stream(StreamOptions("folder", data=str(folder), per_task=3))
    copied = Stream(
        mapped.name,
        Split(mapped.train.images.clone(), mapped.train.labels.clone()),
        mapped.test,
        mapped.tasks,
        mapped.scenario,
    )
    assert copied.fingerprint == mapped.fingerprint


def test_moving_an_image_to_another_class_invalidates_the_cache(tmp_path):
    """The files and their order do not change, only a folder."""
    for name in ("train/a/1", "train/a/2", "train/b/3", "test/a/1", "test/b/1"):
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 9, np.uint8)).save(path)
    assert from_folder(tmp_path).train.labels.tolist() == [0, 0, 1]
    (tmp_path / "train" / "a" / "2.png").rename(tmp_path / "train" / "b" / "2.png")
    assert from_folder(tmp_path).train.labels.tolist() == [0, 1, 1]


# Progress


def test_progress_is_reported_only_while_images_are_decoded(folder):
    calls = []
    options = StreamOptions("folder", data=str(folder), per_task=3)
    open_stream(options, progress=lambda *call: calls.append(call))
    assert ("decoding train images", 18, 18) in calls
    assert ("decoding test images", 6, 6) in calls
    calls.clear()
    open_stream(options, progress=lambda *call: calls.append(call))
    assert calls == []


def test_throttled_progress_forwards_the_first_and_the_last_call():
    forwarded = []
    report = throttled(lambda description, done, total: forwarded.append(done), interval=60)
    for done in range(1, 1001):
        report("work", done, 1000)
    assert forwarded == [1, 1000]


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cifar1000"}, "unknown stream 'cifar1000' .did you mean 'cifar100'"),
        ({"name": "digits-rotate"}, "unknown stream 'digits-rotate' .did you mean 'digits-rotated'"),
        ({"name": "permuted"}, "unknown stream 'permuted'"),
        ({"per_task": 0}, "per_task=0 is not allowed: give a whole number from 1"),
        ({"per_task": 2.0}, "per_task=2.0 is not allowed"),
        ({"tasks": 0}, "tasks=0"),
        ({"skip": -1}, "skip=-1 is not allowed: give a whole number from 0"),
        ({"skip": None}, "skip=None"),
        ({"shuffle": -1}, "shuffle=-1"),
        ({"name": "digits-permuted", "seed": -2}, "seed=-2"),
        ({"limit": 0}, "limit=0"),
        ({"limit": True}, "limit=True"),
        ({"name": "cifar10", "size": 0}, "size=0"),
        ({"name": "cifar10", "channels": 2}, "channels=2 is not allowed: give 3 for RGB or 1 for grey"),
        ({"name": "digits-rotated", "degrees": 0.0}, "degrees=0.0"),
        ({"name": "digits-rotated", "degrees": float("nan")}, "degrees=nan"),
        ({"name": "digits-rotated", "degrees": 400.0}, "degrees=400.0"),
        ({"degrees": 90.0}, "degrees=90 is for digits-rotated, not for digits"),
        ({"name": "digits-permuted", "degrees": 90.0}, "degrees=90 is for digits-rotated"),
        ({"name": "digits-rotated", "seed": 1}, "seed=1 is for digits-permuted"),
        ({"name": "digits-rotated", "per_task": 2}, "per_task=2 is for streams that divide classes"),
        ({"name": "cifar10-permuted", "shuffle": 2}, "shuffle=2 is for streams that divide classes"),
        ({"name": "digits-rotated", "skip": 5}, "skip=5 leaves nothing of 5 tasks"),
        ({"name": "digits-rotated", "skip": 3, "tasks": 3}, "skip=3 leaves nothing of 3 tasks"),
        ({"data": "somewhere"}, "data='somewhere' is for images from a folder"),
        ({"size": 16}, "size=16 is for images from a folder"),
        ({"channels": 1}, "channels=1 is for images from a folder"),
        ({"label": "label"}, "label='label' is for images from a folder"),
        ({"skip_broken": True}, "skip_broken=True is for images from a folder"),
        ({"name": "folder", "per_task": 2}, "needs data"),
        ({"name": "folder", "data": "somewhere"}, "needs per_task"),
        ({"name": "caltech256", "label": "label"}, "label='label' is for Parquet files"),
    ],
)
def test_invalid_options_raise_a_one_line_error(options, message):
    with pytest.raises(MooringError, match=message) as error:
        StreamOptions(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_task": 4}, "has 6 classes, which 4 does not divide: take 1, 2, 3, 6"),
        ({"per_task": 3, "skip": 2}, "skip=2 leaves nothing of .*photos, which has 2 tasks"),
        ({"per_task": 3, "tasks": 3}, "tasks=3 is not allowed: .*photos has 2 tasks"),
        ({"per_task": 2, "tasks": 3, "skip": 1}, "has 3 tasks, 2 after skipping 1"),
        ({"per_task": 3, "label": "fine_label"}, "class folders, which have no label column"),
    ],
)
def test_invalid_cut_raises_an_error_before_decoding(folder, options, message):
    with pytest.raises(MooringError, match=message) as error:
        open_stream(StreamOptions("folder", data=str(folder), **options))
    assert "\n" not in str(error.value)
    assert cache_size() == 0


def test_invalid_cut_of_the_digits_raises_an_error():
    with pytest.raises(MooringError, match="which 3 does not divide"):
        open_stream(StreamOptions("digits", per_task=3))
    with pytest.raises(MooringError, match="skip=5 leaves nothing of digits"):
        open_stream(StreamOptions("digits", skip=5))
    with pytest.raises(MooringError, match=r"tasks=6 is not allowed: digits .* has 5 tasks"):
        select_tasks(open_stream(StreamOptions("digits")), tasks=6)


def test_missing_or_empty_folder_raises_an_error(tmp_path):
    with pytest.raises(MooringError, match=r"there is no folder .*nowhere: give a folder with"):
        open_stream(StreamOptions("folder", data=str(tmp_path / "nowhere"), per_task=1))
    with pytest.raises(MooringError, match="holds no images"):
        open_stream(StreamOptions("folder", data=str(tmp_path), per_task=1))
    with pytest.raises(MooringError, match="holds no images"):
        open_stream(StreamOptions("cifar10", data=str(tmp_path)))


def test_task_with_only_broken_images_raises_an_error(folder):
    for number in range(4):
        (folder / "class3" / f"{number}.png").write_bytes(b"broken")
    options = StreamOptions("folder", data=str(folder), per_task=1, skip_broken=True)
    with pytest.raises(MooringError, match="task 'class3' has no training images"):
        open_stream(options)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, None], r"train-00000-of-00001\.parquet, row 1 has the label None: labels must be whole numbers"),
        ([0, 1.5], r"train-00000-of-00001\.parquet has a label column label of double: labels must be whole numbers"),
        (["cat", "dog"], "label of string: labels must be whole numbers"),
    ],
)
def test_labels_that_are_not_integers_raise_an_error(folder, tmp_path, labels, message):
    png = (folder / "class0" / "0.png").read_bytes()
    for kind in ("train", "test"):
        pq.write_table(pa.table({"img": [png] * 2, "label": labels}), tmp_path / f"{kind}-00000-of-00001.parquet")
    with pytest.raises(MooringError, match=message):
        open_stream(StreamOptions("folder", data=str(tmp_path), per_task=1))


@pytest.mark.parametrize("damage", ["cut", "column"])
def test_error_names_the_damaged_parquet_file(folder, tmp_path, damage):
    png = (folder / "class0" / "0.png").read_bytes()
    names = ["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]
    for name in names:
        pq.write_table(pa.table({"img": [png] * 2, "label": [0, 1]}), tmp_path / f"{name}.parquet")
    later = tmp_path / f"{names[1]}.parquet"
    if damage == "cut":
        later.write_bytes(later.read_bytes()[:-20])
    else:
        pq.write_table(pa.table({"img": [png] * 2, "labels": [0, 1]}), later)
    with pytest.raises(MooringError, match=r"train-00001-of-00002\.parquet") as error:
        open_stream(StreamOptions("folder", data=str(tmp_path), per_task=1))
    assert "\n" not in str(error.value)


def test_every_stream_has_a_one_line_description():
    names = stream_descriptions()
    assert set(names) == {"digits", "folder", *NAMED_DATASETS}
    assert all(line and "\n" not in line for line in names.values())
