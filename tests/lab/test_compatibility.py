"""Studies and checkpoints of older versions are read, continued and brought up to date; newer ones are refused."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from mooring.lab.engines.reporting import Silent
from mooring.lab.streams.options import StreamOptions
from mooring.lab.study.store import VERSION, Store
from mooring.lab.study.study import Study

KEPT = sorted((Path(__file__).parents[1] / "fixtures").glob("store-*"))
TOLD = {"stream": StreamOptions("digits", limit=20, tasks=3), "epochs": 2, "batch": 10, "lr": 0.05, "methods": "plain"}
"""What made them: seed 0 to its end, and seed 1 up to the third task."""


class Listening(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def sailing(self, number, fleet, done) -> None:
        self.steps.append(fleet.steps)


def version(path: Path) -> int:
    connection = sqlite3.connect(path)
    ((found,),) = connection.execute("SELECT value FROM about WHERE name = 'version'").fetchall()
    connection.close()
    return int(found)


@pytest.fixture(params=KEPT, ids=lambda path: path.name)
def kept(request, tmp_path):
    return Path(shutil.copytree(request.param, tmp_path / "kept")) / "study.sqlite"


def test_there_is_a_fixture_for_every_version():
    assert {int(path.name.split("-")[1]) for path in KEPT} == set(range(1, VERSION + 1))
    from mooring.lab.fleet import checkpoint

    assert {int(path.name.split("-")[3]) for path in KEPT} == set(range(1, checkpoint.VERSION + 1))


def test_an_older_study_is_read_and_reading_changes_nothing(kept):
    before = kept.read_bytes()
    (result,) = Store(kept).results()
    assert (result.spec.seed, result.status, len(result.matrix)) == (0, "finished", 3)
    assert kept.read_bytes() == before


def test_an_older_study_is_continued_from_its_checkpoint_and_brought_up_to_date(kept, tmp_path):
    (before,) = Store(kept).results()
    listening = Listening()
    (row,) = Study(kept, reporter=listening).compare(seeds=2, **TOLD)
    assert listening.notes == []
    assert min(listening.steps) >= 8, "it began again"
    assert row.results[0] == before
    assert version(kept) == VERSION
    (new,) = Study(tmp_path / "new.sqlite").compare(seeds=2, **TOLD)
    for ours, theirs in zip(row.results, new.results, strict=True):  # made on another machine: to a few images
        assert ours.spec == theirs.spec
        assert ours.metrics["accuracy"] == pytest.approx(theirs.metrics["accuracy"], abs=5)
