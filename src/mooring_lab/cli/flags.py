"""Groups of options that several commands share, and the decorator that adds them to a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mooring_lab.cli.pasted_tables import check_format
from mooring_lab.methods import METHODS
from mooring_lab.study.defaults import SWEPT_METHODS

if TYPE_CHECKING:
    from mooring_lab.streams.options import StreamOptions

METHODS_HELP = (
    "Method names separated by commas, package.module:METHOD for one of your own, a group such as start, or all; "
    "`mooring methods` lists them."
)
SCHEDULE_HELP = (
    "Learning rate over a task: constant, steps (a tenth after 5/12 of the epochs, a hundredth after 10/12), cosine "
    "(from epoch to epoch), or warmup-linear (up in a tenth of the steps, then down to 0)."
)
DTYPE_HELP = "The dtype of training: float32 or float64; on a GPU also tf32 (the default there) and bf16."


def option(line: str, *names: str, **settings: Any) -> Any:
    """Return an option with a line of help. Without names it is named after its parameter; a flag needs a name."""
    if names:
        settings.setdefault("metavar", "")  # newer versions of Typer print `<bool>`, as if a flag took a value
    return typer.Option(*names, help=line, **settings)


def _complete_list(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a shell completion for names separated by commas, which completes the last one.

    Example:
        >>> _complete_list(lambda: ["ewc", "er"])("plain,e")
        ['plain,ewc', 'plain,er']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _stream_names() -> Iterable[str]:
    from mooring_lab.streams.options import stream_descriptions

    return stream_descriptions()


AsJson = Annotated[bool, option("Print JSON instead of text.", "--json")]
Format = Annotated[str, option("How to print: table, markdown, latex, csv or json.")]
Baseline = Annotated[
    str | None, option("Compare the accuracy with that of this method; plain by default, none for no comparison.")
]
Seeds = Annotated[str, option("Seeds of the runs: how many (5) or which (0,3,7 or 0-4).", metavar="NUMBERS")]
_complete_methods = _complete_list(lambda: METHODS)
Methods = Annotated[str, option(METHODS_HELP, autocompletion=_complete_methods, metavar="NAMES")]
_SWEPT_HELP = f"{METHODS_HELP} By default {len(SWEPT_METHODS.split(','))} of them."
SweptMethods = Annotated[
    str, option(_SWEPT_HELP, autocompletion=_complete_methods, show_default=False, metavar="NAMES")
]
Device = Annotated[str, option("Where to train: cpu, cuda or cuda:N.")]
EngineName = Annotated[str, option("What trains: local (one fleet after the other) or ray (several fleets at a time).")]
Address = Annotated[str | None, option("The Ray cluster; by default Ray starts on this machine.", metavar="HOST:PORT")]
Share = Annotated[float, option("With Ray, the share of a core or a GPU for one fleet; 0.5 trains two on each.")]
Deterministic = Annotated[
    bool, option("Give bit-identical results each time, on a GPU too; slower there.", "--deterministic")
]
Wait = Annotated[bool, option("Wait while another process runs this study.", "--wait")]
Quiet = Annotated[bool, option("Show no progress.", "--quiet")]


@dataclass(frozen=True)
class StreamFlags:
    """Options that choose the streams."""

    panel = "Stream"
    stream: Annotated[
        str,
        option(
            "Names separated by commas: digits, cifar100, cifar10, flowers102, caltech256, caltech101, folder; "
            "each also with -permuted or -rotated.",
            autocompletion=_complete_list(_stream_names),
            metavar="NAMES",
        ),
    ] = "digits"
    data: Annotated[str | None, option("The folder of the images.", metavar="DIR")] = None
    per_task: Annotated[int | None, option("Classes per task.")] = None
    tasks: Annotated[int | None, option("Number of tasks.")] = None
    skip: Annotated[int, option("Tasks to leave out at the start.")] = 0
    shuffle: Annotated[int | None, option("Seed that shuffles the order of the classes.")] = None
    permutation_seed: Annotated[int, option("Seed of the permutations of -permuted streams.")] = 0
    degrees: Annotated[float, option("Angles of -rotated streams are evenly spaced from 0 to below this.")] = 180.0
    limit: Annotated[int | None, option("Maximum number of images per task.")] = None
    size: Annotated[int | None, option("Height and width to resize the images to, in pixels.")] = None
    channels: Annotated[int | None, option("Channels of the images: 3 for RGB, 1 for grey.")] = None
    label: Annotated[str | None, option("Label column of Parquet files.")] = None
    skip_broken: Annotated[bool, option("Leave out images that cannot be read.", "--skip-broken")] = False
    scenario: Annotated[
        str | None,
        option(
            "Heads of the network: task (one head per task; the default if classes are divided between tasks), class "
            "(one growing head) or domain (one head for all tasks; the default of -permuted and -rotated)."
        ),
    ] = None

    def options(self) -> list[StreamOptions]:
        """Return the options of each named stream.

        Example:
            >>> [options.name for options in StreamFlags(stream="digits, digits-permuted").options()]
            ['digits', 'digits-permuted']
        """
        from mooring_lab.streams.options import StreamOptions

        shared = asdict(self)
        shared["seed"] = shared.pop("permutation_seed")
        return [StreamOptions(name.strip(), **shared) for name in shared.pop("stream").split(",")]


@dataclass(frozen=True)
class TrainingFlags:
    """Options of the training; each is by default the stream's."""

    panel = "Training"
    network: Annotated[str | None, option("The network: mlp, cnn6, resnet18-third, or package.module:function.")] = None
    epochs: Annotated[int | None, option("Epochs per task.")] = None
    batch: Annotated[int | None, option("Samples per batch.")] = None
    optimizer: Annotated[str | None, option("The optimizer, which starts again in each task: sgd or adamw.")] = None
    schedule: Annotated[str | None, option(SCHEDULE_HELP, metavar="NAME")] = None
    momentum: Annotated[float | None, option("Momentum of SGD, or first beta of AdamW; 0.9 by default.")] = None
    weight_decay: Annotated[float | None, option("Weight decay; 0 by default, also with AdamW.")] = None
    memory: Annotated[int | None, option("Samples of past tasks that some methods keep; 500 by default.")] = None
    heads: Annotated[
        str | None, option("Where the head of a new task starts: inherit (the previous task's head) or fresh (random).")
    ] = None
    buffers: Annotated[
        str | None,
        option(
            "Running statistics of normalization layers after the first task, for methods with an importance: follow "
            "(they follow the new data, the default) or frozen (layers normalize with the old ones in training too).",
            metavar="MODE",
        ),
    ] = None
    init: Annotated[str | None, option("Initial weights of the backbone, a .safetensors file.", metavar="FILE")] = None
    dtype: Annotated[str | None, option(DTYPE_HELP)] = None


@dataclass(frozen=True)
class StudyFlags:
    """Options that say where results are stored and where runs are trained."""

    panel = "Running"
    study: Annotated[Path, option("The file of the results; a stored run is not repeated.", metavar="FILE")] = Path(
        "mooring.sqlite"
    )
    device: Device = "cpu"
    fleet: Annotated[int | None, option("Maximum number of runs to train together, as one fleet.")] = None
    engine: EngineName = "local"
    address: Address = None
    share: Share = 1.0
    deterministic: Deterministic = False
    wait: Wait = False
    quiet: Quiet = False


@dataclass(frozen=True)
class OutputFlags:
    """Options of the output."""

    panel = "Output"
    baseline: Baseline = None
    report: Annotated[Path | None, option("Write an HTML page here.", metavar="DIR")] = None
    json: Annotated[bool, option("Print JSON instead of a table.", "--json")] = False
    format: Format = "table"

    def __post_init__(self) -> None:
        """Refuse a format that does not exist."""
        check_format(self.format, self.json)

    @property
    def form(self) -> str:
        """The format of the output."""
        return check_format(self.format, self.json)


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a dataclass by one option for each of its fields.

    Example:
        >>> @with_option_groups
        ... def command(count: int = 1, flags: OutputFlags = OutputFlags()) -> None:
        ...     print(count, flags.json)
        >>> command(count=2, baseline=None, report=None, json=True, format="table")
        2 True
    """
    declared = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: p.annotation for name, p in declared.items() if is_dataclass(p.annotation)}
    parameters = [p for name, p in declared.items() if name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            shown = copy(hints[field.name].__metadata__[0])
            shown.rich_help_panel = group.panel
            kind, keyword = Annotated[hints[field.name].__origin__, shown], inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, keyword, default=field.default, annotation=kind))

    @wraps(command)
    def flat(**values: Any) -> None:
        flags = {n: group(**{f.name: values.pop(f.name) for f in fields(group)}) for n, group in groups.items()}
        command(**values, **flags)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat
