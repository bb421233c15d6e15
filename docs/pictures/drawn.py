"""What the scripts beside this one share: the report's style, where figures go, and scores that are given."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mooring.rules import Importance
from mooring_lab.report.style import figure_style

FOLDER = Path(__file__).parent.parent / "figures"


def asked(document: str) -> argparse.Namespace:
    """What a script that trains small networks is asked for; on one thread, so that figures come out the same."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


@contextmanager
def figure(name: str, columns: int, *, folder: Path = FOLDER, height: float = 2.3, **options: Any) -> Iterator[Any]:
    """A row of panels, written to `name`.png."""
    with figure_style():
        made = Figure(figsize=(7.6, height), layout="constrained")
        yield made.subplots(1, columns, **options)
        folder.mkdir(parents=True, exist_ok=True)
        made.savefig(folder / f"{name}.png", dpi=150)


def logarithmic(panel: Axes, axis: str) -> None:
    """A logarithmic axis with a plain number at each decade."""
    getattr(panel, f"set_{axis}scale")("log")
    ticks = getattr(panel, f"{axis}axis")
    ticks.set_major_locator(LogLocator())
    ticks.set_minor_locator(NullLocator())
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


class Given(Importance):
    """Scores that are known beforehand: the first for the first task, and so on; the last for all that follow."""

    def __init__(self, *scores: torch.Tensor) -> None:
        self.scores = scores

    def start(self, like: torch.Tensor, *, name: str, task: int) -> dict[str, torch.Tensor]:
        """This task's scores, in the parameter's shape."""
        return {"current": self.scores[min(task, len(self.scores) - 1)].reshape(like.shape).clone()}
