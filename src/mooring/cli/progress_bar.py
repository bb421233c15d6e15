"""A progress bar for long work, on stderr, and nothing at all where nobody looks at it."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from mooring.lab.streams.progress_callback import ProgressCallback

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(*, in_bytes: bool = False, console: Console | None = None) -> Iterator[ProgressCallback]:
    """A function to tell what is done, which shows a bar with the time that is left.

    Args:
        in_bytes: what is counted are bytes.
        console: where to; by default stderr.

    Example:
        >>> with progress_bar() as report:
        ...     report("decoding", 1, 2)
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        shown: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in shown:
                shown[what] = bars.add_task(what, total=total)
            bars.update(shown[what], completed=done, total=total)

        yield report
