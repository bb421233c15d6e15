"""The command table, which lists commands without importing them, and the exit status of errors."""

import re
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

import mooring
from mooring.errors import MooringError, unknown
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

NUMBER_KINDS = {"integer": "whole number", "number": "number", "float": "number"}
"""Our name for each kind of number that Typer's errors mention."""


class LazyGroup(TyperGroup):
    """A command group that imports a command when it is run or completed, and not when it is listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the listed command by the imported one."""
        name, command, arguments = super().resolve_command(ctx, args)
        return name, command and _load(str(name)), arguments

    def get_params(self, ctx: Any) -> Any:
        """Return the options of `mooring` itself."""
        return _without_flag_types(super().get_params(ctx))


app = typer.Typer(name="mooring", cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def about(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
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
        return _fail(f"error: {_number_error(error, arguments) or _name_error(error) or _one_line(error)}", 2)
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
    for with_options in (loaded, *getattr(loaded, "commands", {}).values()):
        _without_flag_types(with_options.get_params(typer.Context(with_options)))
    return loaded


def _without_flag_types(parameters: list[Any]) -> list[Any]:
    """Let the help show no type beside a flag: newer versions of Typer print `<bool>`, as if it took a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def _number_error(error: Exception, arguments: list[str]) -> str | None:
    """Return our message for an option that takes a number and got something else; Typer's differs by version."""
    message = str(getattr(error, "message", ""))
    kind = next((kind for word, kind in NUMBER_KINDS.items() if f"valid {word}" in message), None)
    for name in getattr(getattr(error, "param", None), "opts", ()) if kind else ():
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
            option, equals, value = argument.partition("=")
            if option == name:
                return f"{name} {value if equals else following} is not allowed: give a {kind}"
    return None


def _name_error(error: Exception) -> str | None:
    """Return our message for an unknown command or option, or a surplus argument; Typer's differs by version."""
    message, context = str(getattr(error, "message", "")), getattr(error, "ctx", None)
    if context is None:
        return None
    path, parameters = context.command_path, context.command.params
    if type(error).__name__ == "NoSuchOption":
        given = getattr(error, "option_name", "")
        options = [name for parameter in parameters for name in parameter.opts if name.startswith("-")]
        return str(unknown("option", given, options, f"`{path} --help` lists the options"))
    if match := re.search(r"No such command '(.*?)'", message):
        return str(unknown("command", match[1], context.command.commands))
    if match := re.search(r"unexpected extra argument(?:\(s\)|s)? \((.*)\)", message):
        takes = [
            parameter.metavar or parameter.name for parameter in parameters if not parameter.opts[0].startswith("-")
        ]
        allowed = f"takes {' and '.join(takes)}, and options" if takes else "takes options only, such as --NAME VALUE"
        return f"unexpected argument {match[1]!r}: `{path}` {allowed}; `{path} --help` lists them"
    return None


def _one_line(error: Exception) -> str:
    line = " ".join(getattr(error, "format_message", error.__str__)().split())
    return line if line.endswith(("?", ")")) else f"{line.rstrip('.')}; see --help"


def _fail(line: str, status: int) -> int:
    print(line, file=sys.stderr)
    return status
