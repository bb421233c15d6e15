"""The protocol, item by item: what the paper says, what the authors' public code does, and what is done here."""

from dataclasses import dataclass

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
SILENT = "not stated"
SAME = "the same"
PRIVATE = "in a file that is not public"


@dataclass(frozen=True)
class ProtocolItem:
    """An item of the protocol.

    Attributes:
        item: what it is about.
        paper: what the paper says; `SILENT` if nothing.
        code: what the authors' public code does, commit 317fd2d.
        here: what is done here.
        source: where that is documented.
    """

    item: str
    paper: str
    code: str
    here: str
    source: str

    def to_row(self) -> dict[str, str]:
        """Return the item as a row."""
        return dict(zip(COLUMNS, (self.item, self.paper, self.code, self.here, self.source), strict=True))


def protocol_table(scale: Scale) -> ResultTable:
    """Return the protocol of a scale; numbers of this side are read from the code that has them."""
    spec, recipe, ewc, si = RunSpec("digits", "0", "plain", 0), RECIPES["paper"], mooring.EWC(), mooring.SI()
    regimes = ", ".join(f"{pluralize(r.epochs, 'epoch')} with batch {r.batch}" for r in scale.regimes)
    zero = relative_importance(torch.zeros(1), torch.zeros(1)).item()
    on_new = f"{1 - (ewc.decay or 0):g}"
    items = (
        ProtocolItem("regimes", "1 epoch with batch 10, 30 epochs with batch 256", PRIVATE, regimes, "Section 5"),
        ProtocolItem("search", "first 3 tasks", SAME, f"first {scale.search_tasks} tasks, one seed", "Appendix C"),
        ProtocolItem("seeds", str(PAPER_SEEDS), SAME, pluralize(scale.seeds, "seed"), "Table 1"),
        ProtocolItem(
            "momentum", "0.9", "0.9, reset at each task", f"{spec.momentum:g}, reset at each task", "`spec.py`"
        ),
        ProtocolItem(
            "weight decay",
            SILENT,
            "1e-4 for plain fine-tuning and in the first task, then " + PRIVATE,
            f"{spec.weight_decay:g}; a change in `reasons`",
            "`changes.py`",
        ),
        ProtocolItem("backbone", "pre-trained on CIFAR-10", "one for all seeds", "one for each seed", "below"),
        ProtocolItem(
            "recipe of the backbone",
            SILENT,
            "60 epochs, rates 0.1, 0.01, 0.001, decay 1e-4, flips",
            f"that of the authors' code: {recipe.epochs} epochs, decay {recipe.weight_decay:g}",
            "`pretraining.py`",
        ),
        ProtocolItem(
            "heads of a new task",
            SILENT,
            "inherited; fresh with replay",
            "inherited; fresh in `as-published`",
            "`reasons`",
        ),
        ProtocolItem(
            "running average",
            "a running average",
            "0.8 on the new score",
            f"{on_new} on the new score",
            "[importances](../importances.md)",
        ),
        ProtocolItem("damping of SI and RWalk", SILENT, "1e-10", f"{si.damping:g}; a change in `reasons`", "`si.py`"),
        ProtocolItem(
            "R where no importance is known (0/0)",
            SILENT,
            "1: returns to the anchor",
            f"{zero:g}: stays free",
            "[pulls](../pulls.md)",
        ),
        ProtocolItem("factor of the penalty", "1/2", "1", "1/2; 1 in `as-published`", "Equation 1"),
        ProtocolItem("memory of replay", f"{SAMPLES} samples", f"{SAMPLES}", f"{SAMPLES}", "Appendix C"),
        ProtocolItem(
            "Oxford-Flowers",
            "train and validation to train, 72 and 20 a class",
            "official test and validation ids to train, training ids to test",
            "as the code",
            "Appendix C",
        ),
        ProtocolItem(
            "filters of the ResNet", "a third", "16, 32, 64, 128", "a third; 16 to 128 in `as-published`", "Appendix D"
        ),
        ProtocolItem(
            "rate of plain fine-tuning", SILENT, "searched", "the explicit step's; ResNet: below EWC's", "Appendix D"
        ),
    )
    return ResultTable("Protocol", COLUMNS, [item.to_row() for item in items])
