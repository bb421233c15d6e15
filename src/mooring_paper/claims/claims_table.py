"""The table of all claims, with more seeds for those that the tables and figures do not decide."""

from collections.abc import Sequence

from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_paper.claims import instability_claims, layer_claims
from mooring_paper.claims.claim import COLUMNS, Claim
from mooring_paper.claims.method_pairs import Evidence
from mooring_paper.claims.sequential_verdict import SEEDS_PER_LOOK, LookSchedule
from mooring_paper.claims.table_claims import search_claims, table_claims
from mooring_paper.context.paper_context import PaperContext, paper_setting, unique_runs
from mooring_paper.context.scale import EXPLICIT, REGULARIZERS, ROWS, Condition
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.published.published_numbers import published_setting
from mooring_paper.tables.accuracy_tables import SECOND_ROWS, runs_at_our_settings
from mooring_paper.tables.grid_search import search, search_conditions

INTERVALS_NOTE = (
    "Each claim is tested on its own: of twenty claims whose true difference equals the bound, one may be decided by "
    "chance. Intervals are over seeds only; seeds take the backbones in turn, so that they say nothing about other "
    "backbones. Counts have no interval. Runs of the tables and of fig-cka use the settings of our search, those of "
    "the other figures use the paper's settings. A mean over pairs leaves out pairs in which a run did not finish, and "
    "the paper's mean beside it is over the same pairs of its tables. Most of these runs became unstable under a "
    "penalty, where its accuracy would have been lowest."
)
"""What a reader should know of the intervals of all claims."""


def run(context: PaperContext) -> TargetResult:
    """Test every claim; add seeds to the rows of those that are not decided, until they are or have all seeds."""
    looks = LookSchedule.between(context.scale.seeds, context.scale.max_seeds)
    evidence = Evidence(context, looks)
    while True:
        main = evidence.rows(runs_at_our_settings(context, context.scale.conditions(), ROWS))
        second = evidence.rows(runs_at_our_settings(context, context.scale.second_conditions(), SECOND_ROWS))
        own = Evidence(context, looks).rows(_runs_at_paper_settings(context))  # without the seeds that were added
        groups = {
            "The explicit step, penalties and replay": table_claims(evidence, main, second, own),
            "Hyper-parameters": search_claims(search(context, search_conditions(context.scale))),
            "Instability": instability_claims.claims(evidence),
            "Layers, and the step itself": layer_claims.claims(evidence),
        }
        claims = [claim for group in groups.values() for claim in group]
        requests = [request for claim in claims for request in claim.wanted]
        if not requests:
            break
        evidence.add(requests)
    tables = [
        ResultTable(name, COLUMNS, [claim.to_row() for claim in group]) for name, group in groups.items() if group
    ]
    rows = [row for table in (main, second) for methods in table.values() for row in methods.values()]
    results = unique_runs([*(row.results for row in rows), evidence.results])
    return TargetResult("claims", [_seeds_text(looks, claims), INTERVALS_NOTE], tables, results)


def _runs_at_paper_settings(context: PaperContext) -> dict[Condition, list[Result]]:
    """Return the runs of penalties and explicit steps in the first regime that the main table has at those settings."""
    scale = context.scale
    specs = {
        condition: [
            spec
            for name in (*REGULARIZERS, *EXPLICIT)
            if published_setting(*condition.where, name) is not None
            for spec in context.seed_specs(condition, name, paper_setting(scale, condition, name))
        ]
        for condition in scale.conditions()
        if condition.regime == scale.regimes[0]
    }
    return context.run_groups(specs)


def _seeds_text(looks: LookSchedule, claims: Sequence[Claim]) -> str:
    """Return how many seeds there are, how often a claim is looked at, and the intervals that follow."""
    first, last = looks.seeds[0], looks.seeds[-1]
    confidence = f"{100 * looks.confidence():.4g} %"
    if len(looks.seeds) == 1:
        return (
            f"Every claim has the {pluralize(first, 'seed')} of the tables and figures. Intervals are at {confidence}."
        )
    more = [claim for claim in claims if claim.seeds and max(claim.seeds) > first]
    decided = sum(claim.verdict != "not decided" for claim in more)
    return (
        f"A claim whose interval over {pluralize(first, 'seed')} contains the bound gets more, {SEEDS_PER_LOOK} at "
        f"a time, up to {last}: {pluralize(len(more), 'claim')} got more, and {decided} of them were decided. The "
        f"paper has 5 seeds; the others are an addition. A claim is looked at up to {len(looks.seeds)} times, so each "
        f"interval is at {confidence}: together they decide a claim whose true difference equals the bound in at most "
        "5 % of cases (Bonferroni)."
    )
