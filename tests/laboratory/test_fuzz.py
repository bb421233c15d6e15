"""Any file or command of a user works or is refused in one line, without a traceback or a partial write."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save

import mooring
from laboratory.small import Once, class_stream, spec_for
from mooring.errors import MooringError
from mooring_lab.cli import main
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.networks.initialization import read_weights
from mooring_lab.streams.options import StreamOptions, open_stream
from mooring_lab.study.comparison import comparison
from mooring_lab.study.store import Store
from mooring_lab.study.study import Study
from mooring_lab.study.study_file import read_study_file

few = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def one_line(act, *args):
    """What it gives, or a refusal in one line."""
    line = None
    try:
        return act(*args)
    except MooringError as error:
        line = str(error)
    assert line
    assert "\n" not in line, line
    return None


@st.composite
def injured(draw, data: bytes) -> bytes:
    """Cut off, overwritten somewhere, or with something put in."""
    at = draw(st.integers(0, len(data) - 1))
    junk = draw(st.binary(min_size=1, max_size=40))
    return draw(st.sampled_from([data[:at], data[:at] + junk + data[at + len(junk) :], data[:at] + junk + data[at:]]))


# Study files

VALUES = st.recursive(
    st.one_of(
        st.integers(-(10**12), 10**12),
        st.floats(),
        st.booleans(),
        st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=12),
        st.sampled_from(["digits", "plain", "ewc", "all", "mlp", "float64", "cuda", "../x", "/dev/null", "a:b"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["name", "lr", "strength", "tasks", "per_task", "size", "epochs", "ewc"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "study",
        "report",
        "baseline",
        "device",
        "fleet",
        "methods",
        "seeds",
        "stream",
        "train",
        "method",
        "tune",
        "colour",
    ]
)


def to_toml(value: object) -> str:
    """As TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {to_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def asked_for(path: Path) -> None:
    contents = read_study_file(path)
    asked = comparison(**contents.comparison)
    for options, training in asked.streams:
        asked.specs(training.on("cpu"), options.name, "0", "")


@few
@given(contents=st.dictionaries(KEYS, VALUES, max_size=5))
def test_study_file_of_any_values_is_refused_in_one_line_or_read(tmp_path, contents):
    path = tmp_path / "study.toml"
    path.write_text("\n".join(f"{key} = {to_toml(value)}" for key, value in contents.items()), encoding="utf-8")
    one_line(asked_for, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["study.toml"]


@few
@given(data=st.binary(max_size=300))
def test_study_file_of_any_bytes_is_refused_in_one_line_or_read(tmp_path, data):
    path = tmp_path / "study.toml"
    path.write_bytes(data)
    one_line(asked_for, path)


# The command line

WORDS = st.one_of(
    st.sampled_from(["compare", "tune", "run", "show", "report", "methods", "data", "list", "--json"]),
    st.sampled_from(["--stream", "--methods", "--seeds", "--lr", "--strength", "--epochs", "--batch", "--limit"]),
    st.sampled_from(["--size", "--per-task", "--tasks", "--skip", "--fleet", "--device", "--engine", "--address"]),
    st.sampled_from(
        ["digits", "plain", "ewc", "0", "-1", "1e999", "nan", "1,2", "ewc=1", "=", "cuda:9", "local", "ray"]
    ),
    st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8),
)


@few
@given(words=st.lists(WORDS, max_size=7))
def test_command_of_any_words_is_refused_in_one_line_or_done(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Study, "run", lambda *args, **options: [])
    capsys.readouterr()
    status = main(words)
    output = capsys.readouterr()
    assert status in (0, 1, 2)  # 1 if no run finished, and here none is run
    if status == 2 and output.err:
        assert output.err.count("\n") == 1, output.err
    assert "Traceback" not in output.err


# Data


def png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def parquet_file(labels: list[int]) -> bytes:
    images = pyarrow.array([{"bytes": png(), "path": None}] * 4)
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"image": images, "label": pyarrow.array(labels)}), buffer)
    return buffer.getvalue()


PNG, PARQUET = png(), parquet_file([0, 1, 0, 1])


def opened(folder: Path) -> None:
    open_stream(StreamOptions("folder", data=str(folder), per_task=1, size=8))


@few
@given(data=st.one_of(injured(PARQUET), st.binary(max_size=200)))
def test_injured_parquet_file_is_refused_in_one_line_or_read(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("parquet") / "data"
    folder.mkdir()
    (folder / "train-0.parquet").write_bytes(data)
    (folder / "test-0.parquet").write_bytes(PARQUET)
    one_line(opened, folder)


def test_label_beyond_any_class_is_refused_before_it_fills_the_memory(tmp_path):
    for kind in ("train", "test"):
        (tmp_path / f"{kind}-0.parquet").write_bytes(parquet_file([0, 1, 2**40, 1]))
    with pytest.raises(MooringError, match=f"has the label {2**40}: labels count the classes, from 0"):
        opened(tmp_path)


@few
@given(data=st.one_of(injured(PNG), st.binary(max_size=200)))
def test_injured_image_is_refused_in_one_line_or_read(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("images") / "data"
    for split in ("train", "test"):
        for name in "ab":
            (folder / split / name).mkdir(parents=True)
            (folder / split / name / "0.png").write_bytes(PNG)
    (folder / "train" / "a" / "1.png").write_bytes(data)
    one_line(opened, folder)


# States


STREAM = class_stream(tasks=2, images=8)
SPECS = [spec_for("explicit-ewc", STREAM, 0, batch=4, epochs=1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("fleet") / "fleet.safetensors"
    Fleet(SPECS, STREAM).run(Once(path))
    return path.read_bytes()


@few
@given(data=st.data())
def test_injured_checkpoint_is_refused_in_one_line(tmp_path, saved, data):
    path = tmp_path / "fleet.safetensors"
    path.write_bytes(data.draw(injured(saved)))
    one_line(checkpoint.runs_in, path)
    one_line(checkpoint.restore, Fleet(SPECS, STREAM), path)


WEIGHTS = save({"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)})


@few
@given(data=st.one_of(injured(WEIGHTS), st.binary(max_size=100)))
def test_injured_file_of_weights_is_refused_in_one_line_or_read(tmp_path, data):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    one_line(read_weights, path)


@few
@given(data=st.data())
def test_injured_study_is_refused_in_one_line_or_read(tmp_path, data):
    from laboratory.test_store import make_result

    for left in tmp_path.iterdir():
        left.unlink()
    path = tmp_path / "study.sqlite"
    Store(path).add([make_result(seed) for seed in range(3)])
    path.write_bytes(data.draw(injured(path.read_bytes())))
    one_line(lambda: list(Store(path).results()))


NAMES = st.one_of(st.text(max_size=6), st.sampled_from(["version", "0.weight/anchor", "importance", "pull", "tasks"]))
TENSORS = st.sampled_from(
    [torch.zeros(2), torch.zeros(3, 4), torch.tensor(float("nan")), torch.tensor(99), torch.zeros(0), 5, "text", None]
)


@few
@given(entries=st.dictionaries(NAMES, TENSORS, max_size=4), keep=st.booleans())
def test_any_state_dict_is_refused_in_one_line_or_loaded(entries, keep):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), importance="ewc")
    state = moor.state_dict() if keep else {}
    one_line(moor.load_state_dict, {**state, **entries})


# Promises of SECURITY.md


def test_no_pickle_is_loaded_and_no_archive_unpacked_anywhere():
    source = Path(mooring.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text()
        for word in ("import pickle", "pickle.load", "torch.load(", "tarfile", "zipfile", "unpack_archive", "joblib"):
            assert word not in text, f"{path} has {word}"


def test_report_prints_names_as_text_and_never_as_markup(tmp_path):
    from laboratory.test_store import make_result
    from mooring_lab.report import write_report

    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    result = make_result()
    spec = replace(result.spec, stream=evil)
    page = write_report([replace(result, spec=spec, reason=evil)], tmp_path, title=evil, command=evil).read_text()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;" in page
