"""What tests of the command line share."""

import sys

import pytest

from mooring_lab.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs a command, checks that it succeeds, and returns its stdout."""

    def run_command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["mooring", *arguments])
        status = main()
        output = capsys.readouterr()
        assert status == 0, output.err
        return output.out

    return run_command
