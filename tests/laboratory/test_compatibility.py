"""A study written by an earlier commit loads, and its runs end with the same numbers; older checkpoints are refused.

`fixtures/study` was written with the versions that `VERSION` of the store and of the checkpoint name. Both studies ask
for `COMPARISONS`: `finished.sqlite` has every result; `interrupted.sqlite` has those of "joint", and a checkpoint of
each other comparison, the last one in its first task. Their network is named by an older hash, which only covered the
file of its function: today's would train its runs again, so that `VERSIONED_NETWORK` is given instead.
"""

import shutil
from pathlib import Path

import pytest

from mooring.errors import MooringError
from mooring_lab.engines.runner import SilentReporter
from mooring_lab.model.results import Result
from mooring_lab.streams.options import StreamOptions
from mooring_lab.study.store import Store, checkpoint_folder
from mooring_lab.study.study import Study

FIXTURE = Path(__file__).parents[1] / "fixtures" / "study"
COMMON = {
    "stream": StreamOptions("digits", limit=20, tasks=3),
    "epochs": 2,
    "batch": 10,
    "lr": 0.05,
    "seeds": 1,
    "dtype": "float64",
    "network": "fixtures.tiny_network:tiny",
}
VERSIONED_NETWORK = "fixtures.tiny_network:tiny@de2e8f03"
COMPARISONS = {
    6: {"methods": "plain,ewc,explicit-si", "strength": {"ewc": [1.0, 3.0]}},
    7: {"methods": "budget-kronecker"},
    5: {"methods": "er", "memory": 5},
    2: {"methods": "clamped-mas", "strength": {"clamped-mas": [1.0, 10.0]}},
}
"""Comparisons by the number of steps in their checkpoint."""


class RecordingReporter(SilentReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def advanced(self, number, fleet, done) -> None:
        self.steps.append(fleet.steps)


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr("mooring_lab.study.study.versioned_name", lambda name, network: VERSIONED_NETWORK)
    return Path(shutil.copytree(FIXTURE, tmp_path / "study"))


def check_close(results: list[Result], expected: list[Result]) -> None:
    """Compare everything but times and versions; sums may differ in their last bits on another machine."""
    assert [result.spec for result in results] == [result.spec for result in expected]
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours.status, ours.reason, ours.steps) == (theirs.status, theirs.reason, theirs.steps)
        assert (ours.untrained, ours.matrix) == (theirs.untrained, theirs.matrix)
        for name in ("losses", "drift", "cka", "importance"):
            own, others = getattr(ours, name), getattr(theirs, name)
            if name == "losses":
                assert [pytest.approx(row, rel=1e-6) for row in others] == own
            else:
                assert own == pytest.approx(others, rel=1e-6)
        assert len(ours.stability) == len(theirs.stability)
        for judged, other in zip(ours.stability, theirs.stability, strict=True):
            assert vars(judged) == pytest.approx(vars(other), rel=1e-6)


def test_reading_a_study_returns_its_results_and_changes_nothing(study):
    path = study / "finished.sqlite"
    before = path.read_bytes()
    results = list(Store(path).results())
    assert len(results) == 9
    assert {result.status for result in results} == {"finished"}
    assert path.read_bytes() == before


def test_runs_of_a_finished_study_are_not_trained_again(study):
    reporter = RecordingReporter()
    for comparison in (*COMPARISONS.values(), {"methods": "joint"}):
        Study(study / "finished.sqlite", reporter=reporter).compare(**COMMON, **comparison)
    assert reporter.steps == []


@pytest.mark.parametrize("steps", COMPARISONS)
def test_checkpoints_of_another_version_are_refused_in_one_line_and_their_runs_can_start_again(study, steps):
    comparison, interrupted = COMPARISONS[steps], study / "interrupted.sqlite"
    with pytest.raises(MooringError, match="has version 2, this Mooring reads 3: continue it with") as refused:
        Study(interrupted).compare(**COMMON, **comparison)
    assert "\n" not in str(refused.value)
    for path in checkpoint_folder(interrupted).iterdir():
        path.unlink()
    results = [result for row in Study(interrupted).compare(**COMMON, **comparison) for result in row.results]
    expected = [r for row in Study(study / "finished.sqlite").compare(**COMMON, **comparison) for r in row.results]
    check_close(results, expected)
