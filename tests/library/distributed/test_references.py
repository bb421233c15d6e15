"""Tests that a reference read by several ranks gives the state of one process, to 1e-9 in float64."""

from library.distributed.ranks import run_ranks
from library.distributed.references import references


def test_ranks_that_share_a_reference_equal_one_process(tmp_path):
    run_ranks(tmp_path, 2, references)
