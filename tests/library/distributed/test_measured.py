"""Tests that ranks with a measured budget equal one process."""

import pytest

from library.distributed.measured import measured_budgets
from library.distributed.ranks import run_ranks


@pytest.mark.faults
def test_two_ranks_with_a_measured_budget_equal_one(tmp_path):
    run_ranks(tmp_path, 2, measured_budgets)
