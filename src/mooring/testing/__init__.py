"""Conformance suites for your own importances and pulls: `check_importance` and `check_pull`."""

from mooring.testing.cases import CASES, Case, check_equal, check_resumes
from mooring.testing.importance_checks import check_importance
from mooring.testing.pull_checks import AWKWARD, check_pull

__all__ = ["AWKWARD", "CASES", "Case", "check_equal", "check_importance", "check_pull", "check_resumes"]
