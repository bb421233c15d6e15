"""Checks of a refused command: exit status 2, one line on stderr, and nothing on stdout, written or trained."""

from pathlib import Path

import pytest

from mooring_lab.cli import main
from mooring_lab.fleet.fleet import Fleet

CONTROL = ("\x1b", "│", "─", "╭", "━")


def everything_under(folder: Path) -> dict[str, bytes | None]:
    """Return every file with its content, and every folder with None."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def refused(folder: Path, arguments: list[str], capsys, monkeypatch) -> str:
    """Run a command that must be refused, check how it is refused, and return its error line."""

    def trained(*args: object, **kwargs: object) -> None:
        pytest.fail("it trained")

    monkeypatch.setattr(Fleet, "run", trained)
    monkeypatch.chdir(folder)
    before = everything_under(folder)
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert one_line(status, captured.out, captured.err)
    assert everything_under(folder) == before, "something was written"
    return captured.err.rstrip("\n")


def one_line(status: int, out: str, err: str) -> bool:
    assert status == 2, (status, out, err)
    assert out == ""
    assert err.startswith("error: "), err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert not any(sign in err for sign in CONTROL)
    return True
