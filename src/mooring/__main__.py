"""`python -m mooring`: the command line."""

import sys

from mooring.cli import main

if __name__ == "__main__":
    sys.exit(main())
