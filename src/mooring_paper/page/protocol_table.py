"""The protocol, item by item: what the paper says, what the authors' public code does, and what is done here."""

from collections.abc import Collection

import torch

import mooring
from mooring.rules.interpolation import relative_importance
from mooring_lab.methods.strengths import SAMPLES
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.spec import RunSpec
from mooring_lab.study.pretraining import RECIPES
from mooring_paper.context.scale import Scale
from mooring_paper.context.target_result import PAPER_SEEDS, ResultTable

COLUMNS = ("item", "the paper", "the authors' code", "here", "documented in")
"""What it is about, what the paper says, what the code does (commit 317fd2d), what is done here, and where that is."""

SILENT = "not stated"
SAME = "the same"
PRIVATE = "in a file that is not public"


def protocol_table(scale: Scale, dtypes: Collection[str] = (), recipes: Collection[str] = ()) -> ResultTable:
    """Return the protocol of a scale; numbers of this side are read from the code that has them.

    Args:
        scale: data sets, regimes and seeds.
        dtypes: of the runs.
        recipes: of the backbones.
    """
    spec, recipe, ewc, si = RunSpec("digits", "0", "plain", 0), RECIPES["paper"], mooring.EWC(), mooring.SI()
    regimes = ", ".join(f"{pluralize(r.epochs, 'epoch')} with batch {r.batch}" for r in scale.regimes)
    zero = relative_importance(torch.zeros(1), torch.zeros(1)).item()
    more = f", up to {scale.max_seeds} for claims they leave undecided" if scale.max_seeds > scale.seeds else ""
    seeds = f"{scale.seeds}{more}"
    on_new = f"{1 - (ewc.decay or 0):g}"
    items = (
        ("regimes", "1 epoch with batch 10, 30 epochs with batch 256", PRIVATE, regimes, "Section 5"),
        ("data sets", "CIFAR-100, Oxford-Flowers, Caltech-256", SAME, ", ".join(scale.streams), "`mooring data`"),
        ("precision", SILENT, "float32", ", ".join(sorted(dtypes)) or "none", "`reasons`"),
        ("search", "first 3 tasks", SAME, f"first {scale.search_tasks} tasks, one seed", "Appendix C"),
        ("seeds", str(PAPER_SEEDS), SAME, seeds, "Table 1"),
        ("momentum", "0.9", "0.9, reset at each task", f"{spec.momentum:g}, reset at each task", "`spec.py`"),
        (
            "weight decay",
            SILENT,
            "1e-4 for plain fine-tuning and in the first task, then " + PRIVATE,
            f"{spec.weight_decay:g}; a change in `reasons`",
            "`changes.py`",
        ),
        ("backbone", "pre-trained on CIFAR-10", "one for all seeds", "one for each seed", "below"),
        (
            "recipe of the backbone",
            SILENT,
            "60 epochs, rates 0.1, 0.01, 0.001, decay 1e-4, flips",
            f"{' and '.join(sorted(recipes)) or 'none'} ({recipe.epochs} epochs, decay {recipe.weight_decay:g})",
            "`pretraining.py`",
        ),
        (
            "heads of a new task",
            SILENT,
            "inherited; fresh with replay",
            "inherited; fresh in `as-published`",
            "`reasons`",
        ),
        (
            "running average",
            "a running average",
            "0.8 on the new score",
            f"{on_new} on the new score",
            "[importances](../importances.md)",
        ),
        ("damping of SI and RWalk", SILENT, "1e-10", f"{si.damping:g}; a change in `reasons`", "`si.py`"),
        (
            "R where no importance is known (0/0)",
            SILENT,
            "1: returns to the anchor",
            f"{zero:g}: stays free",
            "[pulls](../pulls.md)",
        ),
        ("factor of the penalty", "1/2", "1", "1/2; 1 in `as-published`", "Equation 1"),
        ("memory of replay", f"{SAMPLES} samples", f"{SAMPLES}", f"{SAMPLES}", "Appendix C"),
        (
            "Oxford-Flowers",
            "train and validation to train, 72 and 20 a class",
            "official test and validation ids to train, training ids to test",
            "as the code",
            "Appendix C",
        ),
        ("filters of the ResNet", "a third", "16, 32, 64, 128", "a third; 16 to 128 in `as-published`", "Appendix D"),
        ("rate of plain fine-tuning", SILENT, "searched", "the explicit step's; ResNet: below EWC's", "Appendix D"),
    )
    return ResultTable("Protocol", COLUMNS, [dict(zip(COLUMNS, item, strict=True)) for item in items])
