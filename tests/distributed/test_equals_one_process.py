"""Ranks that share a batch, under DDP and with shards, give what one process gives, to 1e-9 in float64."""

import pytest

from distributed.ranks import every_case, started


@pytest.mark.parametrize("world", [2, 4])
def test_every_importance_with_every_pull_accumulated_and_clipped(world, tmp_path):
    started(tmp_path, world, every_case)
