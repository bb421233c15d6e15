"""What the scripts beside this one share: the report's style, and where figures go."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mooring.report.style import drawing

FOLDER = Path(__file__).parent.parent / "figures"


@contextmanager
def figure(name: str, columns: int, *, folder: Path = FOLDER, height: float = 2.3, **options: Any) -> Iterator[Any]:
    """A row of panels, written to `name`.png."""
    with drawing():
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
