"""The files of a reproduction, read without the library: runs, findings and the paper's numbers."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

PUBLISHED = Path(__file__).parents[2] / "src" / "mooring_paper" / "published" / "published.json"
PAPER_NAMES = {"uniform": "vanilla"}
"""The paper's name of a method, where it differs."""

IMPORTANCES = ("ewc", "mas", "si", "rwalk")
EXPLICIT = tuple(f"explicit-{name}" for name in IMPORTANCES)
REPLAY = ("a-gem", "er")


class Setting(NamedTuple):
    """Learning rate, and strength if a method has one."""

    lr: float
    strength: float | None


class Condition(NamedTuple):
    """A column of the paper's tables."""

    network: str
    regime: str
    data: str

    def __str__(self) -> str:
        return ", ".join(self)


@dataclass(frozen=True)
class RunRecord:
    """A row of `runs.json` with what its stream has.

    Attributes:
        row: the row, with the usual values filled in.
        condition: network, regime and data set.
        part: the part of the stream: "searched", "trained", "entire" or "trained, shuffled".
        train, test: training and test images of each task.
    """

    row: dict[str, Any]
    condition: Condition
    part: str
    train: list[int]
    test: list[int]

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.row["method"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.row["seed"])

    @property
    def has_fresh_heads(self) -> bool:
        """Whether the head of every task is a new one."""
        return bool(self.row["heads"] == "fresh")

    @property
    def setting(self) -> Setting:
        """Learning rate and strength."""
        return Setting(self.row["lr"], self.row.get("strength"))

    @property
    def status(self) -> str:
        """How the run ended."""
        return str(self.row["status"])

    @property
    def finished(self) -> bool:
        """Whether the run was trained to the end."""
        return self.status == "finished"

    @cached_property
    def matrix(self) -> list[list[Fraction]]:
        """Accuracies in percent: row i after task i, on tasks 0 to i."""
        counts = self.row.get("correct", [])
        return [[Fraction(100 * n, size) for n, size in zip(row, self.test, strict=False)] for row in counts]

    @cached_property
    def accuracy(self) -> Fraction:
        """The mean of the last row."""
        return sum(self.matrix[-1], Fraction()) / len(self.matrix[-1])

    @cached_property
    def forgetting(self) -> Fraction:
        """The mean over tasks of the best accuracy ever minus the last."""
        last = self.matrix[-1]
        best = [max(row[task] for row in self.matrix[task:]) for task in range(len(last))]
        return sum((b - a for a, b in zip(last, best, strict=True)), Fraction()) / len(last)

    @cached_property
    def learned(self) -> Fraction:
        """The mean accuracy on a task directly after it."""
        return sum((row[-1] for row in self.matrix), Fraction()) / len(self.matrix)

    def layer_values(self, name: str) -> list[float | None]:
        """Return a number of each layer, from input to output."""
        return list(self.row.get(name, [])) if self.finished else []

    @property
    def early_cka(self) -> float | None:
        """The mean CKA of the first half of the layers, with the middle one."""
        values = self.layer_values("cka")
        return _mean(values[: math.ceil(len(values) / 2)])

    @property
    def deep_cka(self) -> float | None:
        """The mean CKA of the other half; of all layers if there is only one."""
        values = self.layer_values("cka")
        return _mean(values[math.ceil(len(values) / 2) :] or values)

    def metric(self, name: str) -> Fraction | float | None:
        """Return a metric by name; None if the run did not finish."""
        value: Fraction | float | None = getattr(self, name) if self.finished else None
        return value


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if values and len(known) == len(values) else None


class Reproduction:
    """The folder of a reproduction.

    Attributes:
        scale: the header of `runs.json` that describes networks, regimes and grids.
        findings: the entry of each target in `findings.json`.
    """

    def __init__(self, folder: Path) -> None:
        content = json.loads((folder / "runs.json").read_text("utf-8"))
        self.scale: dict[str, Any] = content["scale"]
        self.findings = {entry["target"]: entry for entry in json.loads((folder / "findings.json").read_text("utf-8"))}
        self._published = json.loads(PUBLISHED.read_text("utf-8"))
        self._stability: list[str] = content["stability"]
        self._regimes = {(r["epochs"], r["batch"]): name for name, r in reversed(self.scale["regimes"].items())}
        records = (self._record({**content["usual"], **row}, content["streams"]) for row in content["runs"])
        self._records = {record.row["key"]: record for record in records}

    def _record(self, row: dict[str, Any], streams: dict[str, Any]) -> RunRecord:
        data, _, part = row["stream"].partition(", ")
        regime = self._regimes.get((row["epochs"], row["batch"]), "")  # other regimes are tested as reasons
        stream = streams[row["stream"]]
        return RunRecord(row, Condition(row["network"], regime, data), part, stream["train"], stream["test"])

    def runs_of(self, target: str) -> list[RunRecord]:
        """Return the runs that a target names."""
        return [self._records[key] for key in dict.fromkeys(self.findings[target]["runs"])]

    def stability_of(self, run: RunRecord) -> list[dict[str, Any]]:
        """Return the stability after each task."""
        return [dict(zip(self._stability, entry, strict=True)) for entry in run.row.get("stability", [])]

    @property
    def main_conditions(self) -> list[Condition]:
        """The columns of the main table."""
        network, regimes, streams = (self.scale[name] for name in ("network", "regimes", "streams"))
        return [Condition(network, regime, data) for regime in regimes for data in streams]

    @property
    def stand_in_conditions(self) -> list[Condition]:
        """The columns of the data sets that the paper does not have."""
        network, regimes = self.scale["network"], self.scale["regimes"]
        return [Condition(network, regime, data) for regime in regimes for data in self.scale["stand_ins"]]

    @property
    def second_conditions(self) -> list[Condition]:
        """The columns of the second network's table, in the first regime."""
        return [Condition(self.scale["second_network"], self.first_regime, data) for data in self.scale["streams"]]

    @property
    def first_regime(self) -> str:
        """The name of the first regime."""
        return str(next(iter(self.scale["regimes"])))

    def published_cell(self, condition: Condition, method: str) -> dict[str, float]:
        """Return the paper's means and standard deviations; empty if it has none."""
        cell: dict[str, float] = self._look_up(*condition, PAPER_NAMES.get(method, method)) or {}
        return cell

    def published_setting(self, condition: Condition, method: str) -> Setting | None:
        """Return the paper's setting of a method; its second network has one regime, which it does not name."""
        name, where = PAPER_NAMES.get(method, method), ("hyperparameters", condition.network)
        found = self._look_up(*where, condition.regime, condition.data, name) or self._look_up(
            *where, condition.data, name
        )
        return None if found is None else Setting(found["lr"], found["lambda"])

    def plain_settings(self, condition: Condition) -> list[Setting]:
        """Return what plain fine-tuning may have in place of a setting of the paper, the first of which has runs.

        With the second network that is the largest rate of the grid below EWC's, then the explicit step's rate.
        """
        ewc, explicit = (self.published_setting(condition, method) for method in ("ewc", "explicit-ewc"))
        slower = [lr for lr in self.scale["lrs"] if ewc is not None and lr < ewc.lr]
        second = condition.network == self.scale["second_network"] != self.scale["network"]
        first = [Setting(max(slower), None)] if slower and second else []
        return first if explicit is None else [*first, explicit]

    def published_violations(self, data: str, method: str) -> int | None:
        """Return how many parameters violated the bound in the paper when training first became unstable."""
        count: int | None = self._look_up("instability", "violations_at_first_instability", data, method)
        return count

    def _look_up(self, *keys: str) -> Any:
        value = self._published
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def rows_by_setting(runs: Iterable[RunRecord]) -> dict[tuple[Condition, str, Setting], list[RunRecord]]:
    """Return the seeds of each setting of a method under a condition."""
    rows: dict[tuple[Condition, str, Setting], list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        rows.setdefault((run.condition, run.method, run.setting), []).append(run)
    return rows
