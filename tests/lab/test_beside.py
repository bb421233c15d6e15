"""Fleets side by side in processes of this machine: the same study, the same results, whatever becomes of workers."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster import workers
from lab.engines import ASKED
from lab.small import class_stream, spec_for
from lab.test_kill import rows, saved
from mooring.errors import MooringError
from mooring.lab.engines.beside import Beside
from mooring.lab.engines.packing import packed, unpacked
from mooring.lab.engines.runner import Aboard
from mooring.lab.networks.start import BackboneWeights
from mooring.lab.streams import Stream
from mooring.lab.study.study import Study
from processes import Child, command, wait_for

SIDE_BY_SIDE = ["--share", "0.5"]


def at_work(child: Child) -> list[int]:
    """The processes that it has started for fleets."""
    return [
        pid for pid in workers(child.process.pid, b"") if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.parametrize(("share", "count"), [(1.0, 1), (0.5, 2), (0.34, 3), (0.3, 3), (0.01, 100)])
def test_so_many_workers_as_shares_fit(tmp_path, share, count):
    assert Beside(Aboard({}, {}), tmp_path, share).workers == count


def test_what_workers_take_along_is_what_it_was_and_shared_as_it_was():
    stream = class_stream()
    part = replace(stream, tasks=stream.tasks[1:])
    weights = BackboneWeights("a.safetensors", "1234", {"w": torch.randn(3, 4).bfloat16().t(), "n": torch.tensor(7)})
    streams, found = unpacked(packed({each.fingerprint: each for each in (stream, part)}, {"1234": weights}))
    assert {key: hashed(each) for key, each in streams.items()} == {
        key: key for key in (stream.fingerprint, part.fingerprint)
    }
    one, other = streams.values()
    assert one.train.images.data_ptr() == other.train.images.data_ptr()
    assert found["1234"].path == "a.safetensors"
    assert all(torch.equal(tensor, found["1234"].tensors[name]) for name, tensor in weights.tensors.items())


def hashed(stream: Stream) -> str:
    """Its fingerprint, from its images."""
    return replace(stream).fingerprint


def test_results_equal_those_of_one_fleet_after_the_other(tmp_path, alone_here):
    told = Child(tmp_path, command, *ASKED, *SIDE_BY_SIDE).ended()
    assert told.status == 0, told.err
    assert rows(tmp_path) == alone_here
    assert sum(": done" in line for line in told.err.splitlines()) == 3
    assert not (tmp_path / "study.sqlite.fleets").exists()


def test_a_killed_worker_is_replaced_and_nothing_is_lost(tmp_path, alone_here):
    child = Child(tmp_path, command, *ASKED, *SIDE_BY_SIDE)
    assert wait_for(lambda: len(at_work(child)) == 2 and saved(tmp_path), child)
    os.kill(at_work(child)[0], signal.SIGKILL)
    told = child.ended()
    assert told.status == 0, told.err
    assert "note: a worker was lost: its" in told.err
    assert "Traceback" not in told.err
    assert rows(tmp_path) == alone_here


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 0, id="SIGTERM", marks=pytest.mark.faults),
    ],
)
def test_asked_to_stop_it_saves_says_so_in_one_line_and_continues(tmp_path, alone_here, number, status):
    child = Child(tmp_path, command, *ASKED, *SIDE_BY_SIDE)
    assert wait_for(lambda: saved(tmp_path), child)
    started = at_work(child)
    child.kill(number)
    told = child.ended()
    assert (told.status, told.out) == (status, ""), told.err
    last = told.err.splitlines()[-1]
    assert last == "interrupted; everything so far is saved, and the same command continues from here"
    assert "Traceback" not in told.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert Child(tmp_path, command, *ASKED).ended().status == 0  # as it likes: alone this time
    assert rows(tmp_path) == alone_here


def test_workers_stay_for_the_next_lot_where_that_is_asked_for(tmp_path):
    study = Study(tmp_path / "study.sqlite", share=0.5)
    asked = {"stream": class_stream(tasks=2), "methods": ["plain", "er"], "epochs": 1, "memory": 10}
    with study.crewed():
        started = []
        for seeds in (1, 2, 3):
            study.compare(**asked, seeds=seeds)
            started.append([worker.process.pid for worker in study.crews.workers])
            if seeds == 2:
                os.kill(started[1][0], signal.SIGKILL)  # while it has nothing to do
    assert started[0] == started[1]
    assert len(started[0]) == 2
    assert len({*started[1], *started[2]}) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pids in started for pid in pids)
    assert len(study.results()) == 6


@pytest.mark.faults
def test_a_worker_is_killed_and_then_everything_is_to_stop(tmp_path, alone_here):
    child = Child(tmp_path, command, *ASKED, *SIDE_BY_SIDE)
    assert wait_for(lambda: len(at_work(child)) == 2 and saved(tmp_path), child)
    os.kill(at_work(child)[0], signal.SIGKILL)
    child.kill(signal.SIGINT)
    assert child.ended().status == 130
    assert Child(tmp_path, command, *ASKED).ended().status == 0
    assert rows(tmp_path) == alone_here


@pytest.mark.faults
def test_an_error_where_results_are_put_away_ends_everything_and_workers_go(tmp_path, monkeypatch):
    study = Study(tmp_path / "study.sqlite", share=0.5)
    asked = {"stream": class_stream(tasks=2), "methods": ["plain", "er"], "epochs": 1, "memory": 10, "seeds": 1}

    def refuse(results):
        raise OSError("disk full")

    with study.crewed():
        with monkeypatch.context() as there:
            there.setattr(study.store, "add", refuse)
            with pytest.raises(OSError, match="disk full"):
                study.compare(**asked)
        assert len(study.compare(**asked)) == 2  # with other workers


def test_a_run_that_a_worker_refuses_is_told_in_one_line(tmp_path):
    stream = class_stream(tasks=2)
    lost = spec_for("plain", stream, init="0123")
    with pytest.raises(MooringError, match="the weights 0123 that a run starts from are not here"):
        Study(tmp_path / "study.sqlite", share=0.5).run([lost], {stream.fingerprint: stream})


GUARDLESS = """
from mooring.lab import Study
Study("study.sqlite", share=0.5).compare(stream="digits", methods="plain,er", epochs=1, seeds=1)
"""


@pytest.mark.faults
def test_a_script_without_a_guard_is_given_up_with_a_word_about_it(tmp_path):
    (tmp_path / "script.py").write_text(GUARDLESS)
    told = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert told.returncode == 1
    assert 'run the study under `if __name__ == "__main__":`' in told.stderr.splitlines()[-1]


def test_what_fails_in_a_worker_is_told_in_one_line(tmp_path):
    (tmp_path / "study.sqlite.fleets").write_text("in the way")
    told = Child(tmp_path, command, *ASKED, *SIDE_BY_SIDE).ended()
    assert (told.status, told.out) == (2, "")
    assert told.err.splitlines()[-1].startswith("error: cannot write in ")
    assert "Traceback" not in told.err
