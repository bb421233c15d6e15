"""Session set-up: one thread per test process, fixed random cases in CI, and the table of faults."""

import gc
import os

import hypothesis
import pytest
import torch

from fault_table import FaultTable

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
hypothesis.settings.register_profile("exploring", deadline=None)
hypothesis.settings.register_profile("repeating", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeating" if os.environ.get("CI") else "exploring")


def pytest_collection_finish(session):
    """Exempt libraries and collected tests from garbage collection, which would traverse them in every study."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def _own_cache(caches, request, monkeypatch):
    """Keep decoded images out of the user's cache, and those of one test out of another's."""
    own = caches / f"{hash(request.node.nodeid):x}"
    own.mkdir(exist_ok=True)  # torch stores kernels there, and creates one folder only
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


FAULT_TABLE = FaultTable()


@pytest.fixture
def fault_table():
    """Return the table of injected faults, which is printed at the end."""
    return FAULT_TABLE


@pytest.fixture(scope="session")
def alone_here(tmp_path_factory):
    """Return the rows of the engines' study, run one fleet after the other in one process."""
    from laboratory.engines import ASKED
    from laboratory.test_kill import rows
    from processes import Child, command

    folder = tmp_path_factory.mktemp("alone")
    finished = Child(folder, command, *ASKED).ended()
    assert finished.status == 0, finished.err
    return rows(folder)


def pytest_terminal_summary(terminalreporter):
    for line in FAULT_TABLE.table():
        terminalreporter.write_line(line)
