"""Damage to a study is detected, its runs are named, and the others are kept."""

import sqlite3

import pytest

from laboratory.test_store import changed, make_result
from mooring.errors import MooringError
from mooring_lab.cli import main
from mooring_lab.study.salvage import salvage
from mooring_lab.study.store import Store


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "study.sqlite"
    store = Store(path)
    store.add([make_result(seed) for seed in range(40)])
    store.log("mooring compare")
    return path


def flipped(path, *seeds: int) -> None:
    """A digit of an accuracy is another, which is JSON still."""
    for seed in seeds:
        changed(
            path, "UPDATE runs SET result = replace(result, '0.0', '9.0') WHERE key = ?", make_result(seed).spec.key
        )


def test_bit_that_flipped_is_noticed_and_its_run_is_named(path):
    flipped(path, 3)
    with pytest.raises(MooringError) as caught:
        list(Store(path).results())
    key = make_result(3).spec.key
    assert str(caught.value) == f"the study {path} is damaged in run {key}: `mooring salvage {path}` keeps the rest"


def test_all_but_the_damaged_runs_are_kept_and_the_damaged_file_is_put_aside(path, capsys):
    before = list(Store(path).results())
    flipped(path, 3, 7)
    damaged = path.read_bytes()
    assert main(["salvage", str(path)]) == 0
    output = capsys.readouterr().out
    assert "kept 38 runs" in output
    assert all(make_result(seed).spec.key in output for seed in (3, 7))
    assert list(Store(path).results()) == [result for result in before if result.spec.seed not in (3, 7)]
    assert Store(path).commands() == ["mooring compare"]
    assert path.with_name("study.sqlite.damaged").read_bytes() == damaged
    assert salvage(path).aside is None


def test_pages_that_sqlite_cannot_read_cost_only_their_runs(path):
    with path.open("r+b") as opened:
        opened.seek(6 * 4096)
        opened.write(b"\x00" * 4096)
    outcome = salvage(path)
    assert outcome.aside is not None
    assert outcome.kept >= 30
    assert len(list(Store(path).results())) == outcome.kept


def test_file_without_anything_to_read_is_reported_in_one_line_and_left_alone(tmp_path):
    path = tmp_path / "study.sqlite"
    path.write_bytes(b"\xff" * 9000)
    with pytest.raises(MooringError, match=r"nothing in .* can be read"):
        salvage(path)
    assert path.read_bytes() == b"\xff" * 9000
    with pytest.raises(MooringError, match="there is no study"):
        salvage(tmp_path / "none.sqlite")


def test_run_of_a_newer_version_is_not_taken_for_damage(path):
    connection = sqlite3.connect(path)
    (text,) = connection.execute("SELECT result FROM runs LIMIT 1").fetchone()
    connection.close()
    newer = text.replace('"stream":', '"colour": "blue", "stream":', 1)
    changed(path, "UPDATE runs SET result = ? WHERE rowid = 1", newer)
    from mooring_lab.study.store import _digest

    changed(path, "UPDATE runs SET digest = ? WHERE rowid = 1", _digest(newer))
    with pytest.raises(MooringError, match="newer version"):
        salvage(path)
