"""Checkpoints that do not depend on the speed of the disk, the study that engines are compared by, and the faults."""

import math

import pytest

from laboratory.fault_table import FaultTable
from mooring_lab.engines import runner
from processes import Child

FAULT_TABLE = FaultTable()


@pytest.fixture(autouse=True)
def _checkpoint_after_every_task(monkeypatch):
    """Write every checkpoint; otherwise those that a slow disk makes expensive are skipped."""
    monkeypatch.setattr(runner, "ALLOWED_SAVE_SECONDS", math.inf)


@pytest.fixture
def fault_table():
    """Return the table of injected faults, which is printed at the end."""
    return FAULT_TABLE


@pytest.fixture(scope="session")
def alone_here(tmp_path_factory):
    """Return the rows of the engines' study, run one fleet after the other in one process."""
    from laboratory.engines import ASKED
    from laboratory.mooring_command import command
    from laboratory.test_kill import rows

    folder = tmp_path_factory.mktemp("alone")
    finished = Child(folder, command, *ASKED).ended()
    assert finished.status == 0, finished.err
    return rows(folder)


def pytest_terminal_summary(terminalreporter):
    for line in FAULT_TABLE.table():
        terminalreporter.write_line(line)
