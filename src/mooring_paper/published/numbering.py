"""The numbers of the paper's figures, tables, equations and algorithm, and what reproduces each of them."""

import re
from dataclasses import dataclass

_ALL = ("cifar100", "flowers102", "caltech256")
_STABILITY = "mooring.diagnose.stability"
_ONE_EPOCH = "here in 1 epoch, in the paper also in 30"
_MISMATCH = "forgetting of explicit-ewc on Oxford-Flowers in 30 epochs is 0.21, and 1.07 in Table 1"
_PROOF = "a step of the proof of Equation 4"


@dataclass(frozen=True)
class PaperItem:
    """A numbered figure, table, equation or algorithm of the paper.

    Attributes:
        kind: "figure", "table", "equation" or "algorithm".
        number: its number in the paper; those of the appendix continue those of the main part.
        subject: what it shows.
        target: the target that reproduces or tests it; empty if there is none.
        function: the function that computes it; empty for figures and tables.
        data: the data sets that it shows.
        remark: where it differs from what is done here, or from another number of the paper.

    Example:
        >>> find_item("fig3").name, find_item("fig3").target
        ('Figure 3', 'fig-importance')
    """

    kind: str
    number: int
    subject: str
    target: str = ""
    function: str = ""
    data: tuple[str, ...] = ()
    remark: str = ""

    @property
    def name(self) -> str:
        """Its name in the paper."""
        return f"{self.kind.capitalize()} {self.number}"


def _figure(number: int, subject: str, target: str, *data: str, remark: str = "") -> PaperItem:
    return PaperItem("figure", number, subject, target, data=data, remark=remark)


def _table(number: int, subject: str, target: str, *data: str, remark: str = "") -> PaperItem:
    return PaperItem("table", number, subject, target, data=data, remark=remark)


def _equation(number: int, subject: str, function: str, target: str = "") -> PaperItem:
    return PaperItem("equation", number, subject, target, function)


ITEMS: tuple[PaperItem, ...] = (
    _figure(1, "negative importance makes SI unstable", "fig-negative", "cifar100"),
    _figure(2, "parameters that violate the stability bound", "fig-violations", "cifar100"),
    _figure(3, "mean importance by layer", "fig-importance", "cifar100"),
    _figure(4, "CKA by layer, with and without balanced importance", "fig-cka", "cifar100", remark=_ONE_EPOCH),
    _figure(5, "Figure 1 on the other data sets", "fig-negative", "flowers102", "caltech256"),
    _figure(6, "Figure 2 on Oxford-Flowers", "fig-violations", "flowers102"),
    _figure(7, "Figure 2 on Caltech-256", "fig-violations", "caltech256"),
    _figure(8, "Figure 3 on Oxford-Flowers", "fig-importance", "flowers102"),
    _figure(9, "Figure 3 on Caltech-256", "fig-importance", "caltech256"),
    _figure(10, "Figure 4 on the other data sets", "fig-cka", "flowers102", "caltech256", remark=_ONE_EPOCH),
    _table(1, "accuracy and forgetting of every method, both regimes", "table1", *_ALL),
    _table(2, "settings of the search, 1 epoch", "grids", *_ALL),
    _table(3, "settings of the search, 30 epochs", "grids", *_ALL),
    _table(4, "settings of the search, ResNet", "grids", *_ALL),
    _table(5, "Table 1 with standard deviations", "table1", *_ALL, remark=_MISMATCH),
    _table(6, "accuracy and forgetting with the ResNet", "resnet", *_ALL),
    _equation(1, "the loss with a quadratic penalty", "mooring.rules.penalty.penalty_loss"),
    _equation(2, "the update under a penalty", "mooring.rules.penalty.penalty_force"),
    _equation(3, "the update as an interpolation", f"{_STABILITY}.interpolation_weight"),
    _equation(4, "the effective learning rate", f"{_STABILITY}.effective_learning_rate", "effective-lr"),
    _equation(5, "the largest safe strength", f"{_STABILITY}.largest_safe_strength", "fig-violations"),
    _equation(6, "the interpolation weight at that strength", f"{_STABILITY}.interpolation_weight", "fig-importance"),
    _equation(7, "the explicit step", "mooring.backends.eager.apply_pull"),
    _equation(8, "the relative importance", "mooring.rules.interpolation.relative_importance", "roots"),
    _equation(9, "Equation 4 again", f"{_STABILITY}.effective_learning_rate", "effective-lr"),
    _equation(10, "Equations 2 and 3 again", f"{_STABILITY}.interpolation_weight", "effective-lr"),
    *(_equation(number, _PROOF, f"{_STABILITY}.effective_learning_rate", "effective-lr") for number in range(11, 15)),
    PaperItem("algorithm", 1, "training with the explicit step", "table1", "mooring.step.TrainingStep"),
)
"""Every numbered item of the paper, appendix included, in its order."""

ITEM_NAMES = ("fig1 to fig10", "table1 to table6", "eq1 to eq14", "alg1")
"""The short names that `find_item` accepts."""

_ABBREVIATIONS = {"fig": "figure", "tab": "table", "eq": "equation", "alg": "algorithm"}
_NAME = re.compile(r"([a-z]+)\.?[\s_-]*(\d+)", re.IGNORECASE)


def find_item(name: str) -> PaperItem | None:
    """Return the item with a name such as "fig3", "Figure 3", "table 1" or "eq7"; None if the paper has none.

    Example:
        >>> find_item("Table 6").target, find_item("eq.7").function, find_item("fig11")
        ('resnet', 'mooring.backends.eager.apply_pull', None)
    """
    match = _NAME.fullmatch(name.strip())
    if match is None:
        return None
    kind, number = match[1].lower(), int(match[2])
    kind = _ABBREVIATIONS.get(kind, kind)
    return next((item for item in ITEMS if (item.kind, item.number) == (kind, number)), None)
