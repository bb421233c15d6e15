"""What every importance and every pull must keep, to run on your own: `check_importance`, `check_pull`."""

from mooring.testing.cases import CASES, Case
from mooring.testing.checks import check_equal, check_resumes
from mooring.testing.importances import check_importance
from mooring.testing.pulls import AWKWARD, check_pull

__all__ = ["AWKWARD", "CASES", "Case", "check_equal", "check_importance", "check_pull", "check_resumes"]
