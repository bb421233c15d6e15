"""Fetching: the whole set with the right bytes, or one line and no folder."""

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

from hub_server import COMMIT, serving
from mooring.errors import MooringError
from mooring.lab.streams import hub as hub_module
from mooring.lab.streams.hub import MANIFEST, FetchPlan, RemoteFile, Retry, fetch, plan_fetch
from mooring.lab.streams.named_datasets import NAMED_DATASETS, default_folder, fetched_folder

QUICK = Retry(attempts=3, wait=0.01, timeout=5)
TRAIN, TEST = "cifar100/train-00000-of-00001.parquet", "cifar100/test-00000-of-00001.parquet"
LOCAL = "data/train-00000-of-00001.parquet"
NAMED_SET = NAMED_DATASETS["cifar100"]


def noise(seed, count):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes()


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "MOORING_DATA", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def hub():
    files = {TRAIN: noise(0, 700_000), TEST: noise(1, 30_000), "cifar100/other.bin": b"not wanted"}
    with serving(NAMED_SET.repository, files) as hub:
        yield hub


def get(hub, folder, **options):
    return fetch(NAMED_SET, folder, endpoint=hub.endpoint, retry=QUICK, **options)


def refused(hub, folder, match):
    with pytest.raises(MooringError, match=match) as error:
        get(hub, folder)
    assert "\n" not in str(error.value)
    assert not folder.exists()


def test_the_size_is_said_before_anything_is_fetched(hub, tmp_path):
    planned = plan_fetch(NAMED_SET, endpoint=hub.endpoint, retry=QUICK)
    assert planned.bytes == 730_000
    assert [(file.path, file.local) for file in planned.files] == [
        (TRAIN, LOCAL),
        (TEST, LOCAL.replace("train", "test")),
    ]
    assert planned.commit == COMMIT
    assert [where for where, _ in hub.asked] == ["api"]
    assert list(tmp_path.iterdir()) == []


def test_every_file_arrives_with_a_manifest_and_nothing_else(hub, tmp_path):
    seen = []
    folder = get(hub, tmp_path / "set", progress=lambda *told: seen.append(told))
    assert folder == tmp_path / "set"
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]
    assert (folder / "data" / "test-00000-of-00001.parquet").read_bytes() == hub.files[TEST]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["name"] == "cifar100"
    assert manifest["commit"] == COMMIT
    assert manifest["files"][LOCAL]["sha256"] == hashlib.sha256(hub.files[TRAIN]).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
    assert seen[-1] == ("fetching cifar100", 730_000, 730_000)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_splits_are_named_as_the_set_says_and_not_as_the_hub_does(tmp_path):
    """Flowers-102: the official test and validation images are learned from, the training images scored on."""
    flowers = NAMED_DATASETS["flowers102"]
    files = {f"data/{kind}-00000-of-00001-abc.parquet": kind.encode() for kind in ("train", "validation", "test")}
    with serving(flowers.repository, files) as hub:
        folder = fetch(flowers, tmp_path / "set", endpoint=hub.endpoint, retry=QUICK)
    found = {path.name: path.read_text() for path in (folder / "data").iterdir()}
    assert found == {
        "train-00000-of-00002.parquet": "test",
        "train-00001-of-00002.parquet": "validation",
        "test-00000-of-00001.parquet": "train",
    }


def test_a_set_that_is_there_is_not_fetched_again(hub, tmp_path):
    get(hub, tmp_path / "set")
    before = len(hub.asked)
    get(hub, tmp_path / "set")
    assert len(hub.asked) == before


def test_a_folder_of_something_else_is_left_alone(hub, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("precious")
    with pytest.raises(MooringError, match="was not made by fetching cifar100: give another folder with --to"):
        get(hub, tmp_path / "set")
    assert (tmp_path / "set" / "thesis.txt").read_text() == "precious"
    assert hub.asked == []


def test_by_default_it_goes_where_streams_look(hub, tmp_path, monkeypatch):
    assert default_folder("cifar100") == tmp_path / "cache" / "mooring" / "data" / "cifar100"
    monkeypatch.setenv("MOORING_DATA", str(tmp_path / "mine"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint + "/")
    assert fetched_folder(NAMED_SET) is None
    assert fetch(NAMED_SET, retry=QUICK) == tmp_path / "mine" / "cifar100" == fetched_folder(NAMED_SET)


# What goes wrong on the way


def test_a_dropped_connection_goes_on_where_it_stopped(hub, tmp_path):
    hub.trouble[TRAIN] = [("drop", 300_000), ("drop", 100_000)]
    folder = get(hub, tmp_path / "set")
    assert hub.ranges(TRAIN) == [None, "bytes=300000-", "bytes=400000-"]
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_a_connection_that_always_drops_is_given_up_and_gone_on_with_later(hub, tmp_path):
    hub.trouble[TRAIN] = [("drop", 1000)] * 3
    refused(hub, tmp_path / "set", "the connection was dropped.*it goes on where it stopped")
    assert len(hub.ranges(TRAIN)) == 3
    get(hub, tmp_path / "set")
    assert hub.ranges(TRAIN)[3] == "bytes=3000-"


def test_a_server_that_ignores_ranges_is_read_from_the_start(hub, tmp_path):
    hub.trouble[TRAIN] = [("drop", 300_000), "whole"]
    folder = get(hub, tmp_path / "set")
    assert hub.ranges(TRAIN) == [None, "bytes=300000-"]
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_bytes_that_arrive_damaged_once_are_fetched_again(hub, tmp_path):
    hub.trouble[TRAIN] = ["corrupt"]
    folder = get(hub, tmp_path / "set")
    assert hub.ranges(TRAIN) == [None, None]
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_bytes_that_always_arrive_damaged_are_refused_by_name(hub, tmp_path):
    hub.always[TRAIN] = "corrupt"
    refused(hub, tmp_path / "set", r"train-00000-of-00001\.parquet from .* arrived damaged twice")
    assert len(hub.ranges(TRAIN)) == 2
    assert not (tmp_path / "set.partial" / LOCAL).exists(), "damaged bytes are not gone on with"


@pytest.mark.parametrize("change", [lambda data: data + b"more", lambda data: data[:-1]])
def test_a_file_of_another_size_than_the_hub_says_is_refused(hub, tmp_path, change):
    hub.files[TEST] = change(hub.told[TEST])
    refused(hub, tmp_path / "set", "test-00000-of-00001.parquet")


def test_damage_to_what_an_earlier_attempt_left_is_found(hub, tmp_path):
    hub.trouble[TEST] = [404]
    refused(hub, tmp_path / "set", "HTTP 404")
    left = tmp_path / "set.partial" / LOCAL
    left.write_bytes(b"x" + left.read_bytes()[1:])
    folder = get(hub, tmp_path / "set")
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


@pytest.mark.parametrize("where", ["api", TRAIN])
def test_a_server_in_trouble_is_asked_again_a_few_times(hub, tmp_path, where):
    hub.trouble[where] = [500, 503]
    assert (get(hub, tmp_path / "set") / LOCAL).read_bytes() == hub.files[TRAIN]
    assert len(hub.ranges(where)) == 3


@pytest.mark.parametrize("where", ["api", TRAIN])
def test_a_server_that_stays_in_trouble_is_given_up(hub, tmp_path, where):
    hub.always[where] = 502
    refused(hub, tmp_path / "set", "HTTP 502.*later")
    assert len(hub.ranges(where)) == 3


@pytest.mark.parametrize("where", ["api", TRAIN])
def test_what_is_not_there_is_not_asked_for_again(hub, tmp_path, where):
    hub.always[where] = 404
    refused(hub, tmp_path / "set", "HTTP 404")
    assert len(hub.ranges(where)) == 1


def test_a_repository_that_changed_is_refused(hub, tmp_path):
    del hub.told[TEST]
    refused(hub, tmp_path / "set", r"has no cifar100/test-\*\.parquet")


def test_no_network_is_one_line(tmp_path):
    with serving(NAMED_SET.repository, {}) as hub:
        pass  # nobody listens there any more
    refused(hub, tmp_path / "set", f"cannot reach {hub.endpoint} .*: check the network")
    assert list(tmp_path.iterdir()) == []


def test_a_set_that_is_not_on_the_hub_says_where_it_is(tmp_path):
    with pytest.raises(
        MooringError, match=r"256_ObjectCategories\.tar .* https://data\.caltech\.edu.*001\.ak47"
    ) as error:
        fetch(NAMED_DATASETS["caltech256"], tmp_path / "set")
    assert "\n" not in str(error.value)


def test_a_disk_without_room_is_refused_before_it_is_filled(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=729_999))
    refused(hub, tmp_path / "set", "takes 1 MB more and .* has 1 MB: make room")
    assert hub.ranges(TRAIN) == []


def test_a_folder_that_cannot_be_written_is_refused(hub, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MooringError, match=r"cannot write .*: give another folder with --to"):
        get(hub, tmp_path / "file" / "set")


def test_two_fetches_at_once_do_not_mix(hub, tmp_path):
    with hub_module._locked(tmp_path / "set.partial"):
        refused(hub, tmp_path / "set", "is being fetched by another process")
    get(hub, tmp_path / "set")


CODE = """
import sys
from mooring.lab.streams.hub import Retry, fetch
from mooring.lab.streams.named_datasets import NAMED_DATASETS
fetch(NAMED_DATASETS["cifar100"], sys.argv[1], endpoint=sys.argv[2], retry=Retry(attempts=3, wait=0.01))
"""


def test_a_fetch_that_is_killed_leaves_no_folder_and_goes_on(hub, tmp_path):
    hub.trouble[TRAIN] = ["hang"]
    folder = tmp_path / "set"
    child = subprocess.Popen([sys.executable, "-c", CODE, str(folder), hub.endpoint])
    left = tmp_path / "set.partial" / LOCAL
    deadline = time.monotonic() + 30
    while not (left.exists() and left.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not folder.exists()
    there = left.stat().st_size
    assert 0 < there <= 350_000
    get(hub, folder)
    assert hub.ranges(TRAIN) == [None, f"bytes={there}-"]
    assert (folder / LOCAL).read_bytes() == hub.files[TRAIN]


def test_a_plan_can_be_reused(hub, tmp_path):
    planned = plan_fetch(NAMED_SET, endpoint=hub.endpoint, retry=QUICK)
    get(hub, tmp_path / "set", planned=planned)
    assert len(hub.ranges("api")) == 1
    wrong = RemoteFile(TRAIN, LOCAL, len(hub.files[TRAIN]), "0" * 64)
    with pytest.raises(MooringError, match="arrived damaged twice"):
        get(hub, tmp_path / "other", planned=FetchPlan(NAMED_SET, hub.endpoint, COMMIT, (wrong,)))
    assert replace(planned, files=()).bytes == 0
