"""The options that several commands share, in groups, and how a command asks for a group."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mooring.lab.methods import registry
from mooring.lab.streams.options import StreamOptions, stream_descriptions
from mooring.lab.study.comparison import METHODS

__all__ = ["METHODS", "OutputFlags", "StreamFlags", "StudyFlags", "TrainingFlags", "spread"]


def _option(name: str, line: str, panel: str, **rest: Any) -> Any:
    return typer.Option(name, help=line, rich_help_panel=panel, **rest)


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """For a shell that completes a list with commas: what the last name in it may become.

    Example:
        >>> one_of(lambda: ["ewc", "er"])("plain,e")
        ['plain,ewc', 'plain,er']
    """

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return completed


@dataclass(frozen=True)
class StreamFlags:
    """Which streams."""

    stream: Annotated[
        str,
        _option(
            "--stream",
            "With commas: digits, cifar100, cifar10, flowers102, caltech256, folder; each also with -permuted or "
            "-rotated.",
            "Stream",
            autocompletion=one_of(stream_descriptions),
        ),
    ] = "digits"
    data: Annotated[str | None, _option("--data", "The folder of images.", "Stream", metavar="DIR")] = None
    per_task: Annotated[int | None, _option("--per-task", "Classes in a task.", "Stream")] = None
    tasks: Annotated[int | None, _option("--tasks", "How many tasks.", "Stream")] = None
    skip: Annotated[int, _option("--skip", "Leave out that many tasks at the start.", "Stream")] = 0
    shuffle: Annotated[int | None, _option("--shuffle", "Seed for the order of classes.", "Stream")] = None
    permutation_seed: Annotated[int, _option("--permutation-seed", "Of permuted streams.", "Stream")] = 0
    degrees: Annotated[float, _option("--degrees", "Range of rotated streams.", "Stream")] = 180.0
    limit: Annotated[int | None, _option("--limit", "At most that many images in a task.", "Stream")] = None
    size: Annotated[int | None, _option("--size", "Height and width of images.", "Stream")] = None
    channels: Annotated[int | None, _option("--channels", "3 for RGB, 1 for grey.", "Stream")] = None
    label: Annotated[str | None, _option("--label", "Label column of Parquet files.", "Stream")] = None
    skip_broken: Annotated[bool, _option("--skip-broken", "Leave out images that cannot be read.", "Stream")] = False

    def options(self) -> list[StreamOptions]:
        """The options of each stream named.

        Example:
            >>> [options.name for options in StreamFlags(stream="digits, digits-permuted").options()]
            ['digits', 'digits-permuted']
        """
        rest = asdict(self)
        rest["seed"] = rest.pop("permutation_seed")
        return [StreamOptions(name.strip(), **rest) for name in rest.pop("stream").split(",")]


@dataclass(frozen=True)
class TrainingFlags:
    """How runs are trained; what is not given is the stream's default."""

    network: Annotated[
        str | None, _option("--network", "mlp, cnn6, resnet18-third, or package.module:function.", "Training")
    ] = None
    epochs: Annotated[int | None, _option("--epochs", "Passes over each task.", "Training")] = None
    batch: Annotated[int | None, _option("--batch", "Samples in a batch.", "Training")] = None
    momentum: Annotated[float | None, _option("--momentum", "Of SGD; 0.9.", "Training")] = None
    weight_decay: Annotated[float | None, _option("--weight-decay", "Of SGD; 0.", "Training")] = None
    memory: Annotated[int | None, _option("--memory", "Samples that replay methods keep; 500.", "Training")] = None
    heads: Annotated[
        str | None, _option("--heads", "A task's head starts by inherit (from the last) or fresh.", "Training")
    ] = None
    init: Annotated[
        str | None, _option("--init", "Weights of the backbone, safetensors.", "Training", metavar="FILE")
    ] = None
    dtype: Annotated[
        str | None,
        _option("--dtype", "float32 or float64; on a GPU also tf32 (the default there) and bf16.", "Training"),
    ] = None


@dataclass(frozen=True)
class StudyFlags:
    """Where results are kept, and where runs are trained."""

    study: Annotated[
        Path, _option("--study", "Where results are kept; asking again costs nothing.", "Running", metavar="FILE")
    ] = Path("mooring.sqlite")
    device: Annotated[str, _option("--device", "cpu, cuda or cuda:N.", "Running")] = "cpu"
    fleet: Annotated[int | None, _option("--fleet", "The most runs at once.", "Running")] = None
    engine: Annotated[str, _option("--engine", "local, or ray: many fleets at once.", "Running")] = "local"
    address: Annotated[
        str | None, _option("--address", "Of a Ray cluster; else one on this machine.", "Running", metavar="HOST:PORT")
    ] = None
    share: Annotated[
        float,
        _option("--share", "Of a core or a GPU that a fleet takes, with Ray; 0.5: two fleets share one.", "Running"),
    ] = 1.0
    deterministic: Annotated[
        bool, _option("--deterministic", "The same bits each time, on a GPU too; slower there.", "Running")
    ] = False
    wait: Annotated[bool, _option("--wait", "Wait while another process runs this study.", "Running")] = False
    quiet: Annotated[bool, _option("--quiet", "No progress.", "Running")] = False


@dataclass(frozen=True)
class OutputFlags:
    """What becomes of the results."""

    baseline: Annotated[str | None, _option("--baseline", "Compare accuracy with this method.", "Output")] = None
    report: Annotated[Path | None, _option("--report", "Write the page here.", "Output", metavar="DIR")] = None
    json: Annotated[bool, _option("--json", "Print JSON instead of a table.", "Output")] = False


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        help="Names with commas, or all; `mooring methods` lists them.",
        autocompletion=one_of(lambda: registry.METHODS),
    ),
]
Seeds = Annotated[str, typer.Option("--seeds", help="How many, or which: 5, or 0,3,7, or 0-4.")]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command ask for groups of options: a parameter that is a dataclass becomes an option for each field.

    Example:
        >>> @spread
        ... def command(count: int = 1, flags: OutputFlags = OutputFlags()) -> None:
        ...     print(count, flags.json)
        >>> command(count=2, baseline=None, report=None, json=True)
        2 True
    """
    own = inspect.signature(command).parameters
    groups = {name: each.annotation for name, each in own.items() if is_dataclass(each.annotation)}
    parameters = [each for name, each in own.items() if name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for each in fields(group):
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(each.name, kind, default=each.default, annotation=hints[each.name]))

    @wraps(command)
    def flat(**given: Any) -> None:
        made = {}
        for name, group in groups.items():
            made[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})  # type: ignore[operator]
        command(**given, **made)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat
