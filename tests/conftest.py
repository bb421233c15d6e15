"""Session set-up: one thread per test process, and fixed random cases in CI."""

import gc
import os

import hypothesis
import pytest
import torch

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
