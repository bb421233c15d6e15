"""A claim of the paper as a statement that runs can confirm or refute."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooring_lab.model.summary import Row
from mooring_paper.claims.sequential_verdict import Verdict
from mooring_paper.context.scale import Condition

SeedRequest = tuple[Row, int]
"""A row, and how many seeds it needs."""

AT_PAPER_SETTINGS = "at the paper's settings"
COLUMNS = ("claim", "holds when", "ours", AT_PAPER_SETTINGS, "paper's", "seeds", "verdict")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and the verdict of our runs.

    Attributes:
        statement: the claim, in one sentence.
        definition: what is measured, on what, and when the claim holds.
        ours: our number, with its interval if it has one.
        papers: the paper's number, if it gives one.
        verdict: "holds", "does not hold" or "not decided".
        seeds: how many seeds each comparison used; empty for counts of runs.
        wanted: the rows that need more seeds, because an interval contains a bound.
        at_paper_settings: our number and the verdict with the paper's learning rates and strengths; empty if the claim
            does not depend on our search, or if the paper gives no settings.
    """

    statement: str
    definition: str
    ours: str
    papers: str
    verdict: Verdict
    seeds: tuple[int, ...] = ()
    wanted: tuple[SeedRequest, ...] = ()
    at_paper_settings: str = ""

    def to_row(self) -> dict[str, str]:
        """Return the claim as a row of a table."""
        few, many = min(self.seeds, default=0), max(self.seeds, default=0)
        seeds = "" if not many else f"{few}" if few == many else f"{few} to {many}"
        values = (self.statement, self.definition, self.ours, self.at_paper_settings, self.papers, seeds, self.verdict)
        return dict(zip(COLUMNS, values, strict=True))


def claim_on_count(
    statement: str,
    definition: str,
    count: int,
    total: int,
    papers: str = "all",
    *,
    share: float = 1.0,
    missing: int = 0,
    details: str = "",
) -> Claim:
    """Return a claim about at least a share of the cases; by default, about all of them.

    Cases that could not be measured, for example because no run finished, keep the claim from holding.
    """
    verdict = count_verdict(count, total, share)
    without = f"; {missing} more could not be measured" if missing else ""
    ours = f"{count} of {total}{details}{without}"
    return Claim(statement, definition, ours, papers, "not decided" if missing and verdict == "holds" else verdict)


def count_verdict(count: int, total: int, share: float = 1.0) -> Verdict:
    """Return the verdict on a claim about at least a share of the runs; not decided if there are none.

    Example:
        >>> count_verdict(2, 4, 0.5), count_verdict(1, 4, 0.5), count_verdict(0, 0, 0.5)
        ('holds', 'does not hold', 'not decided')
        >>> count_verdict(3, 3), count_verdict(2, 3), count_verdict(0, 0)
        ('holds', 'does not hold', 'not decided')
    """
    return "not decided" if not total else "holds" if count >= share * total else "does not hold"


def describe_conditions(conditions: Sequence[Condition]) -> str:
    """Return the networks, regimes and data sets of conditions, as text.

    Example:
        >>> from mooring_paper.context.scale import MINIATURE
        >>> describe_conditions(MINIATURE.conditions())
        'mlp, 1-epoch and 30-epochs, digits'
    """
    names = [(c.network, c.regime.name, c.data) for c in conditions]
    return ", ".join(map(list_names, zip(*names, strict=True))) if names else "nothing"


def list_names(names: Sequence[str]) -> str:
    """Return names without duplicates, as text.

    Example:
        >>> list_names(["ewc", "mas", "ewc", "si"]), list_names(["ewc"])
        ('ewc, mas and si', 'ewc')
    """
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} and {last}" if others else last
