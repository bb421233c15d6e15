"""Tests of fetching: the complete data set with the right bytes, or a one-line error and no folder."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from laboratory.hub_server import COMMIT, serving
from mooring.errors import MooringError
from mooring_lab.streams import hub as hub_module
from mooring_lab.streams.hub import MANIFEST, FetchPlan, RemoteFile, fetch, plan_fetch
from mooring_lab.streams.named_datasets import NAMED_DATASETS, default_folder, fetched_folder

TRAIN, TEST = "cifar100/train-00000-of-00001.parquet", "cifar100/test-00000-of-00001.parquet"
LOCAL = "data/train-00000-of-00001.parquet"
DATASET = NAMED_DATASETS["cifar100"]


def noise(seed, count):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "MOORING_DATA", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def hub():
    files = {TRAIN: noise(0, 700_000), TEST: noise(1, 30_000), "cifar100/other.bin": b"not needed"}
    with serving(DATASET.repository, files) as hub:
        yield hub


def get(hub, folder, **options):
    return fetch(DATASET, folder, endpoint=hub.endpoint, **options)


def refused(hub, folder, match):
    with pytest.raises(MooringError, match=match) as error:
        get(hub, folder)
    assert "\n" not in str(error.value)
    assert not folder.exists()


def test_plan_has_the_size_without_fetching(hub, tmp_path):
    planned = plan_fetch(DATASET, endpoint=hub.endpoint)
    assert planned.bytes == 730_000
    assert [(file.path, file.local) for file in planned.files] == [
        (TRAIN, LOCAL),
        (TEST, LOCAL.replace("train", "test")),
    ]
    assert planned.commit == COMMIT
    assert [path for path, _ in hub.requests] == ["api"]
    assert list(tmp_path.iterdir()) == []


def test_fetch_writes_every_file_and_a_manifest(hub, tmp_path):
    folder = get(hub, tmp_path / "set")
    assert folder == tmp_path / "set"
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]
    assert (folder / "data" / "test-00000-of-00001.parquet").read_bytes() == hub.files[TEST]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["name"] == "cifar100"
    assert manifest["commit"] == COMMIT
    assert manifest["files"][LOCAL]["sha256"] == hashlib.sha256(hub.files[TRAIN]).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
    assert sorted(path.name for path in folder.iterdir()) == ["data", MANIFEST]


def test_local_splits_are_those_of_the_data_set_and_not_of_the_hub(tmp_path):
    """Flowers-102 trains on the official test and validation images and evaluates on the training images."""
    flowers = NAMED_DATASETS["flowers102"]
    files = {f"data/{kind}-00000-of-00001-abc.parquet": kind.encode() for kind in ("train", "validation", "test")}
    with serving(flowers.repository, files) as hub:
        folder = fetch(flowers, tmp_path / "set", endpoint=hub.endpoint)
    contents = {path.name: path.read_text() for path in (folder / "data").iterdir()}
    assert contents == {
        "train-00000-of-00002.parquet": "test",
        "train-00001-of-00002.parquet": "validation",
        "test-00000-of-00001.parquet": "train",
    }


def test_fetched_data_set_is_not_fetched_again(hub, tmp_path):
    get(hub, tmp_path / "set")
    before = len(hub.requests)
    get(hub, tmp_path / "set")
    assert len(hub.requests) == before


def test_other_folder_raises_an_error_and_is_not_changed(hub, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("precious")
    with pytest.raises(MooringError, match="was not made by fetching cifar100: give another folder with --to"):
        get(hub, tmp_path / "set")
    assert (tmp_path / "set" / "thesis.txt").read_text() == "precious"
    assert hub.requests == []


def test_default_folder_is_the_one_that_streams_read(hub, tmp_path, monkeypatch):
    assert default_folder("cifar100") == tmp_path / "cache" / "mooring" / "data" / "cifar100"
    monkeypatch.setenv("MOORING_DATA", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint + "/")
    assert fetched_folder(DATASET) is None
    assert fetch(DATASET) == tmp_path / "home" / "cifar100" == fetched_folder(DATASET)


# Failures


def test_dropped_connection_is_resumed(hub, tmp_path):
    hub.failures[TRAIN] = [("drop", 300_000)]
    folder = get(hub, tmp_path / "set")
    assert len(hub.ranges(TRAIN)) == 2
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_damaged_file_raises_an_error_that_names_it_and_is_fetched_again(hub, tmp_path):
    hub.failures[TRAIN] = ["corrupt"]
    refused(hub, tmp_path / "set", r"train-00000-of-00001\.parquet arrived damaged")
    assert not (tmp_path / "set.partial" / LOCAL).exists()
    assert (get(hub, tmp_path / "set") / LOCAL).read_bytes() == hub.files[TRAIN]


@pytest.mark.parametrize("change", [lambda data: data + b"more", lambda data: data[:-1]])
def test_file_of_another_size_raises_an_error(hub, tmp_path, change):
    hub.files[TEST] = change(hub.listed[TEST])
    refused(hub, tmp_path / "set", "test-00000-of-00001.parquet")


def test_file_that_arrived_is_not_fetched_again(hub, tmp_path):
    hub.failures[TEST] = [404]
    refused(hub, tmp_path / "set", "HTTP 404")
    assert (tmp_path / "set.partial" / LOCAL).read_bytes() == hub.files[TRAIN]
    get(hub, tmp_path / "set")
    assert len(hub.ranges(TRAIN)) == 1


@pytest.mark.parametrize("path", ["api", TRAIN])
@pytest.mark.parametrize(("status", "match"), [(502, "HTTP 502.*later"), (404, "HTTP 404")])
def test_server_error_raises_an_error(hub, tmp_path, path, status, match):
    hub.always[path] = status
    refused(hub, tmp_path / "set", match)


def test_changed_repository_raises_an_error(hub, tmp_path):
    del hub.listed[TEST]
    refused(hub, tmp_path / "set", r"has no cifar100/test-\*\.parquet")


def test_unreachable_hub_raises_a_one_line_error(tmp_path):
    with serving(DATASET.repository, {}) as hub:
        pass  # the server has stopped
    refused(hub, tmp_path / "set", f"cannot fetch from {hub.endpoint} .*: check network")
    assert list(tmp_path.iterdir()) == []


def test_data_set_outside_the_hub_raises_an_error_with_instructions(tmp_path):
    with pytest.raises(
        MooringError, match=r"256_ObjectCategories\.tar .* https://data\.caltech\.edu.*001\.ak47"
    ) as error:
        fetch(NAMED_DATASETS["caltech256"], tmp_path / "set")
    assert "\n" not in str(error.value)


def test_full_disk_raises_an_error_before_fetching(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=729_999))
    refused(hub, tmp_path / "set", "takes 1 MB more and .* has 1 MB: make room")
    assert hub.ranges(TRAIN) == []


def test_unwritable_folder_raises_an_error(hub, tmp_path):
    (tmp_path / "file").write_text("a file, not a folder")
    with pytest.raises(MooringError, match=r"cannot write .*: give another folder with --to"):
        get(hub, tmp_path / "file" / "set")


def test_concurrent_fetch_raises_an_error(hub, tmp_path):
    with hub_module._locked(tmp_path / "set.partial"):
        refused(hub, tmp_path / "set", "is being fetched by another process")
    get(hub, tmp_path / "set")


CODE = """
import sys
from mooring_lab.streams.hub import fetch
from mooring_lab.streams.named_datasets import NAMED_DATASETS
fetch(NAMED_DATASETS["cifar100"], sys.argv[1], endpoint=sys.argv[2])
"""


def test_killed_fetch_leaves_no_folder_and_can_be_repeated(hub, tmp_path):
    hub.failures[TRAIN] = ["hang"]
    folder = tmp_path / "set"
    child = subprocess.Popen([sys.executable, "-c", CODE, str(folder), hub.endpoint])
    deadline = time.monotonic() + 30
    while not hub.ranges(TRAIN) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not folder.exists()
    get(hub, folder)
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_plan_can_be_reused(hub, tmp_path):
    planned = plan_fetch(DATASET, endpoint=hub.endpoint)
    get(hub, tmp_path / "set", planned=planned)
    assert len(hub.ranges("api")) == 1
    wrong = RemoteFile(TRAIN, LOCAL, len(hub.files[TRAIN]), "0" * 64)
    with pytest.raises(MooringError, match="arrived damaged"):
        get(hub, tmp_path / "other", planned=FetchPlan(DATASET, hub.endpoint, COMMIT, (wrong,)))
    assert replace(planned, files=()).bytes == 0
