"""Tests run side by side on few cores, each on one thread; continuous integration repeats the same cases."""

import os

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("exploring", deadline=None)
hypothesis.settings.register_profile("repeating", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeating" if os.environ.get("CI") else "exploring")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
