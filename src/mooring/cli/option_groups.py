"""Groups of options that several commands share, and the decorator that adds them to a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mooring.lab.methods import registry

if TYPE_CHECKING:
    from mooring.lab.streams.options import StreamOptions

__all__ = ["AsJson", "Methods", "OutputFlags", "Seeds", "StreamFlags", "StudyFlags", "TrainingFlags", "complete_list"]

METHODS_HELP = "Method names separated by commas, or all; `mooring methods` lists them."
BASELINE_HELP = "Compare the accuracy with that of this method."
DEVICE_HELP = "cpu, cuda or cuda:N."
DTYPE_HELP = "float32 or float64; on a GPU also tf32 (the default there) and bf16."
DETERMINISTIC_HELP = "Give bit-identical results each time, on a GPU too; slower there."
ENGINE_HELP = "local, or ray to train many fleets at once."
ADDRESS_HELP = "The Ray cluster; by default Ray starts on this machine."
SHARE_HELP = "With Ray, the share of a core or a GPU for one fleet; 0.5 trains two on each."
WAIT_HELP = "Wait while another process runs this study."
QUIET_HELP = "Show no progress."


def _option(name: str, line: str, panel: str, **settings: Any) -> Any:
    return typer.Option(name, help=line, rich_help_panel=panel, **settings)


def complete_list(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a shell completion for names separated by commas, which completes the last one.

    Example:
        >>> complete_list(lambda: ["ewc", "er"])("plain,e")
        ['plain,ewc', 'plain,er']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _stream_names() -> Iterable[str]:
    from mooring.lab.streams.options import stream_descriptions

    return stream_descriptions()


@dataclass(frozen=True)
class StreamFlags:
    """Options that choose the streams."""

    stream: Annotated[
        str,
        _option(
            "--stream",
            "Names separated by commas: digits, cifar100, cifar10, flowers102, caltech256, folder; each also with "
            "-permuted or -rotated.",
            "Stream",
            autocompletion=complete_list(_stream_names),
        ),
    ] = "digits"
    data: Annotated[str | None, _option("--data", "The folder of the images.", "Stream", metavar="DIR")] = None
    per_task: Annotated[int | None, _option("--per-task", "Classes per task.", "Stream")] = None
    tasks: Annotated[int | None, _option("--tasks", "Number of tasks.", "Stream")] = None
    skip: Annotated[int, _option("--skip", "Tasks to leave out at the start.", "Stream")] = 0
    shuffle: Annotated[int | None, _option("--shuffle", "Seed that shuffles the order of classes.", "Stream")] = None
    permutation_seed: Annotated[int, _option("--permutation-seed", "Seed of permuted streams.", "Stream")] = 0
    degrees: Annotated[float, _option("--degrees", "Range of angles of rotated streams.", "Stream")] = 180.0
    limit: Annotated[int | None, _option("--limit", "Maximum number of images per task.", "Stream")] = None
    size: Annotated[int | None, _option("--size", "Height and width of the images.", "Stream")] = None
    channels: Annotated[int | None, _option("--channels", "3 for RGB, 1 for grey.", "Stream")] = None
    label: Annotated[str | None, _option("--label", "Label column of Parquet files.", "Stream")] = None
    skip_broken: Annotated[bool, _option("--skip-broken", "Leave out images that cannot be read.", "Stream")] = False

    def options(self) -> list[StreamOptions]:
        """Return the options of each named stream.

        Example:
            >>> [options.name for options in StreamFlags(stream="digits, digits-permuted").options()]
            ['digits', 'digits-permuted']
        """
        from mooring.lab.streams.options import StreamOptions

        shared = asdict(self)
        shared["seed"] = shared.pop("permutation_seed")
        return [StreamOptions(name.strip(), **shared) for name in shared.pop("stream").split(",")]


@dataclass(frozen=True)
class TrainingFlags:
    """Options of the training; each is by default the stream's."""

    network: Annotated[
        str | None, _option("--network", "mlp, cnn6, resnet18-third, or package.module:function.", "Training")
    ] = None
    epochs: Annotated[int | None, _option("--epochs", "Epochs per task.", "Training")] = None
    batch: Annotated[int | None, _option("--batch", "Samples per batch.", "Training")] = None
    momentum: Annotated[float | None, _option("--momentum", "Momentum of SGD; 0.9 by default.", "Training")] = None
    weight_decay: Annotated[
        float | None, _option("--weight-decay", "Weight decay of SGD; 0 by default.", "Training")
    ] = None
    memory: Annotated[
        int | None, _option("--memory", "Samples that replay methods keep; 500 by default.", "Training")
    ] = None
    heads: Annotated[
        str | None,
        _option("--heads", "A new task's head: inherit starts from the previous task's, fresh at random.", "Training"),
    ] = None
    init: Annotated[
        str | None, _option("--init", "Initial weights of the backbone, safetensors.", "Training", metavar="FILE")
    ] = None
    dtype: Annotated[str | None, _option("--dtype", DTYPE_HELP, "Training")] = None


@dataclass(frozen=True)
class StudyFlags:
    """Options that say where results are stored and where runs are trained."""

    study: Annotated[
        Path, _option("--study", "The file of the results; a stored run is not repeated.", "Running", metavar="FILE")
    ] = Path("mooring.sqlite")
    device: Annotated[str, _option("--device", DEVICE_HELP, "Running")] = "cpu"
    fleet: Annotated[int | None, _option("--fleet", "Maximum number of runs to train together.", "Running")] = None
    engine: Annotated[str, _option("--engine", ENGINE_HELP, "Running")] = "local"
    address: Annotated[str | None, _option("--address", ADDRESS_HELP, "Running", metavar="HOST:PORT")] = None
    share: Annotated[float, _option("--share", SHARE_HELP, "Running")] = 1.0
    deterministic: Annotated[bool, _option("--deterministic", DETERMINISTIC_HELP, "Running")] = False
    wait: Annotated[bool, _option("--wait", WAIT_HELP, "Running")] = False
    quiet: Annotated[bool, _option("--quiet", QUIET_HELP, "Running")] = False


@dataclass(frozen=True)
class OutputFlags:
    """Options of the output."""

    baseline: Annotated[str | None, _option("--baseline", BASELINE_HELP, "Output")] = None
    report: Annotated[Path | None, _option("--report", "Write an HTML page here.", "Output", metavar="DIR")] = None
    json: Annotated[bool, _option("--json", "Print JSON instead of a table.", "Output")] = False


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Methods = Annotated[
    str,
    typer.Option("--methods", help=METHODS_HELP, autocompletion=complete_list(lambda: registry.METHODS)),
]
Seeds = Annotated[str, typer.Option("--seeds", help="How many (5) or which (0,3,7 or 0-4).")]


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a dataclass by one option for each of its fields.

    Example:
        >>> @with_option_groups
        ... def command(count: int = 1, flags: OutputFlags = OutputFlags()) -> None:
        ...     print(count, flags.json)
        >>> command(count=2, baseline=None, report=None, json=True)
        2 True
    """
    declared = inspect.signature(command, eval_str=True).parameters
    groups = {name: p.annotation for name, p in declared.items() if is_dataclass(p.annotation)}
    parameters = [p for name, p in declared.items() if name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name]))

    @wraps(command)
    def flat(**values: Any) -> None:
        flags = {}
        for name, group in groups.items():
            flags[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})  # type: ignore[operator]
        command(**values, **flags)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat
