"""Reproduce the CIFAR-100 row of the paper's main table with public functions of the laboratory.

The protocol: ten tasks of ten classes, one epoch each with batch size 10, from a backbone trained on CIFAR-10. The
learning rate and the strength of every method are searched on the first three tasks with one seed. Then every method is
trained on the other seven tasks with five seeds. After an interruption, the same command continues.

    python examples/paper_in_one_file.py --data DIR/cifar100 --init backbone.safetensors --device cuda
    python examples/paper_in_one_file.py --stream digits --seeds 2        # a small version for any machine
"""

import argparse

from mooring_lab import Row, Study, tune
from mooring_lab.streams.options import StreamOptions
from mooring_paper.published.published_numbers import published

METHODS = [
    "plain",
    "frozen-after-first",  # not in the paper: the backbone is frozen
    *("ewc", "mas", "si", "rwalk"),  # the quadratic regularizers
    *("vanilla", "random"),  # the same with uninformed importances
    *("explicit-ewc", "explicit-mas", "explicit-si", "explicit-rwalk"),  # the explicit step
    *("a-gem", "er"),  # replay
]
SMALL = {"lrs": [0.03, 0.01], "strengths": [0.01, 1.0, 1e4], "tasks": 2}
"""The grids of the small example; otherwise they are the paper's."""


def table_line(row: Row, stream: str) -> str:
    """Return a line of the table: our numbers, the paper's, and the selected setting."""
    paper_numbers = published("cnn6", "1-epoch", stream, row.setting.method)
    if not row.metrics:
        return f"{row.setting.method:20s}{row.verdict}"
    paper = f"{paper_numbers.accuracy:6.1f} /{paper_numbers.forgetting:6.2f}" if paper_numbers else ""
    ours = f"{row.metrics['accuracy']!s:>15s} /{row.metrics['forgetting']!s:>13s}"
    strength = "" if row.setting.strength is None else f", strength {row.setting.strength:g}"
    return f"{row.setting.method:20s}{ours}{paper:>18s}   lr {row.setting.lr:g}{strength} {row.verdict}"


def main() -> None:
    """Search the settings, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", default="cifar100", help="cifar100, flowers102, caltech256; or digits")
    parser.add_argument("--data", help="the folder of images, in the Hub's layout")
    parser.add_argument("--init", help="the backbone's initial weights, such as `mooring pretrain` writes")
    parser.add_argument("--study", default="paper.sqlite", help="the study file for results")
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

    searched = sum(len(choice.grid) for choice in tuned.choices)
    dropped = sum(len(choice.dropped) for choice in tuned.choices)
    print(f"{searched} settings searched, {dropped} dropped: a penalty did not interpolate, or training was unstable")
    print(f"{'method':20s}{'accuracy / forgetting':>30s}{'the paper':>18s}   found")
    for row in tuned.rows:
        print(table_line(row, options.stream))


if __name__ == "__main__":
    main()
