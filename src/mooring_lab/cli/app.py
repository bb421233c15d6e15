"""The command table, which lists commands without importing them, and the exit status of errors."""

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

import mooring
from mooring.errors import MooringError
from mooring_lab.engines.signals import InterruptedStudyError

COMMANDS = {
    "compare": (
        "compare_command",
        "Train every method with every seed on a stream, and show accuracy and forgetting.",
    ),
    "tune": (
        "compare_command",
        "Search learning rate and strength on the first tasks, then train every method on the other tasks.",
    ),
    "frontier": (
        "frontier_command",
        "Train every method at several strengths, and plot what it learned against what it kept.",
    ),
    "run": ("run_command", "Run the study that a TOML file describes; finished runs are not repeated."),
    "show": ("show_command", "Print the results of a study as tables, one for each stream."),
    "report": (
        "show_command",
        "Write the results of a study as one self-contained HTML page with figures.",
    ),
    "methods": (
        "methods_command",
        "List the methods in groups, with a short description and their default strengths.",
    ),
    "doctor": (
        "doctor_command",
        "Show versions, devices, extras and data sets, and how to get what is missing.",
    ),
    "pretrain": (
        "pretrain_command",
        "Train backbones on all classes of a stream, for `mooring compare --init`.",
    ),
    "paper": (
        "mooring_paper.paper_command",
        "Reproduce the paper: train what has no result yet, and compare with its numbers.",
    ),
    "data": (
        "data_command",
        "List the named image sets, download one, check your own folder, or clear the cache.",
    ),
}
"""Module and help of each command. The help is here, so that `mooring --help` imports no command.

Command modules import the laboratory inside their functions, so that help and shell completion do not import torch.
"""

CLICK_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)
"""The base class of usage errors: newer versions of Typer bundle Click, older ones import it."""


class LazyGroup(TyperGroup):
    """A command group that imports a command when it is run or completed, and not when it is listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the listed command by the imported one."""
        name, command, arguments = super().resolve_command(ctx, args)
        return name, command and _load(str(name)), arguments


app = typer.Typer(name="mooring", cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def about(version: bool = typer.Option(False, "--version", metavar="", help="Print the version and exit.")) -> None:
    """Study forgetting: compare methods on a stream (a sequence of tasks), tune them, and report the results."""
    if version:
        typer.echo(mooring.__version__)
        raise typer.Exit


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)  # replaced in LazyGroup.resolve_command


def run(arguments: list[str]) -> int:
    """Run a command, print its error as one line on stderr, and return the exit status."""
    try:
        status = app(arguments, prog_name="mooring", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except InterruptedStudyError as error:
        return _fail(str(error), error.status)
    except MooringError as error:
        return _fail(f"error: {error}", 2)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library.startswith("mooring"):
            raise
        return _fail(f"error: this command needs {library}: pip install 'mooring[lab]'", 2)
    except typer.Exit as stopped:
        return stopped.exit_code
    except CLICK_ERRORS as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2  # the help is printed already
        line = " ".join(getattr(error, "format_message", error.__str__)().split())
        return _fail(f"error: {line.rstrip('.')} (see --help)", 2)
    except (KeyboardInterrupt, EOFError, typer.Abort):
        return _fail("interrupted", 130)


def _load(name: str) -> Any:
    """Import a command and return it as a Click command."""
    module, line = COMMANDS[name]
    command = getattr(import_module(module if "." in module else f"mooring_lab.cli.{module}"), name)
    if not isinstance(command, typer.Typer):
        function, command = command, typer.Typer(add_completion=False)
        command.command(name)(function)
    loaded = typer.main.get_command(command)
    loaded.help = line
    return loaded


def _fail(line: str, status: int) -> int:
    print(line, file=sys.stderr)
    return status
