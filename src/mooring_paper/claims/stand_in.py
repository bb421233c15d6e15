"""Caltech-101 in the place of Caltech-256: the same tables and claims on a data set that the paper does not have."""

from collections.abc import Sequence

from mooring_paper.claims.claim import COLUMNS, Claim
from mooring_paper.claims.method_pairs import Evidence
from mooring_paper.claims.sequential_verdict import LookSchedule
from mooring_paper.claims.table_claims import character_claims
from mooring_paper.context.paper_context import PaperContext, unique_runs
from mooring_paper.context.scale import CONTROLS, ROWS, Condition
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.tables.accuracy_tables import OUR_SETTINGS, condition_table, runs_at_our_settings
from mooring_paper.tables.grid_search import search

NOT_RUN = (
    "Not run yet: put caltech101 into the folder of --data. It stands in for the character of Caltech-256, unbalanced "
    "classes and a long sequence, and never for its numbers."
)
CLAIMS = "Do the paper's statements about unbalanced classes and long sequences hold?"
"""The title of the table of claims."""


def run(context: PaperContext) -> TargetResult:
    """Search, train and test every method on the data sets that stand in, at the settings of our search."""
    scale = context.scale
    conditions = [Condition(scale.network, regime, data) for regime in scale.regimes for data in scale.stand_ins]
    if not conditions:
        return TargetResult("stand-in", [NOT_RUN])
    runs = runs_at_our_settings(context, conditions, (*ROWS, *CONTROLS))
    searched = search(context, conditions)
    tables = [condition_table(condition, results, OUR_SETTINGS) for condition, results in runs.items() if results]
    tables.append(ResultTable(CLAIMS, COLUMNS, [claim.to_row() for claim in _claims(context, conditions)]))
    grids = (row.results for choices in searched.values() for choice in choices for row in choice.grid)
    return TargetResult("stand-in", (), tables, unique_runs([*runs.values(), *grids]))


def _claims(context: PaperContext, conditions: Sequence[Condition]) -> list[Claim]:
    """Test the claims with the seeds of the tables, beside CIFAR-100, with balanced classes."""
    looks = LookSchedule.between(context.scale.seeds, context.scale.seeds)
    evidence = Evidence(context, looks)
    balanced = [condition for condition in context.scale.conditions() if condition.data == "cifar100"]
    rows = evidence.rows(runs_at_our_settings(context, [*conditions, *balanced], ROWS))
    return character_claims(evidence, {c: rows[c] for c in conditions}, {c: rows[c] for c in balanced})
