"""Tests that ranks under DDP and FSDP equal one process, to 1e-9 in float64, or refuse."""

import pytest
import torch

from library.distributed.agreement import agreement, blocks
from library.distributed.ranks import every_case, run_ranks
from processes import free_port

pytestmark = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 needs GPUs in this torch")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_ranks_equal_one_process_with_accumulated_and_clipped_gradients(world, tmp_path):
    run_ranks(tmp_path, world, every_case, True)


@pytest.mark.faults
def test_ranks_equal_one_process_for_every_importance_and_pull(tmp_path):
    run_ranks(tmp_path, 2, every_case, False)


def test_ranks_agree_on_errors_random_draws_and_refusals(tmp_path):
    """The blocks of docs/distributed.md run too."""
    run_ranks(tmp_path, 2, agreement, tmp_path, [free_port() for _ in blocks()])
