"""The command line: `mooring`."""

import json
import os
import sys
from dataclasses import asdict

import mooring

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
        try:
            from mooring_lab.cli.app import run
        except ModuleNotFoundError as error:
            return _run_without_typer(words, error.name)
        return run(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # such as `mooring show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run_without_typer(words: list[str], missing: str | None) -> int:
    """Run `--version` or `doctor`; for any other command say what to install."""
    from mooring_lab.cli.environment import examine

    if words == ["--version"]:
        print(mooring.__version__)
        return 0
    if words in (["doctor"], ["doctor", "--json"]):
        environment = examine()
        print(json.dumps(asdict(environment), indent=1) if "--json" in words else environment)
        return 0 if environment.torch["ready"] else 1
    print(f"error: the command line needs {missing}: pip install 'mooring[lab]'", file=sys.stderr)
    return 2
