"""Writing a report so that an interrupted one leaves the old one as it was."""

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mooring.errors import MooringError
from mooring.lab.model.results import Result
from mooring.report.figures import pictures
from mooring.report.page import GENERATOR, page
from mooring.report.picture import Picture
from mooring.report.section import sections

__all__ = ["write_report"]

_OURS = re.compile(r'<figure id="figure-([a-z0-9-]+)"')


def write_report(
    results: Sequence[Result], folder: str | os.PathLike[str], *, title: str, command: str, baseline: str | None = None
) -> Path:
    """Write `index.html`, which needs nothing else, and its figures as `figures/NAME.svg` and `figures/NAME.png`.

    Everything is made in a hidden folder first and then moved into place, the page last: an interrupted report leaves
    the old page whole. Other files in the folder are left alone. The same results make the same bytes.

    Args:
        results: runs of one or several streams, methods, strengths and seeds, in any order.
        folder: where to write; made where it is missing.
        title: of the page.
        command: what made the results, to be repeated.
        baseline: a method to compare accuracy with, seed by seed.

    Returns:
        The page.

    Raises:
        MooringError: there are no results, none is of the baseline, or the folder cannot be written.

    Example:
        >>> from mooring.lab.model.spec import RunSpec
        >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
        >>> result = Result(spec, "finished", "", [10.0, 10.0], [[90.0, 20.0], [70.0, 80.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report([result], folder, title="Digits", command="mooring run digits").name
        'index.html'
    """
    if not results:
        raise MooringError("there are no results to report: run something first")
    parts = [(section, pictures(section)) for section in sections(results, baseline)]
    written = page(parts, title=title, command=command)
    place = Path(folder)
    try:
        _publish(place, written, [picture for _, drawn in parts for picture in drawn])
    except OSError as error:
        raise MooringError(f"cannot write the report to {str(place)!r}: {error.strerror or error}") from error
    return place / "index.html"


def _publish(folder: Path, written: str, drawn: Sequence[Picture]) -> None:
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # Inside the folder, so that moving never crosses from one disk to another.
        hidden = Path(tempfile.mkdtemp(prefix=".report-", dir=folder))
        try:
            for picture in drawn:
                (hidden / f"{picture.name}.svg").write_bytes(picture.svg)
                (hidden / f"{picture.name}.png").write_bytes(picture.png)
            (hidden / "index.html").write_bytes(written.encode("utf-8", "replace"))
            stale = _figures_of(folder / "index.html") - {picture.name for picture in drawn}
            (folder / "figures").mkdir(exist_ok=True)
            for picture in drawn:
                for ending in (".svg", ".png"):
                    os.replace(hidden / f"{picture.name}{ending}", folder / "figures" / f"{picture.name}{ending}")
            os.replace(hidden / "index.html", folder / "index.html")
            for name in stale:
                for ending in (".svg", ".png"):
                    (folder / "figures" / f"{name}{ending}").unlink(missing_ok=True)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except BaseException:
        if fresh:
            with suppress(OSError):
                folder.rmdir()
        raise


def _figures_of(page: Path) -> set[str]:
    """The names of the figures of an older report, which nothing else may be taken for."""
    if not page.is_file():
        return set()
    written = page.read_text(encoding="utf-8", errors="replace")
    return set(_OURS.findall(written)) if f'content="{GENERATOR}"' in written else set()
