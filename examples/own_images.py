"""Compare methods on a folder of your own images, and write a report.

python examples/own_images.py            # draws a folder of stripes first if there is none
python examples/own_images.py photos     # photos/train/CLASS/*.png and photos/test/CLASS/*.png, or photos/CLASS/*.png
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from mooring.errors import MooringError
from mooring_lab import Study
from mooring_lab.report import write_report
from mooring_lab.streams import by_class
from mooring_lab.streams.inspection import inspect_folder
from mooring_lab.streams.sources import from_folder


def draw_stripes(folder: Path, images: int = 40) -> None:
    """Draw eight classes of noisy stripes, each with its own angle."""
    generator = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(16), np.arange(16))
    for angle in range(0, 180, 23):
        phase = x * np.cos(np.radians(angle)) + y * np.sin(np.radians(angle))
        for number in range(images):
            stripes = np.sin(phase + generator.uniform(0, 6)) * 60 + generator.normal(128, 40, (16, 16))
            path = folder / f"at {angle} degrees" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(stripes.clip(0, 255).astype(np.uint8)).save(path)


def main() -> None:
    """Check the folder, compare four methods on it, and write a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("stripes"))
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=16)
    options = parser.parse_args()
    if not options.folder.exists() and options.folder == Path("stripes"):
        draw_stripes(options.folder)

    inspection = inspect_folder(options.folder, size=(options.size, options.size))
    counts = f"{len(inspection['classes'])} classes, {inspection['train']} training images"
    print(f"{options.folder}: {counts}, {len(inspection['broken'])} broken")

    source = from_folder(options.folder, size=(options.size, options.size), channels=1, skip_broken=True)
    stream = by_class(source, options.per_task)
    study = Study("images.sqlite")
    rows = study.compare(
        stream=stream,
        methods=["plain", "frozen-after-first", "explicit-ewc", "budget-ewc"],
        seeds=options.seeds,
        network="mlp",
        epochs=options.epochs,
        batch=10,
        lr=0.03,
        baseline="plain",
    )
    for row in rows:
        accuracy, forgotten = row.metrics["accuracy"], row.metrics["forgetting"]
        print(f"{row.label:20s} accuracy {accuracy} %   forgotten {forgotten} %")
    page = write_report(
        study.results(), Path("images-report"), title="My images", command="python examples/own_images.py"
    )
    print(f"the page: {page}")


if __name__ == "__main__":
    try:
        main()
    except MooringError as error:
        sys.exit(f"error: {error}")
