"""Tests run side by side on few cores, each on one thread; continuous integration repeats the same cases."""

import os

import hypothesis
import pytest
import torch

from ledger import Ledger

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
hypothesis.settings.register_profile("exploring", deadline=None)
hypothesis.settings.register_profile("repeating", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeating" if os.environ.get("CI") else "exploring")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


LEDGER = Ledger()


@pytest.fixture
def ledger():
    """What was injected and what came of it, for the table at the end."""
    return LEDGER


@pytest.fixture(scope="session")
def alone_here(tmp_path_factory):
    """What the study that engines are compared by gives, one fleet after the other in one process."""
    from lab.engines import ASKED
    from lab.test_kill import rows
    from processes import Child, command

    folder = tmp_path_factory.mktemp("alone")
    told = Child(folder, command, *ASKED).ended()
    assert told.status == 0, told.err
    return rows(folder)


def pytest_terminal_summary(terminalreporter):
    for line in LEDGER.table():
        terminalreporter.write_line(line)
