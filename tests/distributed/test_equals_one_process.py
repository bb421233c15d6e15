"""Ranks that share a batch, under DDP and with shards, give what one process gives, to 1e-9 in float64, or say no."""

import pytest
import torch

from distributed.ranks import every_case, free_port, started
from distributed.together import agreement, blocks

pytestmark = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 needs GPUs in this torch")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_every_importance_and_every_pull_accumulated_and_clipped(world, tmp_path):
    started(tmp_path, world, every_case, True)


@pytest.mark.faults
def test_every_importance_with_every_pull(tmp_path):
    started(tmp_path, 2, every_case, False)


def test_ranks_stop_draw_and_refuse_together(tmp_path):
    """And what docs/distributed.md shows runs."""
    started(tmp_path, 2, agreement, tmp_path, [free_port() for _ in blocks()])
