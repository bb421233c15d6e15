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
from mooring_lab.streams.hub import MANIFEST, FetchPlan, RemoteFile, Retry, fetch, plan_fetch
from mooring_lab.streams.named_datasets import NAMED_DATASETS, default_folder, fetched_folder

QUICK = Retry(attempts=3, wait=0.01, timeout=5)
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
    return fetch(DATASET, folder, endpoint=hub.endpoint, retry=QUICK, **options)


def refused(hub, folder, match):
    with pytest.raises(MooringError, match=match) as error:
        get(hub, folder)
    assert "\n" not in str(error.value)
    assert not folder.exists()


def test_plan_has_the_size_without_fetching(hub, tmp_path):
    planned = plan_fetch(DATASET, endpoint=hub.endpoint, retry=QUICK)
    assert planned.bytes == 730_000
    assert [(file.path, file.local) for file in planned.files] == [
        (TRAIN, LOCAL),
        (TEST, LOCAL.replace("train", "test")),
    ]
    assert planned.commit == COMMIT
    assert [path for path, _ in hub.requests] == ["api"]
    assert list(tmp_path.iterdir()) == []


def test_fetch_writes_every_file_and_a_manifest(hub, tmp_path):
    calls = []
    folder = get(hub, tmp_path / "set", progress=lambda *call: calls.append(call))
    assert folder == tmp_path / "set"
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]
    assert (folder / "data" / "test-00000-of-00001.parquet").read_bytes() == hub.files[TEST]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["name"] == "cifar100"
    assert manifest["commit"] == COMMIT
    assert manifest["files"][LOCAL]["sha256"] == hashlib.sha256(hub.files[TRAIN]).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
    assert calls[-1] == ("fetching cifar100", 730_000, 730_000)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_local_splits_are_those_of_the_data_set_and_not_of_the_hub(tmp_path):
    """Flowers-102 trains on the official test and validation images and evaluates on the training images."""
    flowers = NAMED_DATASETS["flowers102"]
    files = {f"data/{kind}-00000-of-00001-abc.parquet": kind.encode() for kind in ("train", "validation", "test")}
    with serving(flowers.repository, files) as hub:
        folder = fetch(flowers, tmp_path / "set", endpoint=hub.endpoint, retry=QUICK)
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
    assert fetch(DATASET, retry=QUICK) == tmp_path / "home" / "cifar100" == fetched_folder(DATASET)


# Failures


def test_dropped_connection_is_resumed(hub, tmp_path):
    hub.failures[TRAIN] = [("drop", 300_000), ("drop", 100_000)]
    folder = get(hub, tmp_path / "set")
    assert hub.ranges(TRAIN) == [None, "bytes=300000-", "bytes=400000-"]
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_repeatedly_dropped_connection_raises_an_error_and_is_resumed_later(hub, tmp_path):
    hub.failures[TRAIN] = [("drop", 1000)] * 3
    refused(hub, tmp_path / "set", "the connection was dropped.*it goes on where it stopped")
    assert len(hub.ranges(TRAIN)) == 3
    get(hub, tmp_path / "set")
    assert hub.ranges(TRAIN)[3] == "bytes=3000-"


def test_server_that_ignores_ranges_restarts_the_file(hub, tmp_path):
    hub.failures[TRAIN] = [("drop", 300_000), "whole"]
    folder = get(hub, tmp_path / "set")
    assert hub.ranges(TRAIN) == [None, "bytes=300000-"]
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_damaged_file_is_fetched_again(hub, tmp_path):
    hub.failures[TRAIN] = ["corrupt"]
    folder = get(hub, tmp_path / "set")
    assert hub.ranges(TRAIN) == [None, None]
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_file_that_is_damaged_twice_raises_an_error_that_names_it(hub, tmp_path):
    hub.always[TRAIN] = "corrupt"
    refused(hub, tmp_path / "set", r"train-00000-of-00001\.parquet from .* arrived damaged twice")
    assert len(hub.ranges(TRAIN)) == 2
    assert not (tmp_path / "set.partial" / LOCAL).exists(), "a damaged file must not be resumed"


@pytest.mark.parametrize("change", [lambda data: data + b"more", lambda data: data[:-1]])
def test_file_of_another_size_raises_an_error(hub, tmp_path, change):
    hub.files[TEST] = change(hub.listed[TEST])
    refused(hub, tmp_path / "set", "test-00000-of-00001.parquet")


def test_damage_to_a_partial_file_is_detected(hub, tmp_path):
    hub.failures[TEST] = [404]
    refused(hub, tmp_path / "set", "HTTP 404")
    partial = tmp_path / "set.partial" / LOCAL
    partial.write_bytes(b"x" + partial.read_bytes()[1:])
    folder = get(hub, tmp_path / "set")
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


@pytest.mark.parametrize("path", ["api", TRAIN])
def test_server_error_is_retried(hub, tmp_path, path):
    hub.failures[path] = [500, 503]
    assert (get(hub, tmp_path / "set") / LOCAL).read_bytes() == hub.files[TRAIN]
    assert len(hub.ranges(path)) == 3


@pytest.mark.parametrize("path", ["api", TRAIN])
def test_permanent_server_error_raises_an_error(hub, tmp_path, path):
    hub.always[path] = 502
    refused(hub, tmp_path / "set", "HTTP 502.*later")
    assert len(hub.ranges(path)) == 3


@pytest.mark.parametrize("path", ["api", TRAIN])
def test_missing_file_is_not_retried(hub, tmp_path, path):
    hub.always[path] = 404
    refused(hub, tmp_path / "set", "HTTP 404")
    assert len(hub.ranges(path)) == 1


def test_changed_repository_raises_an_error(hub, tmp_path):
    del hub.listed[TEST]
    refused(hub, tmp_path / "set", r"has no cifar100/test-\*\.parquet")


def test_unreachable_hub_raises_a_one_line_error(tmp_path):
    with serving(DATASET.repository, {}) as hub:
        pass  # the server has stopped
    refused(hub, tmp_path / "set", f"cannot reach {hub.endpoint} .*: check the network")
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
from mooring_lab.streams.hub import Retry, fetch
from mooring_lab.streams.named_datasets import NAMED_DATASETS
fetch(NAMED_DATASETS["cifar100"], sys.argv[1], endpoint=sys.argv[2], retry=Retry(attempts=3, wait=0.01))
"""


def test_killed_fetch_leaves_no_folder_and_is_resumed(hub, tmp_path):
    hub.failures[TRAIN] = ["hang"]
    folder = tmp_path / "set"
    child = subprocess.Popen([sys.executable, "-c", CODE, str(folder), hub.endpoint])
    partial = tmp_path / "set.partial" / LOCAL
    deadline = time.monotonic() + 30
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not folder.exists()
    size = partial.stat().st_size
    assert 0 < size <= 350_000
    get(hub, folder)
    assert hub.ranges(TRAIN) == [None, f"bytes={size}-"]
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_plan_can_be_reused(hub, tmp_path):
    planned = plan_fetch(DATASET, endpoint=hub.endpoint, retry=QUICK)
    get(hub, tmp_path / "set", planned=planned)
    assert len(hub.ranges("api")) == 1
    wrong = RemoteFile(TRAIN, LOCAL, len(hub.files[TRAIN]), "0" * 64)
    with pytest.raises(MooringError, match="arrived damaged twice"):
        get(hub, tmp_path / "other", planned=FetchPlan(DATASET, hub.endpoint, COMMIT, (wrong,)))
    assert replace(planned, files=()).bytes == 0
