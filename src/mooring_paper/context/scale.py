"""The size of the reproduction: that of the paper, or a miniature on the embedded digits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mooring.errors import MooringError, unknown
from mooring_lab.streams.options import StreamOptions
from mooring_lab.study.defaults import LRS, STRENGTHS

REGULARIZERS = ("ewc", "mas", "si", "rwalk")
EXPLICIT = tuple(f"explicit-{name}" for name in REGULARIZERS)
REPLAY = ("a-gem", "er")
ROWS = ("plain", *REGULARIZERS, "uniform", "random", *EXPLICIT, *REPLAY)
"""The methods of the paper's main table."""

PUBLISHED_CODE = (*REGULARIZERS, *EXPLICIT, *REPLAY)
"""The methods whose definition in the authors' public code differs from the paper's equations."""

PUBLISHED_SUFFIX = "-as-published"
"""The end of the names of methods as the authors' public code defines them."""

CONTROLS = ("frozen", "frozen-after-first", "joint")
"""Baselines that the paper does not report."""


@dataclass(frozen=True)
class Regime:
    """How long a task is trained.

    Attributes:
        name: the paper's name for it.
        epochs: passes over a task.
        batch: samples in a batch.
        gpu_dtype: the dtype of matrix products on a GPU; "auto" is tf32. The target `reasons` tests the effect of bf16.
    """

    name: str
    epochs: int
    batch: int
    gpu_dtype: str = "auto"


@dataclass(frozen=True)
class Condition:
    """A column of the paper's tables.

    Attributes:
        network: the name of a backbone.
        regime: how long a task is trained.
        data: the name of a data set.
    """

    network: str
    regime: Regime
    data: str

    def __str__(self) -> str:
        return ", ".join(self.where)

    @property
    def where(self) -> tuple[str, str, str]:
        """The names of network, regime and data set, under which the paper's numbers are found."""
        return self.network, self.regime.name, self.data


@dataclass(frozen=True)
class Scale:
    """The data sets, networks, regimes and grids of a reproduction.

    Attributes:
        network: the network of the main table.
        second_network: the network of the second table.
        code_network: the network that the authors' public code has in its place; empty if there is none.
        regimes: the regimes of the main table; the second table and the figures use the first one.
        streams: options of the data sets, by name.
        stand_ins: data sets that the paper does not have, for a target of their own.
        seeds: how many seeds a cell has.
        max_seeds: up to how many seeds the runs of a claim get as long as it is not decided.
        search_tasks: how many of the first tasks the grid search uses; the others are trained and scored.
        lrs, strengths: the grids.
        missing_data: data sets of the paper that are not available or not selected.
        pretraining: the stream that backbones are pre-trained on; None if it is not available.
        levels: the backbones of `fig-backbone`: recipe and epochs of pre-training, of which fewer give less accuracy.

    Example:
        >>> [str(condition) for condition in MINIATURE.conditions()]
        ['mlp, 1-epoch, digits', 'mlp, 30-epochs, digits']
    """

    network: str
    second_network: str
    regimes: tuple[Regime, ...]
    streams: Mapping[str, StreamOptions] = field(default_factory=dict)
    seeds: int = 5
    max_seeds: int = 20
    search_tasks: int = 3
    lrs: tuple[float, ...] = LRS
    strengths: tuple[float, ...] = STRENGTHS
    missing_data: tuple[str, ...] = ()
    pretraining: StreamOptions | None = None
    levels: tuple[tuple[str, int], ...] = ()
    code_network: str = ""
    stand_ins: Mapping[str, StreamOptions] = field(default_factory=dict)

    def conditions(self) -> list[Condition]:
        """Return the columns of the main table."""
        return [Condition(self.network, regime, data) for regime in self.regimes for data in self.streams]

    def first_conditions(self) -> list[Condition]:
        """Return every data set in the first regime; the figures use these."""
        return [Condition(self.network, self.regimes[0], data) for data in self.streams]

    def second_conditions(self) -> list[Condition]:
        """Return the columns of the second network's table."""
        return [Condition(self.second_network, self.regimes[0], data) for data in self.streams]

    def with_data(self, folder: Path | None, names: tuple[str, ...] = ()) -> "Scale":
        """Return the scale with its data sets read from a folder.

        Args:
            folder: a folder with one sub-folder for each data set, and perhaps one for pre-training; None if nothing
                is read from disk.
            names: the data sets to use; all that the folder has if empty.
        """
        if wrong := [name for name in names if name not in (*self.streams, *self.stand_ins)]:
            raise unknown("data set", wrong[0], [*self.streams, *self.stand_ins])
        selected = {name: options for name, options in self.streams.items() if not names or name in names}
        stand_ins = {name: options for name, options in self.stand_ins.items() if not names or name in names}
        if not selected:
            raise MooringError(
                f"{', '.join(names)} alone is no data set of the paper: add one of {', '.join(self.streams)}"
            )
        pretraining = self.pretraining
        if folder is None:
            if any(options.name != "digits" for options in selected.values()):
                raise MooringError("the paper's data sets are read from a folder: give --data, or --miniature")
        else:
            absent = [name for name in (*selected, *(stand_ins if names else ())) if not (folder / name).is_dir()]
            if len(absent) == len(selected) or (names and absent):
                raise MooringError(
                    f"{folder} has no folder {', '.join(absent)}: put each data set into a folder of its name"
                )
            selected, stand_ins = (
                {n: replace(o, data=str(folder / n)) for n, o in sets.items() if (folder / n).is_dir()}
                for sets in (selected, stand_ins)
            )
            if pretraining is not None:
                own = folder / pretraining.name
                pretraining = replace(pretraining, data=str(own)) if own.is_dir() else None
        missing = tuple(name for name in self.streams if name not in selected)
        return replace(self, streams=selected, stand_ins=stand_ins, missing_data=missing, pretraining=pretraining)

    def with_seeds(self, seeds: int | None, max_seeds: int | None = None) -> "Scale":
        """Return the scale with other numbers of seeds; None keeps a number.

        Example:
            >>> scale = PAPER.with_seeds(30)
            >>> scale.seeds, scale.max_seeds
            (30, 30)
        """
        seeds = self.seeds if seeds is None else seeds
        if max_seeds is not None and max_seeds < seeds:
            raise MooringError(f"--max-seeds {max_seeds} is less than the {seeds} seeds of every cell: give more")
        most = max(seeds, self.max_seeds) if max_seeds is None else max_seeds
        return replace(self, seeds=seeds, max_seeds=most)


PAPER = Scale(
    network="cnn6",
    second_network="resnet18-third",
    code_network="resnet18-quarter",
    regimes=(Regime("1-epoch", 1, 10, gpu_dtype="bf16"), Regime("30-epochs", 30, 256, gpu_dtype="bf16")),
    streams={name: StreamOptions(name) for name in ("cifar100", "flowers102", "caltech256")},
    stand_ins={"caltech101": StreamOptions("caltech101")},
    pretraining=StreamOptions("cifar10"),
    levels=(
        *(("paper", epochs) for epochs in (1, 2, 5, 12, 60)),
        *(("strong", epochs) for epochs in (5, 12, 30)),
    ),
)
"""The scale of the paper."""

MINIATURE = Scale(
    network="mlp",
    second_network="mlp",
    regimes=(Regime("1-epoch", 1, 10), Regime("30-epochs", 3, 20)),
    streams={"digits": StreamOptions("digits", limit=60)},
    seeds=2,
    max_seeds=3,
    search_tasks=2,
    lrs=(0.03, 0.01),
    strengths=(0.01, 1.0, 1e4),
    pretraining=StreamOptions("digits", limit=20),
    levels=(("paper", 1), ("paper", 60)),
)
"""A small scale on the embedded digits that takes seconds: it tests that every target works."""
