"""The public path of `mooring.diagnose.drift`: both names give the same module."""

import sys

from mooring.diagnose import drift
from mooring.diagnose.drift import *  # noqa: F403 (for type checkers)

sys.modules[__name__] = drift
