"""Files that are torn, damaged, missing, or on a full disk: one line reports it, and no result is lost."""

import os
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from laboratory.faults.small import QUICK, uninterrupted
from laboratory.mooring_command import command
from laboratory.small import Once, class_stream, spec_for
from laboratory.test_kill import rows, saved
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from processes import Child, wait_for

pytestmark = pytest.mark.faults
PATIENCE = 240


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("quick"), QUICK)


# Torn


def narrow(shape: tuple[int, int, int]) -> torch.nn.Module:
    """A network whose checkpoints are small enough to be cut off everywhere."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[1] * shape[2], 2), torch.nn.Tanh())


def test_checkpoint_torn_at_any_byte_is_refused_whole(tmp_path, fault_table):
    """Every boundary of header and tensors: as if there were no scratch file and no rename."""
    stream, network = class_stream(tasks=2, images=8), "laboratory.faults.test_files:narrow"
    specs = [spec_for(method, stream, 0, batch=4, epochs=1, network=network) for method in ("plain", "explicit-ewc")]
    results = Fleet(specs, stream).run(Once(tmp_path / "whole"))
    data, torn = (tmp_path / "whole").read_bytes(), tmp_path / "torn"
    torn.write_bytes(data)
    for cut in reversed(range(len(data))):
        os.truncate(torn, cut)
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.runs_in(torn)
    whole = [(result.spec.key, result.matrix) for result in results]
    again = Fleet(specs, stream)
    checkpoint.restore(again, tmp_path / "whole")
    fault_table.add("a checkpoint cut off at a byte", len(data), whole, [(r.spec.key, r.matrix) for r in again.run()])


def torn_at(size: int, *arguments: str) -> int:
    """The command, killed by the system in the middle of the write that makes a file larger than that."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return command(*arguments)


def test_process_killed_within_the_write_of_a_checkpoint_loses_nothing(tmp_path, quick, fault_table):
    child = Child(tmp_path / "look", command, *QUICK, "--epochs", "200")
    wait_for(lambda: saved(tmp_path / "look"), child)
    child.kill(signal.SIGTERM)
    child.ended()
    largest = max(path.stat().st_size for path in saved(tmp_path / "look"))
    sizes = [1, 7, 8, 9, *(largest * part // 12 for part in range(1, 12)), largest - 1]
    kills = 0
    for size in sizes:
        ended = Child(tmp_path, torn_at, size, *QUICK).ended()
        kills += ended.status == -signal.SIGXFSZ
    assert kills >= len(sizes) // 2
    assert Child(tmp_path, command, *QUICK, patience=PATIENCE).ended().status == 0
    assert saved(tmp_path) == []
    fault_table.add("kill within a checkpoint's write", kills, quick, rows(tmp_path))


# Full


def on_a_small_disk(size: int, *arguments: str) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return command(*arguments)


def test_disk_full_at_any_size_is_reported_in_one_line_and_continued(tmp_path, quick, fault_table):
    """RLIMIT_FSIZE: no file may grow beyond it, so checkpoints, the study and its journal fail, each in its turn."""
    full = 0
    for size in (600, 4_096, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000):
        ended = Child(tmp_path, on_a_small_disk, size, *QUICK).ended()
        if ended.status == 0:
            break
        full += 1
        assert (ended.status, ended.out) == (2, ""), ended.err
        assert "Traceback" not in ended.err
        assert ended.err.splitlines()[-1].startswith("error: ")
    assert full
    assert Child(tmp_path, command, *QUICK, patience=PATIENCE).ended().status == 0
    fault_table.add("disk full (RLIMIT_FSIZE)", full, quick, rows(tmp_path))


# Damaged


def test_study_with_any_page_overwritten_is_refused_or_continues(tmp_path, quick, fault_table):
    original, injured = quick.folder / "study.sqlite", 0
    size = original.stat().st_size
    for page in range(1, size // 4096):
        folder = tmp_path / str(page)
        folder.mkdir()
        shutil.copy(original, folder / "study.sqlite")
        with (folder / "study.sqlite").open("r+b") as opened:
            opened.seek(page * 4096 + 100)
            opened.write(b"\x5a" * 900)
        shown = Child(folder, command, "show", "study.sqlite").ended()
        assert shown.status in (0, 2)
        assert "Traceback" not in shown.err
        if shown.status:
            assert shown.err.count("\n") == 1
            assert "study.sqlite" in shown.err
            assert "is damaged in run" in shown.err or "is not a SQLite file, or damaged" in shown.err
            assert Child(folder, command, *QUICK).ended().status == 2  # nothing is trained into a damaged file
            (folder / "study.sqlite").unlink()
        injured += bool(shown.status)
        assert Child(folder, command, *QUICK, patience=PATIENCE).ended().status == 0
        fault_table.add("a damaged page of the study", 1, quick, rows(folder))
    assert injured >= 5


# Gone


def test_data_folder_that_disappears_is_named_and_nothing_is_lost(tmp_path, fault_table):
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in "abcd":
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(6):
                Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    asked = ["compare", "--stream", "folder", "--data", "../data", "--per-task", "2", "--network", "mlp"]
    asked += ["--methods", "plain,er,explicit-mas", "--seeds", "2", "--memory", "5", "--epochs", "60", "--batch", "2"]
    asked += ["--dtype", "float64", "--lr", "0.01", "--study", "study.sqlite"]
    whole = uninterrupted(tmp_path / "whole", asked)
    child = Child(tmp_path / "study", command, *asked, patience=PATIENCE)
    wait_for(lambda: saved(tmp_path / "study"), child)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    child.kill(signal.SIGTERM)
    ended = child.ended()
    assert ended.status == 0
    assert "Traceback" not in ended.err
    gone = Child(tmp_path / "study", command, *asked).ended()
    if not ended.out:
        assert (gone.status, gone.out) == (2, "")
        assert gone.err.count("\n") == 1
        assert "data" in gone.err
    (tmp_path / "elsewhere").rename(tmp_path / "data")
    assert Child(tmp_path / "study", command, *asked, patience=PATIENCE).ended().status == 0
    fault_table.add("a data folder that disappears", 1, whole, rows(tmp_path / "study"))
