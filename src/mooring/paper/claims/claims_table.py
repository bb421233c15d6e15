"""The table of all claims."""

from mooring.paper.claims import instability_claims, layer_claims
from mooring.paper.claims.table_claims import search_claims, table_claims
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import ROWS
from mooring.paper.context.target_result import ResultTable, TargetResult
from mooring.paper.tables.accuracy_tables import SECOND_ROWS, rows_at_our_settings
from mooring.paper.tables.grid_search import search, search_conditions


def run(context: PaperContext) -> TargetResult:
    """Test every claim."""
    scale = context.scale
    main = rows_at_our_settings(context, scale.conditions(), ROWS)
    second = rows_at_our_settings(context, scale.second_conditions(), SECOND_ROWS)
    groups = {
        "The explicit step, penalties and replay": table_claims(scale, main, second),
        "Hyper-parameters": search_claims(search(context, search_conditions(scale))),
        "Instability": instability_claims.claims(context),
        "Layers, and the step itself": layer_claims.claims(context),
    }
    verdicts = [claim.verdict for group in groups.values() for claim in group]
    text = [
        f"Of {len(verdicts)} claims, {verdicts.count('holds')} hold, {verdicts.count('does not hold')} do not hold, "
        f"and {verdicts.count('not decided')} are not decided: the 95 % interval over seeds contains 0 or another "
        "bound of the claim, or too few seeds finished.",
        "Intervals are over seeds only. They say nothing about other data sets or backbones, nor about the settings "
        "that another search would choose: the search tries each setting with one seed and breaks ties by order. "
        "Counts have no interval. Runs of the tables and of fig-cka use the settings of our search; those of the "
        "other figures use the paper's settings.",
        "A mean over pairs leaves out pairs in which a run did not finish. Most of these runs became unstable under a "
        "penalty, where its accuracy would have been lowest.",
    ]
    rows = {name: [claim.to_row() for claim in group] for name, group in groups.items()}
    tables = [ResultTable(name, list(group[0]), group) for name, group in rows.items()]
    results = [result for table in (main, second) for rows in table.values() for row in rows for result in row.results]
    return TargetResult("claims", text, tables, results)
