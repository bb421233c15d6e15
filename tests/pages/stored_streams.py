"""The streams of digits that `mooring frontier --out` stored, and the tables that pages make of them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from mooring_lab.model.metrics import paired_difference

DOCS = Path(__file__).parents[2] / "docs"
STREAMS = {"digits": "two at a time", "permutations": "permutations", "rotations": "rotations"}
OURS = "budget-kronecker"


@dataclass(frozen=True)
class Chosen:
    """A method at the strength that stands for it."""

    strength: float | None
    accuracy: float
    std: float
    forgetting: float | None = None
    learned: float | None = None

    @property
    def cell(self):
        return f"{self.accuracy:.1f} ± {self.std:.1f}"


class Measured:
    """A stream as `mooring frontier` stored it: methods at their chosen strengths, whole dials and the frontier."""

    def __init__(self, path):
        (self.stored,) = json.loads(path.read_text())
        self.by_name = {method["method"]: method for method in self.stored["methods"] if method["best"]}
        self.methods = {name: self._chosen(method["best"]) for name, method in self.by_name.items()}
        self.frontier = [corner["row"] for corner in self.stored["hull"]]

    @staticmethod
    def _chosen(best):
        numbers = best["metrics"]
        other = {name: numbers[name]["mean"] for name in ("forgetting", "learned") if name in numbers}
        return Chosen(best["strength"], numbers["accuracy"]["mean"], numbers["accuracy"]["std"], **other)

    def at(self, setting):
        """Return the accuracy of a method at a strength, such as "ewc 1000"."""
        name, _, strength = setting.partition(" ")
        if not strength:
            return self.methods[name].accuracy
        (row,) = (row for row in self.by_name[name]["dial"] if row["strength"] == float(strength))
        return row["accuracy"]

    def lead(self, method, other):
        """Return the paired difference of accuracy between two methods, seed by seed."""
        ours, theirs = (self.by_name[name]["accuracies"] for name in (method, other))
        assert ours.keys() == theirs.keys()
        return paired_difference(list(ours.values()), [theirs[seed] for seed in ours])


MEASURED = {name: Measured(DOCS / "figures" / f"frontier-{name}.json") for name in STREAMS}


def chosen_rows(method):
    """Return a method's row of each stream, at its chosen strengths."""
    return [stream.methods[method] for stream in MEASURED.values()]


def accuracies_of(method):
    return [row.accuracy for row in chosen_rows(method)]


def number(strength):
    return re.sub(r"e([-+])0*(\d+)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", f"{strength:g}")


def interval(lead):
    return f"{lead.mean:+.1f} [{lead.low:+.1f}, {lead.high:+.1f}]"


def table_line(cells):
    return re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |")


def method_table(methods):
    """Return a table of methods by name with what was measured at their strengths, in the order given."""
    lines = ["| method | strength | accuracy % | forgetting | learned |", "| --- | --- | --- | --- | --- |"]
    for name, row in methods.items():
        strength = "" if row.strength is None else number(row.strength)
        others = ["" if value is None else f"{value:.1f}" for value in (row.forgetting, row.learned)]
        lines.append(table_line([f"`{name}`", strength, row.cell, *others]))
    return "\n".join(lines)
