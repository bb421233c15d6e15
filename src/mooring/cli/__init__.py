"""The command line: `mooring`."""

import json
import os
import sys

import mooring

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
    given = sys.argv[1:] if arguments is None else arguments
    if "" not in sys.path:
        sys.path.insert(0, "")  # a network of one's own lies where one is
    try:
        try:
            from mooring.cli.app import run
        except ModuleNotFoundError as error:
            return _without_laboratory(given, error.name)
        return run(given)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # such as `mooring show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _without_laboratory(given: list[str], missing: str | None) -> int:
    """The two commands that tell what is missing; any other says what to install."""
    from mooring.cli.environment import examine

    if given == ["--version"]:
        print(mooring.__version__)
        return 0
    if given in (["doctor"], ["doctor", "--json"]):
        found = examine()
        print(json.dumps(found.to_dict(), indent=1) if "--json" in given else found)
        return 0 if found.torch["ready"] else 1
    print(f"error: the command line needs {missing}: pip install 'mooring[lab]'", file=sys.stderr)
    return 2
