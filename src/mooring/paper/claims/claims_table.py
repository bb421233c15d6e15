"""Every claim of the paper, decided by our runs, in one table."""

from mooring.paper.claims import instability_claims as claims_of_instability
from mooring.paper.claims import layer_claims as claims_of_layers
from mooring.paper.claims import search_claims as claims_of_search
from mooring.paper.claims import table_claims as claims_of_tables
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import REPLAY, ROWS, Scale
from mooring.paper.tables.accuracy_tables import rows_at_our_settings
from mooring.paper.tables.grid_search import cases, search

__all__ = ["count", "run"]


def count(scale: Scale) -> int:
    """None of its own: it reads the runs of the tables and figures."""
    return 0


def run(lab: Laboratory) -> Finding:
    """Decide every claim."""
    scale = lab.scale
    main = rows_at_our_settings(lab, scale.cases(), ROWS)
    other = rows_at_our_settings(lab, scale.other_cases(), [name for name in ROWS if name not in REPLAY])
    groups = {
        "The explicit step, penalties and replay": claims_of_tables.claims(scale, main, other),
        "Hyper-parameters": claims_of_search.claims(search(lab, cases(scale))),
        "Instability": claims_of_instability.claims(lab),
        "Layers, and the step itself": claims_of_layers.claims(lab),
    }
    claims = [claim for group in groups.values() for claim in group]
    held = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in ("holds", "does not hold")}
    text = [
        f"Of {len(claims)} claims {held['holds']} hold, {held['does not hold']} do not, and "
        f"{len(claims) - sum(held.values())} are not decided: the 95 % interval over seeds holds 0 or another bound "
        "that the claim names, or too few seeds finished.",
        "Intervals are over seeds alone: they say nothing of other data sets or backbones, nor of what the search, "
        "which tries each setting with one seed, would choose another time, or had it chosen one that was as good. "
        "Counts have none. Runs are at the settings that our search found, fig-cka's too; those of the other figures "
        "are at the paper's.",
        "A mean over pairs leaves out those in which a run did not finish: most often it broke under a penalty, and "
        "would have been at its worst there.",
    ]
    rows = {name: [claim.to_row() for claim in group] for name, group in groups.items()}
    tables = [Table(name, list(some[0]), some) for name, some in rows.items()]
    results = [result for rows in (*main.values(), *other.values()) for row in rows for result in row.results]
    return Finding("claims", text, tables, results)
