"""The studies that faults are injected into, and their results without faults."""

from contextlib import suppress
from pathlib import Path

from laboratory.mooring_command import command
from laboratory.test_kill import rows, saved
from processes import Child

SMALL = ["--limit", "30", "--tasks", "4", "--batch", "5", "--seeds", "2", "--memory", "15", "--dtype", "float64"]
METHODS = ["--methods", "plain,ewc,si,er,a-gem,joint,explicit-mas"]
ASKED = ["compare", *METHODS, *SMALL, "--epochs", "60", "--study", "study.sqlite"]
QUICK = ["compare", *METHODS, *SMALL, "--epochs", "3", "--study", "study.sqlite"]


class Whole(list):
    """The rows of a study that nobody disturbed, and where it is."""

    folder: Path


def uninterrupted(folder: Path, asked: list[str]) -> Whole:
    ended = Child(folder, command, *asked, patience=300).ended()
    assert ended.status == 0, ended.err
    stored = Whole(rows(folder))
    stored.folder = folder
    return stored


def often(every: float, *arguments: str) -> int:
    """The same command, saved within tasks too."""
    from mooring_lab.study.study import Study

    Study.__init__.__kwdefaults__["every"] = every
    return command(*arguments)


def table(folder: Path) -> str:
    """What `mooring show` says of a study."""
    return Child(folder, command, "show", "study.sqlite").ended().out


def times(folder: Path) -> dict[Path, int]:
    """When each checkpoint was written."""
    stamps = {}
    for path in saved(folder):
        with suppress(FileNotFoundError):
            stamps[path] = path.stat().st_mtime_ns
    return stamps
