"""The command `mooring`, run in a child process."""

import math
import sys

from mooring_lab.cli import main
from mooring_lab.engines import runner


def command(*arguments: str) -> int:
    """`mooring ARGUMENTS`; writes every checkpoint, however slow the disk is."""
    runner.ALLOWED_SAVE_SECONDS = math.inf
    sys.argv = ["mooring", *arguments]
    return main()
