"""Every command in one place, and what becomes of errors."""

import sys

import typer

import mooring
from mooring.cli import compare_command as compare
from mooring.cli import data_command as data
from mooring.cli import doctor_command as doctor
from mooring.cli import frontier_command as frontier
from mooring.cli import methods_command as methods
from mooring.cli import paper_command as paper
from mooring.cli import pretrain_command as pretrain
from mooring.cli import run_command as file
from mooring.cli import salvage_command as salvage
from mooring.cli import show_command as show
from mooring.cli import tune_command as tune
from mooring.errors import MooringError
from mooring.lab.engines.signals import InterruptedStudyError

__all__ = ["app", "run"]

CLICK_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)
"""Newer versions of Typer bring a Click of their own, older ones take the one installed: its errors know which."""

KINDS = {"integer": "whole number", "number": "number", "float": "number"}
"""What an option wants, by the word for it in Typer's errors."""

app = typer.Typer(
    name="mooring",
    help="Study forgetting: compare methods on a stream of tasks, tune them, show and report what came out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("compare")(compare.compare)
app.command("tune")(tune.tune)
app.command("frontier")(frontier.frontier)
app.command("run")(file.run)
app.command("show")(show.show)
app.command("report")(show.report)
app.command("salvage")(salvage.salvage)
app.command("methods")(methods.methods)
app.command("doctor")(doctor.doctor)
app.command("pretrain")(pretrain.pretrain)
app.command("paper")(paper.paper)
app.add_typer(data.app)


@app.callback(invoke_without_command=True)
def about(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """Study forgetting: compare methods on a stream of tasks, tune them, show and report what came out."""
    if version:
        typer.echo(mooring.__version__)
        raise typer.Exit


def run(arguments: list[str]) -> int:
    """Run a command and turn what it raises into an exit status."""
    try:
        status = app(arguments, prog_name="mooring", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except InterruptedStudyError as error:
        return _failed(str(error), error.status)
    except MooringError as error:
        return _failed(f"error: {error}", 2)
    except typer.Exit as stopped:
        return stopped.exit_code
    except CLICK_ERRORS as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2  # help was printed
        return _failed(f"error: {_no_number(error, arguments) or _one_line(error)}", 2)
    except (KeyboardInterrupt, EOFError, typer.Abort):
        return _failed("interrupted", 130)


def _no_number(error: Exception, arguments: list[str]) -> str | None:
    """What is told of an option that wants a number and got something else; Typer's words change with its version."""
    told = str(getattr(error, "message", ""))
    kind = next((what for word, what in KINDS.items() if f"valid {word}" in told), None)
    for name in getattr(getattr(error, "param", None), "opts", ()) if kind else ():
        for given, after in zip(arguments, [*arguments[1:], ""], strict=True):
            option, equals, value = given.partition("=")
            if option == name:
                return f"{name} {value if equals else after} is not allowed: give a {kind}"
    return None


def _one_line(error: Exception) -> str:
    told = " ".join(getattr(error, "format_message", error.__str__)().split())
    return told if told.endswith(("?", ")")) else f"{told.rstrip('.')}; see --help"


def _failed(line: str, status: int) -> int:
    print(line, file=sys.stderr)
    return status
