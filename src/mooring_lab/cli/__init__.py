"""The command line: `mooring`."""

import os
import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command. An error that the user can correct is one line on stderr.

    Args:
        arguments: the words after `mooring`; by default those of this process.

    Returns:
        The exit status: 0, 1 if no run finished, 2 for bad input, 130 when interrupted.

    Example:
        >>> main(["compare", "--stream", "digit"])
        2
    """
    words = sys.argv[1:] if arguments is None else arguments
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that --network finds a module in the current folder
    try:
        from mooring_lab.cli.app import run

        return run(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # such as `mooring show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
