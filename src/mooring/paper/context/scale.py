"""How large the reproduction is: as the paper, or in miniature on the embedded digits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mooring.errors import MooringError, unknown
from mooring.lab.streams.options import StreamOptions
from mooring.lab.study.protocol import LRS, STRENGTHS

__all__ = ["CONTROLS", "EXPLICIT", "MINIATURE", "PAPER", "REGULARIZERS", "REPLAY", "ROWS", "Case", "Regime", "Scale"]

REGULARIZERS = ("ewc", "mas", "si", "rwalk")
EXPLICIT = tuple(f"explicit-{name}" for name in REGULARIZERS)
REPLAY = ("a-gem", "er")
ROWS = ("plain", *REGULARIZERS, "uniform", "random", *EXPLICIT, *REPLAY)
"""The rows of the paper's table."""

CONTROLS = ("frozen", "frozen-after-first", "joint")
"""What the paper lacks, and every comparison should carry."""


@dataclass(frozen=True)
class Regime:
    """How long a task is trained.

    Attributes:
        name: what the paper calls it.
        epochs: passes over a task.
        batch: samples in a batch.
        on_gpu: the dtype of products on a GPU; "auto" is tf32. What bf16 changes in the first regime, `reasons` tests.
    """

    name: str
    epochs: int
    batch: int
    on_gpu: str = "auto"


@dataclass(frozen=True)
class Case:
    """A column of a table.

    Attributes:
        network: a backbone by name.
        regime: how long a task is trained.
        data: a data set by name.
    """

    network: str
    regime: Regime
    data: str

    def __str__(self) -> str:
        return f"{self.network}, {self.regime.name}, {self.data}"


@dataclass(frozen=True)
class Scale:
    """Which data sets, networks and grids there are.

    Attributes:
        network: of the main table.
        other: of the second table.
        regimes: of the main table; the second, and every figure, has the first of them.
        only: the regimes of the main table that are wanted, by name; all of them if empty.
        streams: options of each data set, by name.
        seeds: of every cell.
        search_tasks: the first tasks, on which settings are searched; the rest is trained and scored.
        lrs, strengths: the grids.
        absent: the data sets of the paper that are not there, or not asked for.

    Example:
        >>> [str(case) for case in MINIATURE.cases()]
        ['mlp, 1-epoch, digits', 'mlp, 30-epochs, digits']
    """

    network: str
    other: str
    regimes: tuple[Regime, ...]
    streams: Mapping[str, StreamOptions] = field(default_factory=dict)
    seeds: int = 5
    search_tasks: int = 3
    lrs: tuple[float, ...] = LRS
    strengths: tuple[float, ...] = STRENGTHS
    absent: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def cases(self) -> list[Case]:
        """Those of the main table."""
        wanted = [regime for regime in self.regimes if not self.only or regime.name in self.only]
        return [Case(self.network, regime, data) for regime in wanted for data in self.streams]

    def other_cases(self) -> list[Case]:
        """Those of the second table."""
        return [Case(self.other, self.regimes[0], data) for data in self.streams]

    def on(self, folder: Path | None, data: tuple[str, ...] = ()) -> "Scale":
        """With data sets from a folder that has one for each name, and some of them only.

        Args:
            folder: holds `cifar100/` and its kin; None where nothing is read from disk.
            data: the names of those that are wanted; all that are there if empty.
        """
        for name in data:
            if name not in self.streams:
                raise unknown("data set", name, self.streams)
        chosen = {name: told for name, told in self.streams.items() if not data or name in data}
        if folder is None:
            if any(told.name != "digits" for told in chosen.values()):
                raise MooringError("the paper's data sets are read from a folder: give --data, or --miniature")
            return self._with(chosen)
        there = {name: told for name, told in chosen.items() if (folder / name).is_dir()}
        if not there or (data and len(there) < len(data)):
            missing = ", ".join(name for name in chosen if name not in there)
            raise MooringError(f"{folder} has no folder {missing}: put each data set into a folder of its name")
        return self._with({n: replace(told, data=str(folder / n)) for n, told in there.items()})

    def through(self, regimes: tuple[str, ...]) -> "Scale":
        """With some of the regimes only in the main table, by name; with all of them if there are none.

        Example:
            >>> [str(case) for case in MINIATURE.through(("30-epochs",)).cases()]
            ['mlp, 30-epochs, digits']
        """
        known = [regime.name for regime in self.regimes]
        for name in regimes:
            if name not in known:
                raise unknown("regime", name, known)
        return replace(self, only=regimes)

    def _with(self, streams: Mapping[str, StreamOptions]) -> "Scale":
        return replace(self, streams=streams, absent=tuple(name for name in self.streams if name not in streams))


PAPER = Scale(
    network="cnn6",
    other="resnet18-third",
    regimes=(Regime("1-epoch", 1, 10, on_gpu="bf16"), Regime("30-epochs", 30, 256, on_gpu="bf16")),
    streams={name: StreamOptions(name) for name in ("cifar100", "flowers102", "caltech256")},
)
"""As in the paper."""

MINIATURE = Scale(
    network="mlp",
    other="mlp",
    regimes=(Regime("1-epoch", 1, 10), Regime("30-epochs", 3, 20)),
    streams={"digits": StreamOptions("digits", limit=60)},
    seeds=2,
    search_tasks=2,
    lrs=(0.03, 0.01),
    strengths=(0.01, 1.0, 1e4),
)
"""The same on the embedded digits, in seconds: to see that everything works."""
