"""The command line: `mooring`."""

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command; an error a user can do something about is one line on stderr.

    Args:
        arguments: instead of those the process was started with.

    Returns:
        0; 2 for bad input, 130 when interrupted.

    Example:
        >>> main(["compare", "--stream", "digit"])
        2
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # a network of one's own lies where one is
    try:
        from mooring.cli.app import run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        print(f"error: the command line needs {error.name}: pip install 'mooring[lab]'", file=sys.stderr)
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)
