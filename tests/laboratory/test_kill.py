"""Killed anywhere and resumed equals never interrupted, bit for bit; two processes at once lose nothing."""

import itertools
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from laboratory.mooring_command import command
from processes import Child, Ended, wait_for

METHODS = "plain,ewc,si,er,a-gem,explicit-mas"
DIGITS = [
    "--limit",
    "30",
    "--tasks",
    "3",
    "--epochs",
    "4",
    "--batch",
    "10",
    "--seeds",
    "2",
    "--memory",
    "15",
    "--dtype",
    "float64",
]
ASKED = ["compare", "--methods", METHODS, *DIGITS, "--study", "study.sqlite"]
RUNS = 12


def rows(folder: Path) -> list[tuple]:
    """Everything that a study holds but how long it took and when."""
    connection = sqlite3.connect(folder / "study.sqlite")
    names = "key, stream, method, seed, status, accuracy, forgetting, learned, spec, result"
    stored = connection.execute(f"SELECT {names} FROM runs ORDER BY key").fetchall()
    connection.close()
    comparable = []
    for *columns, text in stored:
        result = json.loads(text)
        del result["seconds"], result["versions"]
        comparable.append((*columns, json.dumps(result)))  # text, in which no two floats look alike
    return comparable


def saved(folder: Path) -> list[Path]:
    return list((folder / "study.sqlite.fleets").glob("*.safetensors"))


def start(folder: Path, **how) -> Child:
    return Child(folder, command, *ASKED, **how)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The study that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    Child(folder, command, "methods").ended()  # the first of all takes as long as importing torch
    began = time.monotonic()
    ended = start(folder).ended()
    assert ended.status == 0, ended.err
    stored = rows(folder)
    assert len(stored) == RUNS
    assert saved(folder) == []
    return stored, time.monotonic() - began


def finished(folder: Path, whole) -> Ended:
    """Ask once more, undisturbed; what came out is what would have come out anyway."""
    ended = start(folder).ended()
    assert ended.status == 0, ended.err
    assert rows(folder) == whole[0]
    assert saved(folder) == []
    return ended


# Kills


def test_killed_at_random_moments_and_continued_gives_the_same_bit_for_bit(tmp_path, whole):
    moments, kills, long = random.Random(0), 0, whole[1]
    while kills < 3:
        child = start(tmp_path)
        time.sleep(moments.uniform(0.1, 0.9) * long)
        child.kill()
        if child.ended().status == -signal.SIGKILL:
            kills += 1
        else:  # it was done before that: from the start again, and sooner
            (tmp_path / "study.sqlite").unlink()
            long *= 0.7
    finished(tmp_path, whole)


def often(every: float) -> int:
    """The same study, saved within tasks too."""
    from mooring_lab.study.study import Study

    Study.__init__.__kwdefaults__["every"] = every
    return command(*ASKED)


@pytest.mark.faults  # slow
def test_killed_within_tasks_and_continued_from_there_gives_the_same_bit_for_bit(tmp_path, whole):
    from laboratory.test_kill import often as target

    moments, within = random.Random(2), 0
    for _ in range(5):
        child = Child(tmp_path, target, 0.005)
        begin = {path: path.stat().st_mtime_ns for path in saved(tmp_path)}
        wait_for(lambda begin=begin: {p: p.stat().st_mtime_ns for p in saved(tmp_path) if p.exists()} != begin, child)
        time.sleep(moments.uniform(0, 0.1) * whole[1])
        child.kill()
        child.ended()
        within += any(position(path)["step"] for path in saved(tmp_path))
    assert within, "it was never within a task"
    ended = finished(tmp_path, whole)
    assert "note:" not in ended.err


def position(path: Path) -> dict[str, int]:
    with safe_open(path, framework="pt") as opened:
        return json.loads(opened.metadata()["mooring"])["position"]


def killed_at(moment: int, *arguments: str) -> int:
    """Killed before or after the so-manieth time that something reaches the disk."""
    from mooring_lab.model import atomic_files as files
    from mooring_lab.study import store

    count = itertools.count()

    def watched(act):
        def acted(*args, **kwargs):
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            done = act(*args, **kwargs)
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return acted

    files.os.replace, files.os.fsync = watched(os.replace), watched(os.fsync)
    Path.unlink = watched(Path.unlink)
    store._row = watched(store._row)
    return command(*arguments)


@pytest.mark.faults  # slow
def test_killed_at_every_write_one_after_the_other_gives_the_same_bit_for_bit(tmp_path, whole):
    """Each process is killed one write later than the one before, from where that one left off."""
    from laboratory.test_kill import killed_at as target

    kills = 0
    for moment in range(0, 60, 4):
        ended = Child(tmp_path, target, moment, *ASKED).ended()
        if ended.status == 0:
            break
        assert ended.status == -signal.SIGKILL, ended.err
        kills += 1
    assert kills >= 8
    finished(tmp_path, whole)


def test_kill_while_results_are_stored_loses_nothing(tmp_path, whole):
    from laboratory.test_kill import killed_while_keeping as target

    for number in (1, 3):  # within the first fleet's results, and within a later one's
        assert Child(tmp_path, target, number).ended().status == -signal.SIGKILL
    finished(tmp_path, whole)


def killed_while_keeping(number: int) -> int:
    from mooring_lab.study import store

    row, count = store._row, itertools.count(1)

    def killed(result):
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return row(result)

    store._row = killed
    return command(*ASKED)


def test_temporary_files_of_a_killed_process_are_deleted(tmp_path, whole):
    from laboratory.test_kill import killed_at as target

    for moment in (1, 2, 3, 4):
        Child(tmp_path, target, moment, *ASKED).ended()
    finished(tmp_path, whole)
    assert not (tmp_path / "study.sqlite.fleets").exists()


def test_killed_pretraining_resumes_bit_for_bit(tmp_path):
    from laboratory.test_kill import killed_at as target

    asked = ["pretrain", "--network", "mlp", "--limit", "40", "--epochs", "4", "--lr", "0.02", "--out", "b.safetensors"]
    for moment in (6, 12, None):
        ended = Child(tmp_path / "killed", target, -1 if moment is None else moment, *asked).ended()
        assert ended.status == (0 if moment is None else -signal.SIGKILL), ended.err
    assert Child(tmp_path / "whole", command, *asked).ended().status == 0
    one, other = (load_file(tmp_path / name / "b.safetensors") for name in ("killed", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted_pretraining_says_so_in_one_line_and_keeps_its_epochs(tmp_path, number, status):
    asked = ["pretrain", "--network", "mlp", "--limit", "40", "--lr", "0.02", "--seeds", "2", "--out", "b.safetensors"]
    child = Child(tmp_path, command, *asked, "--epochs", "100000")
    assert wait_for((tmp_path / "b.safetensors.partial").exists, child)
    child.kill(number)
    ended = child.ended()
    assert (ended.status, ended.out) == (status, "")
    assert ended.err == "interrupted; every finished epoch is saved, and the same command continues from there\n"
    assert [path.name for path in tmp_path.glob("*b.*")] == ["b.safetensors.partial"]


# Signals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["Ctrl-C", "SIGTERM"])
def test_stop_signal_saves_reports_in_one_line_and_continues(tmp_path, whole, number, status):
    for _ in range(2):
        child, before = start(tmp_path), saved(tmp_path)
        assert wait_for(lambda before=before: set(saved(tmp_path)) - set(before), child)
        child.kill(number)
        ended = child.ended()
        assert ended.status == status
        assert ended.out == ""
        assert ended.err.splitlines()[-1] == (
            "interrupted; everything so far is saved, and the same command continues from here"
        )
        assert "Traceback" not in ended.err
        assert saved(tmp_path)
    finished(tmp_path, whole)


@pytest.mark.faults  # slow
def test_command_in_an_interpreter_of_its_own_is_interrupted_and_continued(tmp_path, whole):
    arguments = [sys.executable, "-c", "from mooring_lab.cli import main; import sys; sys.exit(main())", *ASKED]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, cwd=tmp_path, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while process.poll() is None and not saved(tmp_path):
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b""), err
    assert b"Traceback" not in err
    finished(tmp_path, whole)


# Two at once


def test_second_process_is_refused_in_one_line_and_nothing_is_lost(tmp_path, whole):
    first = start(tmp_path)
    assert wait_for(lambda: saved(tmp_path), first)
    os.kill(first.process.pid, signal.SIGSTOP)  # or it may be done too soon
    second = Child(tmp_path / "second", command, *ASKED[:-1], "../study.sqlite").ended()
    os.kill(first.process.pid, signal.SIGCONT)
    assert second.status == 2
    assert second.out == ""
    assert second.err == (
        f"error: the study ../study.sqlite is being run by process {first.process.pid}: let it finish, or say --wait "
        "to go on after it\n"
    )
    assert first.ended().status == 0
    assert rows(tmp_path) == whole[0]


def test_second_process_that_waits_trains_nothing_again(tmp_path, whole):
    first = start(tmp_path)
    assert wait_for(lambda: saved(tmp_path), first)
    second = Child(tmp_path / "second", command, *ASKED[:-1], "../study.sqlite", "--wait")
    assert first.ended().status == 0
    ended = second.ended()
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.replace("../study", "study") == first.out.read_text()
    assert rows(tmp_path) == whole[0]


def test_processes_that_wait_for_each_other_add_up_to_the_whole(tmp_path, whole):
    both = [
        Child(
            tmp_path / str(n), command, "compare", "--methods", methods, *DIGITS, "--study", "../study.sqlite", "--wait"
        )
        for n, methods in enumerate(("plain,ewc,si,er", "a-gem,explicit-mas,plain"))
    ]
    for child in both:
        ended = child.ended()
        assert ended.status == 0, ended.err
    assert [row[0] for row in rows(tmp_path)] == [row[0] for row in whole[0]]


# Full disks


def on_a_small_disk(size: int) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return command(*ASKED)


def test_full_disk_is_reported_in_one_line_and_continued_once_there_is_room(tmp_path, whole):
    from laboratory.test_kill import on_a_small_disk as target

    ended = Child(tmp_path, target, 100_000).ended()
    assert ended.status == 2
    assert ended.out == ""
    assert "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("error: cannot write study.sqlite.fleets/")
    assert "make room" in last
    assert saved(tmp_path) == []
    finished(tmp_path, whole)
