"""A damaged study is noticed, what is wrong is named, and the rest is kept."""

import sqlite3

import pytest

from lab.test_store import changed, made
from mooring.cli import main
from mooring.errors import MooringError
from mooring.lab.study.salvage import salvage
from mooring.lab.study.store import Store


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "study.sqlite"
    store = Store(path)
    store.add([made(seed) for seed in range(40)])
    store.log("mooring compare")
    return path


def flipped(path, *seeds: int) -> None:
    """A digit of an accuracy is another, which is JSON still."""
    for seed in seeds:
        changed(path, "UPDATE runs SET result = replace(result, '0.0', '9.0') WHERE key = ?", made(seed).spec.key)


def test_a_bit_that_flipped_is_noticed_and_its_run_is_named(path):
    flipped(path, 3)
    with pytest.raises(MooringError) as caught:
        list(Store(path).results())
    key = made(3).spec.key
    assert str(caught.value) == f"the study {path} is damaged in run {key}: `mooring salvage {path}` keeps the rest"


def test_all_but_the_damaged_runs_are_kept_and_the_damaged_file_is_put_aside(path, capsys):
    before = list(Store(path).results())
    flipped(path, 3, 7)
    damaged = path.read_bytes()
    assert main(["salvage", str(path)]) == 0
    told = capsys.readouterr().out
    assert "kept 38 runs" in told
    assert all(made(seed).spec.key in told for seed in (3, 7))
    assert list(Store(path).results()) == [result for result in before if result.spec.seed not in (3, 7)]
    assert Store(path).commands() == ["mooring compare"]
    assert path.with_name("study.sqlite.damaged").read_bytes() == damaged
    assert salvage(path).aside is None


def test_pages_that_sqlite_cannot_read_cost_only_their_runs(path):
    with path.open("r+b") as opened:
        opened.seek(6 * 4096)
        opened.write(b"\x00" * 4096)
    found = salvage(path)
    assert found.aside is not None
    assert found.kept >= 30
    assert len(list(Store(path).results())) == found.kept


def test_a_file_without_anything_to_read_is_told_in_one_line_and_left_alone(tmp_path):
    path = tmp_path / "study.sqlite"
    path.write_bytes(b"\xff" * 9000)
    with pytest.raises(MooringError, match=r"nothing in .* can be read"):
        salvage(path)
    assert path.read_bytes() == b"\xff" * 9000
    with pytest.raises(MooringError, match="there is no study"):
        salvage(tmp_path / "none.sqlite")


def test_what_a_newer_version_wrote_is_not_taken_for_damage(path):
    connection = sqlite3.connect(path)
    (text,) = connection.execute("SELECT result FROM runs LIMIT 1").fetchone()
    connection.close()
    newer = text.replace('"stream":', '"colour": "blue", "stream":', 1)
    changed(path, "UPDATE runs SET result = ? WHERE rowid = 1", newer)
    from mooring.lab.study.store import _digest

    changed(path, "UPDATE runs SET digest = ? WHERE rowid = 1", _digest(newer))
    with pytest.raises(MooringError, match="newer version"):
        salvage(path)
