"""`mooring data`: nothing is fetched unasked, and every image that is broken is named."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from laboratory.hub_server import serving
from mooring.errors import MooringError
from mooring_lab.cli.data_command import data
from mooring_lab.cli.progress_bar import progress_bar
from mooring_lab.streams.cache import cache_folder, cache_size
from mooring_lab.streams.named_datasets import NAMED_DATASETS
from mooring_lab.streams.options import StreamOptions, open_stream


def png(seed, height=9, width=7):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def parquet(count, broken=()):
    """The bytes of a Parquet file in CIFAR-10's layout: `count` images, labels in turn."""
    images = [{"bytes": b"broken" if n in broken else png(n), "path": None} for n in range(count)]
    buffer = io.BytesIO()
    pq.write_table(pa.table({"img": images, "label": [n % 10 for n in range(count)]}), buffer)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def _home(_own_cache, monkeypatch, tmp_path):
    for name in (
        "HF_ENDPOINT",
        "HF_HUB_OFFLINE",
        "http_proxy",
        "HTTP_PROXY",
        "FORCE_COLOR",
        "TTY_COMPATIBLE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOORING_DATA", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def hub(monkeypatch):
    files = {
        "plain_text/train-00000-of-00001.parquet": parquet(30),
        "plain_text/test-00000-of-00001.parquet": parquet(10),
    }
    with serving(NAMED_DATASETS["cifar10"].repository, files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def run(*arguments, answer=None):
    return CliRunner().invoke(data, [str(argument) for argument in arguments], input=answer)


def printed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(message, *arguments):
    result = run(*arguments)
    assert isinstance(result.exception, MooringError), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


# list and info


def test_list_has_every_set_and_where_it_is(tmp_path):
    (tmp_path / "home" / "cifar10").mkdir(parents=True)
    lines = printed("list").splitlines()
    assert [line.split()[0] for line in lines] == ["name", *NAMED_DATASETS, "decoded"]
    assert next(line for line in lines if line.startswith("cifar10 ")).endswith(str(tmp_path / "home" / "cifar10"))
    assert next(line for line in lines if line.startswith("cifar100")).endswith("not fetched")
    content = {one["name"]: one for one in json.loads(printed("list", "--json"))}
    assert content["flowers102"]["tasks"] == 17
    assert content["cifar10"]["where"] == str(tmp_path / "home" / "cifar10")
    assert content["cifar100"]["where"] is None


def test_info_says_how_it_is_cut_where_it_is_from_and_how_to_get_it():
    text = printed("info", "cifar100")
    for expected in (
        "per_task:    10\ntasks:       10\n",
        "uoft-cs/cifar100",
        "none stated by the authors",
        "mooring data fetch cifar100",
    ):
        assert expected in text
    assert text.endswith("where:       -\n")
    assert "256_ObjectCategories.tar" in printed("info", "caltech256")
    assert json.loads(printed("info", "flowers102", "--json"))["repository"] == "Donghyun99/Oxford-Flower-102"
    refused("unknown data set 'cifar' (did you mean 'cifar10'?)", "info", "cifar")


# fetch


def test_nothing_is_fetched_without_a_yes(hub, tmp_path):
    refused("fetching cifar10 takes about 144 MB: add --yes to agree", "fetch", "cifar10")
    assert hub.requests == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", ["y\n", "n\n"])
def test_in_a_terminal_the_size_is_said_and_the_user_asked(hub, tmp_path, monkeypatch, answer):
    monkeypatch.setattr("mooring_lab.cli.data_command._can_ask", lambda: True)
    result = run("fetch", "cifar10", answer=answer)
    size = sum(map(len, hub.files.values()))
    assert f"cifar10: 2 files, {size:,} bytes, from uoft-cs/cifar10" in result.stderr
    assert "Fetch it?" in result.stderr
    assert (tmp_path / "home" / "cifar10").exists() == (answer == "y\n")
    assert result.exit_code == (0 if answer == "y\n" else 1)


def test_a_fetched_set_is_found_by_streams(hub, tmp_path):
    content = json.loads(printed("fetch", "cifar10", "--yes", "--json"))
    assert content == {"name": "cifar10", "folder": str(tmp_path / "home" / "cifar10")}
    stream = open_stream(StreamOptions("cifar10"))
    assert len(stream.tasks) == 5
    assert [len(task.train) for task in stream.tasks] == [6] * 5
    asked = len(hub.requests)
    assert printed("fetch", "cifar10") == f"cifar10 is in {tmp_path / 'home' / 'cifar10'}\n"
    assert len(hub.requests) == asked, "what is there needs neither a yes nor the Hub"


def test_fetch_writes_to_the_given_folder(hub, tmp_path):
    printed("fetch", "cifar10", "--yes", "--to", tmp_path / "there")
    assert len(open_stream(StreamOptions("cifar10", data=str(tmp_path / "there"))).tasks) == 5
    assert not (tmp_path / "home").exists()


def test_what_cannot_be_fetched_is_one_line(hub):
    refused("https://data.caltech.edu/records/nyy15-4j048", "fetch", "caltech256", "--yes")
    refused("does not have uoft-cs/cifar100 at aadb3af", "fetch", "cifar100", "--yes")


# check


@pytest.fixture
def folder(tmp_path):
    """Class folders with 8, 5 and 2 images, of two sizes; the last of the first is for testing."""
    for label, count in (("a", 8), ("b", 5), ("c", 2)):
        for number in range(count):
            path = tmp_path / "mine" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(number) if label == "a" else png(number, 20, 30))
    return tmp_path / "mine"


def test_check_counts_what_is_there(folder):
    text = printed("check", folder)
    for expected in (
        f"{folder}: class folders",
        "3 classes, from 1 (c) to 6 (a) training images",
        "2 sizes from 7x9 to 30x20 pixels, and are resized to 32x32",
        "classes in a task: 1, 3",
        "every image can be read",
    ):
        assert expected in text
    content = json.loads(printed("check", folder, "--json"))
    assert content["train"] == 6 + 4 + 1
    assert content["test"] == 2 + 1 + 1
    assert content["classes"]["b"] == {"train": 4, "test": 1}
    assert content["sizes"] == [[9, 7], [20, 30]]
    assert content["broken"] == []
    assert cache_size() == 0, "looking leaves nothing behind"


def test_check_names_every_broken_image_and_fails(folder):
    (folder / "a" / "3.png").write_bytes(png(3)[:60])
    (folder / "c" / "0.png").write_bytes(b"")
    result = run("check", folder)
    assert result.exit_code == 1
    assert f"broken: {folder / 'a' / '3.png'}\n" in result.stdout
    assert f"broken: {folder / 'c' / '0.png'}\n" in result.stdout
    assert "2 broken images" in result.stdout
    assert "class c has no training images: it is never trained, and a task of it alone is refused" in result.stdout
    result = run("check", folder, "--json")
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert content["broken"] == [str(folder / "a" / "3.png"), str(folder / "c" / "0.png")]
    assert content["classes"]["a"] == {"train": 5, "test": 2}
    assert content["empty"] == ["c"]
    assert run("check", folder, "--skip-broken").exit_code == 0


def test_check_names_the_row_of_a_parquet_file(tmp_path):
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(parquet(30, broken=(4, 17)))
    (tmp_path / "test-00000-of-00001.parquet").write_bytes(parquet(10))
    result = run("check", tmp_path, "--size", 8)
    assert result.exit_code == 1
    for row in (4, 17):
        assert f"broken: {tmp_path / 'train-00000-of-00001.parquet'}, row {row}\n" in result.stdout
    refused("no label column nothing; it has img, label", "check", tmp_path, "--label", "nothing")


def test_check_finds_labels_outside_the_classes(tmp_path):
    info = json.dumps({"info": {"features": {"label": {"names": ["only"]}}}})
    for kind in ("train", "test"):
        table = pa.table({"img": [png(0), png(1)], "label": [0, 3]}).replace_schema_metadata({"huggingface": info})
        pq.write_table(table, tmp_path / f"{kind}-0.parquet")
    content = json.loads(run("check", tmp_path, "--json").stdout)
    assert content["broken"][0].endswith("train-0.parquet, row 1 (label 3 of 1 classes)")
    assert content["train"] == 1


def test_check_says_what_is_never_scored_what_is_not_used_and_what_has_16_bits(folder):
    split = folder.parent / "split"
    for name in ("train/a", "train/b", "test/a", "val/a", "val/b"):
        (split / name).mkdir(parents=True)
        (split / name / "0.png").write_bytes(png(0))
    Image.fromarray(np.full((4, 4), 30_000, np.uint16)).save(split / "train" / "a" / "1.png")
    text = printed("check", split)
    for expected in (
        "class b has no test images: it is never scored, and a task of it alone is refused\n",
        "val/ is not used: train/ is trained, and test/, or else val/, is scored\n",
        "1 images have 16 bits for each pixel, of which 65535 is white\n",
    ):
        assert expected in text
    content = json.loads(printed("check", split, "--json"))
    assert (content["empty"], content["unused"], content["deep"]) == (["b"], ["val"], 1)


def test_check_says_which_folder_is_scored_if_it_is_not_test(folder):
    split = folder.parent / "split"
    for name in ("train/a", "val/a"):
        (split / name).mkdir(parents=True)
        (split / name / "0.png").write_bytes(png(0))
    assert "val/ is scored: there is no test/\n" in printed("check", split)
    assert json.loads(printed("check", split, "--json"))["scored"] == "val"
    (split / "val").rename(split / "test")
    assert "is scored" not in printed("check", split)
    assert json.loads(printed("check", split, "--json"))["scored"] == "test"
    assert json.loads(printed("check", folder, "--json"))["scored"] is None


def test_decoded_images_are_in_the_users_cache_and_can_be_cleared(folder):
    before = sorted(folder.rglob("*"))
    open_stream(StreamOptions("folder", data=str(folder), per_task=3, size=8))
    assert sorted(folder.rglob("*")) == before, "nothing is written beside the data"
    size = cache_size()
    assert size > 15 * 3 * 8 * 8
    assert f"decoded images: {size:,} bytes in {cache_folder()}; `mooring data clear` deletes" in printed("list")
    assert printed("clear") == f"deleted {size:,} bytes of decoded images from {cache_folder()}\n"
    assert json.loads(printed("clear", "--json")) == {"folder": str(cache_folder()), "bytes": 0}
    assert printed("clear") == f"no decoded images in {cache_folder()}\n"


def test_check_can_leave_classes_out(folder):
    assert list(json.loads(printed("check", folder, "--leave-out", "c", "--json"))["classes"]) == ["a", "b"]


def test_check_refuses_what_is_no_folder(tmp_path):
    refused("there is no folder", "check", tmp_path / "nowhere")


# The bar


def test_a_bar_is_shown_in_a_terminal_and_nowhere_else():
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=100)
        with progress_bar(console=console) as report:
            report("decoding", 1, 4)
            report("decoding", 4, 4)
        assert ("decoding" in screen.getvalue()) == terminal
        assert ("4/4" in screen.getvalue()) == terminal
