"""Write a report; an interruption leaves the previous report unchanged."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mooring.errors import MooringError
from mooring_lab.model.atomic_files import write_atomically
from mooring_lab.model.results import Result
from mooring_lab.report.page import GENERATOR, page
from mooring_lab.report.section import sections
from mooring_lab.report.section_figures import draw_pictures

_FIGURE_ID = re.compile(r'<figure id="figure-([a-z0-9-]+)"')


def write_report(
    results: Sequence[Result],
    folder: str | os.PathLike[str],
    *,
    title: str | None = None,
    command: str,
    baseline: str | None = None,
) -> Path:
    """Write a self-contained `index.html`, and its figures as `figures/NAME.svg` and `figures/NAME.png`.

    Every file is replaced as a whole, the page last, so that an interruption leaves the old page, which contains its
    figures. Other files in the folder are not touched. The same results give the same bytes.

    Args:
        results: runs of one or several streams, methods, strengths and seeds, in any order.
        folder: the folder to write; created if it does not exist.
        title: the title of the page; by default its methods and streams.
        command: the command that made the results.
        baseline: the method to compare accuracy with, seed by seed.

    Returns:
        The path of the page.

    Raises:
        MooringError: if there are no results, none is of the baseline, or the folder cannot be written.

    Example:
        >>> import tempfile
        >>> from mooring_lab.model.spec import RunSpec
        >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
        >>> result = Result(spec, "finished", "", [10.0, 10.0], [[90.0, 20.0], [70.0, 80.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report([result], folder, title="Digits", command="mooring run digits").name
        'index.html'
    """
    if not results:
        raise MooringError("there are no results to report: give at least one")
    parts = [(section, draw_pictures(section)) for section in sections(results, baseline)]
    content = page(parts, title=title, command=command)
    target = Path(folder)
    files = [(picture.name, picture.svg, picture.png) for _, pictures in parts for picture in pictures]
    stale = _figures_of(target / "index.html") - {name for name, _, _ in files}
    try:
        (target / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MooringError(f"cannot write the report to {str(target)!r}: {error.strerror or error}") from error
    for name, svg, png in files:
        write_atomically(target / "figures" / f"{name}.svg", svg)
        write_atomically(target / "figures" / f"{name}.png", png)
    write_atomically(target / "index.html", content.encode("utf-8", "replace"))
    for name in stale:
        for ending in (".svg", ".png"):
            (target / "figures" / f"{name}{ending}").unlink(missing_ok=True)
    return target / "index.html"


def _figures_of(page: Path) -> set[str]:
    """Return the names of the figures of a page, if `write_report` wrote it."""
    if not page.is_file():
        return set()
    content = page.read_text(encoding="utf-8", errors="replace")
    return set(_FIGURE_ID.findall(content)) if f'content="{GENERATOR}"' in content else set()
