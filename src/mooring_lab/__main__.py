"""`python -m mooring_lab`: the command line."""

import sys

from mooring_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
