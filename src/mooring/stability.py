"""The public path of `mooring.diagnose.stability`: both names give the same module."""

import sys

from mooring.diagnose import stability
from mooring.diagnose.stability import *  # noqa: F403 (for type checkers)

sys.modules[__name__] = stability
