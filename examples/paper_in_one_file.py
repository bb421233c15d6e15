"""The CIFAR-100 row of the paper's main table, ours beside theirs, with the laboratory's public functions only.

The protocol: ten tasks of ten classes, one epoch each at batch 10, from a backbone trained on CIFAR-10. Learning rate
and strength of every method are searched on the first three tasks with one seed; then every method is trained on the
other seven with five seeds. Nothing is trained twice: interrupt it, and the same command goes on.

    python examples/paper_in_one_file.py --data DIR/cifar100 --init backbone.safetensors --device cuda
    python examples/paper_in_one_file.py --stream digits --seeds 2        # the same in miniature, on any machine
"""

import argparse

from mooring.lab import Row, Study, tune
from mooring.lab.streams.options import StreamOptions
from mooring.paper.published.published_numbers import published

METHODS = [
    "plain",
    "frozen-after-first",  # not in the paper: what freezing the backbone would do
    *("ewc", "mas", "si", "rwalk"),  # the quadratic regularizers
    *("vanilla", "random"),  # the same with importances that know nothing
    *("explicit-ewc", "explicit-mas", "explicit-si", "explicit-rwalk"),  # the interpolation as a step of its own
    *("a-gem", "er"),  # replay, which keeps old samples
]
SMALL = {"lrs": [0.03, 0.01], "strengths": [0.01, 1.0, 1e4], "tasks": 2}
"""Grids for the miniature; otherwise they are the paper's."""


def beside(row: Row, stream: str) -> str:
    """A line of the table: ours, the paper's, and the settings found."""
    theirs = published("cnn6", "1-epoch", stream, row.setting.method)
    if not row.metrics:
        return f"{row.setting.method:20s}{row.verdict}"
    paper = f"{theirs.accuracy:6.1f} /{theirs.forgetting:6.2f}" if theirs else ""
    ours = f"{row.metrics['accuracy']!s:>15s} /{row.metrics['forgetting']!s:>13s}"
    strength = "" if row.setting.strength is None else f", strength {row.setting.strength:g}"
    return f"{row.setting.method:20s}{ours}{paper:>18s}   lr {row.setting.lr:g}{strength} {row.verdict}"


def main() -> None:
    """Search, train, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", default="cifar100", help="cifar100, flowers102, caltech256; or digits")
    parser.add_argument("--data", help="the folder of images, as the Hub has them")
    parser.add_argument("--init", help="a backbone to start from, such as `mooring pretrain` makes")
    parser.add_argument("--study", default="paper.sqlite", help="where results are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    small = options.stream == "digits"
    source = StreamOptions(options.stream, data=options.data, limit=60 if small else None)
    study = Study(options.study, device=options.device)
    tuned = tune(
        study,
        stream=source,
        methods=METHODS,
        seeds=options.seeds,
        epochs=1,
        batch=10,
        init=options.init,
        **(SMALL if small else {}),
    )

    tried = sum(len(choice.grid) for choice in tuned.choices)
    dropped = sum(len(choice.dropped) for choice in tuned.choices)
    print(f"{tried} settings searched, {dropped} dropped: a penalty did not interpolate, or training was unstable")
    print(f"{'method':20s}{'accuracy / forgetting':>30s}{'the paper':>18s}   found")
    for row in tuned.rows:
        print(beside(row, options.stream))


if __name__ == "__main__":
    main()
