"""The file of a study: every write is atomic, and anyone with SQLite can read it."""

import json
import math
import os
import signal
import sqlite3
from dataclasses import replace
from datetime import datetime
from functools import partial

import pytest

from mooring.errors import MooringError
from mooring_lab.model.results import Result, Stability
from mooring_lab.model.spec import RunSpec
from mooring_lab.study.store import Store, _digest
from processes import Child


def make_result(seed: int = 0, **fields) -> Result:
    spec = RunSpec("digits", "0" * 32, "ewc", seed, strength=1e3)
    defaults = {
        "status": "finished",
        "reason": "",
        "untrained": [10.0, 1 / 3],
        "matrix": [[90.1, 20.0], [0.1 + 0.2, 80.0]],
        "losses": [[2.0, 1.0], [1e-300, 0.5]],
        "stability": [Stability(1, 2.5, 4.0, free=0, interpolate=9, extrapolate=1, diverge=0, negative=0)],
        "importance": {"backbone.1": 1e-9},
        "drift": {"backbone.1": 0.25},
        "cka": {"backbone.1": 0.75},
        "steps": 12,
        "seconds": 0.5,
        "versions": {"torch": "2"},
    }
    return Result(spec, **{**defaults, **fields})


def refusal(path, action=lambda store: list(store.results())) -> str:
    with pytest.raises(MooringError) as caught:
        action(Store(path))
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


def columns(path, *names: str) -> list[tuple]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(f"SELECT {', '.join(names)} FROM runs ORDER BY rowid").fetchall()
    finally:
        connection.close()


def changed(path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement, values)
    connection.commit()
    connection.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "study.sqlite"


# What is put in comes out


def test_results_are_returned_in_order_and_by_key(path):
    results = [make_result(seed) for seed in (3, 1, 2)]
    Store(path).add(results)
    assert list(Store(path).results()) == results
    wanted = [results[1].spec, make_result(9).spec]
    assert Store(path).get(wanted) == {results[1].spec.key: results[1]}


def test_no_file_is_created_before_the_first_result(path):
    store = Store(path)
    assert list(store.results()) == []
    assert store.get([make_result().spec]) == {}
    assert store.commands() == []
    assert not path.exists()


def test_folder_that_is_missing_is_made(tmp_path):
    Store(tmp_path / "a" / "b" / "study.sqlite").add([make_result()])
    assert list(Store(tmp_path / "a" / "b" / "study.sqlite").results()) == [make_result()]


def test_result_that_is_there_already_is_replaced(path):
    store = Store(path)
    store.add([make_result(0), make_result(1)])
    again = make_result(0, status="unstable", reason="it exploded")
    store.add([again])
    assert {result.spec.seed: result.status for result in store.results()} == {0: "unstable", 1: "finished"}
    assert store.get([again.spec]) == {again.spec.key: again}


def test_nan_and_infinity_are_stored_exactly(path):
    odd = [math.nan, math.inf, -math.inf, -0.0, 5e-324]
    endless = replace(make_result().stability[0], largest=math.inf, safe_strength=math.inf)
    result = make_result(untrained=odd[:2], losses=[odd], stability=[endless], cka={"a": math.nan})
    Store(path).add([result])
    (stored,) = Store(path).results()
    assert repr(stored) == repr(result)


def test_commands_are_logged_in_order(path):
    store = Store(path)
    expected = [
        "mooring compare",
        "mooring tune --lrs '0.1, 1'",
        "mooring compare",
        "ünï 'quoted' \"twice\"; DROP TABLE runs",
    ]
    for command in expected:
        store.log(command)
    assert Store(path).commands() == expected
    assert list(store.results()) == []


# All or nothing


def broken_off(*results: Result):
    yield from results
    raise RuntimeError("in the middle")


@pytest.mark.parametrize("before", [[], [make_result(7)]], ids=["new file", "old file"])
def test_write_that_fails_in_the_middle_leaves_what_was_there(path, before):
    store = Store(path)
    if before:
        store.add(before)
    with pytest.raises(RuntimeError, match="in the middle"):
        store.add(broken_off(make_result(0), make_result(1)))
    assert list(Store(path).results()) == before
    assert Store(path).commands() == []
    Store(path).add([make_result(2)])
    assert list(Store(path).results()) == [*before, make_result(2)]


def killed_while_writing(path: str) -> None:
    def results():
        yield make_result(0)
        os.kill(os.getpid(), signal.SIGKILL)

    Store(path).add(results())


@pytest.mark.parametrize("before", [[], [make_result(7)]], ids=["new file", "old file"])
def test_kill_in_the_middle_of_a_write_leaves_what_was_there(path, tmp_path, before):
    from laboratory.test_store import killed_while_writing as target

    if before:
        Store(path).add(before)
    assert Child(tmp_path / "child", target, str(path)).ended().status == -signal.SIGKILL
    assert list(Store(path).results()) == before
    Store(path).add([make_result(2)])
    assert list(Store(path).results()) == [*before, make_result(2)]


# For people with a SQLite shell


def test_columns_are_readable_with_plain_sqlite(path):
    finished = make_result(4)
    lost = make_result(5, status="unstable", reason="its gradient was not finite")
    Store(path).add([finished, lost])
    stored = columns(path, "key", "stream", "method", "seed", "status", "accuracy", "forgetting", "learned")
    metrics = finished.metrics
    assert stored == [
        (
            finished.spec.key,
            "digits",
            "ewc",
            4,
            "finished",
            metrics["accuracy"],
            metrics["forgetting"],
            metrics["learned"],
        ),
        (lost.spec.key, "digits", "ewc", 5, "unstable", None, None, None),
    ]
    ((spec, result, at), _) = columns(path, "spec", "result", "finished")
    assert RunSpec.from_json(json.loads(spec)) == finished.spec
    assert Result.from_json(json.loads(result)) == finished
    assert datetime.fromisoformat(at).tzinfo is not None


# What is no study


@pytest.mark.parametrize("version", ["1", "3"])
def test_file_of_another_version_is_refused_in_one_line(path, version):
    Store(path).add([make_result()])
    changed(path, "UPDATE about SET value = ? WHERE name = 'version'", version)
    bytes_before = path.read_bytes()
    assert f"has layout {version}, this Mooring reads 2: use the Mooring that wrote it" in refusal(path)
    assert path.read_bytes() == bytes_before


def test_run_of_a_newer_version_is_refused_in_one_line(path):
    Store(path).add([make_result()])
    contents = make_result().to_json()
    contents["spec"]["colour"] = "blue"
    changed(path, "UPDATE runs SET result = ?", json.dumps(contents))
    changed(path, "UPDATE runs SET digest = ?", _digest(json.dumps(contents)))
    with pytest.raises(MooringError, match="'colour': it was made by a newer version"):
        list(Store(path).results())


def test_bit_that_flipped_is_noticed_and_its_run_is_named(path):
    Store(path).add([make_result(seed) for seed in range(4)])
    key = make_result(3).spec.key
    changed(path, "UPDATE runs SET result = replace(result, '0.0', '9.0') WHERE key = ?", key)  # JSON still
    with pytest.raises(MooringError) as caught:
        list(Store(path).results())
    assert str(caught.value).startswith(f"the study {path} is damaged in run {key}: ")


@pytest.mark.parametrize("text", ['{"spec": ', "[]", "{}", "null", ""])
def test_damaged_row_is_reported_in_one_line(path, text):
    Store(path).add([make_result()])
    changed(path, "UPDATE runs SET result = ?", text)
    refusal(path)


def test_version_that_is_no_number_is_reported_in_one_line(path):
    Store(path).add([make_result()])
    changed(path, "UPDATE about SET value = 'blue' WHERE name = 'version'")
    refusal(path)


@pytest.mark.parametrize("content", [b"not a database at all" * 99, b"SQLite format 3\0" + b"\xff" * 500])
def test_what_is_not_a_database_is_refused_in_one_line(path, content):
    path.write_bytes(content)
    assert "is not a SQLite file, or damaged" in refusal(path)
    assert path.read_bytes() == content


def test_database_that_was_cut_short_is_reported_in_one_line(path):
    Store(path).add([make_result(seed) for seed in range(20)])
    path.write_bytes(path.read_bytes()[:-5000])
    assert "damaged" in refusal(path)


def test_empty_file_is_a_study_with_nothing_in_it(path):
    path.touch()
    store = Store(path)
    assert list(store.results()) == []
    assert store.commands() == []
    store.check_writable()
    store.add([make_result()])
    assert list(Store(path).results()) == [make_result()]


def test_folder_is_refused_with_a_file_to_give_instead(tmp_path):
    assert f"give a file for the study, such as {tmp_path / 'study.sqlite'}" in refusal(tmp_path)


@pytest.mark.parametrize("table", ["customers (name TEXT)", "about (something TEXT)", "about (name TEXT, value TEXT)"])
def test_database_that_is_no_study_is_refused_and_left_as_it_is(path, table):
    changed(path, f"CREATE TABLE {table}")
    before = path.read_bytes()
    refusal(path)
    assert path.read_bytes() == before


# Disks


def connecting(connect, statement: str, *args, **kwargs) -> sqlite3.Connection:
    connection = connect(*args, **kwargs)
    connection.execute(statement)
    return connection


def test_full_disk_is_reported_in_one_line_and_loses_nothing(path, monkeypatch):
    Store(path).add([make_result(0)])
    with monkeypatch.context() as full:
        full.setattr(sqlite3, "connect", partial(connecting, sqlite3.connect, "PRAGMA max_page_count = 1"))
        line = refusal(path, lambda store: store.add([make_result(seed) for seed in range(1, 50)]))
        assert "the disk is full" in line
        assert "run the same command again" in line
    assert list(Store(path).results()) == [make_result(0)]


def test_read_only_place_is_reported_in_one_line_before_any_work(path, monkeypatch):
    Store(path).add([make_result(0)])
    with monkeypatch.context() as read_only:
        read_only.setattr(sqlite3, "connect", partial(connecting, sqlite3.connect, "PRAGMA query_only = 1"))
        for action in (lambda store: store.add([make_result(1)]), lambda store: store.log("mooring")):
            assert "cannot be written: choose another place with --study" in refusal(path, action)
    assert list(Store(path).results()) == [make_result(0)]


def test_read_only_file_is_found_out_before_any_work(path, monkeypatch):
    Store(path).add([make_result(0)])
    connect = sqlite3.connect

    def opened(given, **options) -> sqlite3.Connection:
        return connect(f"file:{given}?mode=ro", uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", opened)
    assert "cannot be written" in refusal(path, lambda store: store.check_writable())


def test_file_where_a_folder_is_expected_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for action in (lambda store: store.check_writable(), lambda store: store.add([make_result()])):
        with pytest.raises(MooringError, match=r"cannot write in .*file \(.*\): choose another place"):
            action(Store(tmp_path / "file" / "study.sqlite"))


def test_another_program_that_holds_the_file_is_reported_in_one_line(path, monkeypatch):
    Store(path).add([make_result(0)])
    connect = sqlite3.connect
    holder = connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(sqlite3, "connect", lambda given, **options: connect(given, **{**options, "timeout": 0.05}))
    try:
        assert "is locked by another program" in refusal(path, lambda store: store.add([make_result(1)]))
    finally:
        holder.close()
