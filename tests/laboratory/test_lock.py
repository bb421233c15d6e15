"""One process at a time on a study, and a lock that dies with its process."""

import os
import signal
import time
from pathlib import Path

import pytest

from mooring.errors import MooringError
from mooring_lab.study.store import lock_study
from processes import Child, wait_for


def holding(path: str) -> None:
    with lock_study(Path(path)):
        print("mine", flush=True)
        time.sleep(60)


def trying(path: str) -> int:
    try:
        with lock_study(Path(path)):
            return 0
    except MooringError as error:
        print(error)
        return 2


def waiting(path: str) -> None:
    print("waiting", flush=True)
    with lock_study(Path(path), wait=True):
        print("mine", flush=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "study.sqlite"


@pytest.fixture
def owner(path, tmp_path):
    from laboratory.test_lock import holding as target

    child = Child(tmp_path / "owner", target, str(path))
    assert wait_for(lambda: child.out.exists() and "mine" in child.out.read_text(), child)
    yield child
    child.kill()
    child.ended()


def refusal(path: Path) -> str:
    with pytest.raises(MooringError) as caught, lock_study(path):
        pytest.fail("two at once")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_second_process_is_refused_in_one_line_that_names_the_first(path, owner, tmp_path):
    from laboratory.test_lock import trying as target

    line = refusal(path)
    assert f"is being run by process {owner.process.pid}: let it finish, or say --wait" in line
    assert str(path) in line
    ended = Child(tmp_path / "second", target, str(path)).ended()
    assert (ended.status, ended.out) == (2, line + "\n")


def test_second_process_that_waits_goes_on_when_the_first_is_killed(path, owner, tmp_path):
    from laboratory.test_lock import waiting as target

    child = Child(tmp_path / "second", target, str(path))
    assert wait_for(lambda: child.out.exists() and "waiting" in child.out.read_text(), child)
    time.sleep(0.3)
    assert child.out.read_text() == "waiting\n"
    owner.kill()
    ended = child.ended()
    assert (ended.status, ended.out) == (0, "waiting\nmine\n")


def test_lock_is_released_when_its_owner_is_killed(path, owner):
    owner.kill(signal.SIGKILL)
    assert owner.ended().status == -signal.SIGKILL
    with lock_study(path):
        assert path.with_name("study.sqlite.lock").read_text() == str(os.getpid())


def test_lock_is_released_after_an_error(path):
    with pytest.raises(RuntimeError), lock_study(path):
        raise RuntimeError
    with lock_study(path):
        pass


def test_same_process_cannot_lock_twice(path):
    with lock_study(path):
        assert f"process {os.getpid()}" in refusal(path)


def test_locks_of_different_studies_are_independent(tmp_path):
    with lock_study(tmp_path / "one.sqlite"), lock_study(tmp_path / "two.sqlite"):
        pass


def test_read_only_place_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot write in" in refusal(tmp_path / "file" / "study.sqlite")
    assert "cannot write in" in refusal(tmp_path / "missing" / "study.sqlite")


def test_full_disk_is_reported_in_one_line(path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert "No space left on device" in refusal(path)
