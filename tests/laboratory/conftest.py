"""Checkpoints that do not depend on the speed of the disk."""

import math

import pytest

from mooring_lab.engines import runner


@pytest.fixture(autouse=True)
def _checkpoint_after_every_task(monkeypatch):
    """Write every checkpoint; otherwise those that a slow disk makes expensive are skipped."""
    monkeypatch.setattr(runner, "ALLOWED_SAVE_SECONDS", math.inf)
