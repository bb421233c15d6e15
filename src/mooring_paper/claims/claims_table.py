"""The table of all claims, with more seeds for those that the tables and figures do not decide."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_paper.changes import changed_seeds
from mooring_paper.claims import instability_claims, layer_claims
from mooring_paper.claims.claim import COLUMNS, Claim
from mooring_paper.claims.method_pairs import Evidence
from mooring_paper.claims.sequential_verdict import SEEDS_PER_LOOK, LookSchedule
from mooring_paper.claims.table_claims import at_both_settings, fresh_replay_claim, search_claims, table_claims
from mooring_paper.context.paper_context import PaperContext, unique_runs
from mooring_paper.context.scale import EXPLICIT, REPLAY, ROWS, Condition
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.tables.accuracy_tables import SECOND_ROWS, runs_at_our_settings, runs_at_paper_settings
from mooring_paper.tables.grid_search import search, search_conditions

INTERVALS_NOTE = (
    "Each claim is tested on its own: of twenty claims whose true difference equals the bound, one may be decided by "
    'chance. Intervals are over seeds only: they say nothing about other backbones. Counts have no interval. "Ours" '
    "uses the settings of our search for the tables and fig-cka, and the paper's settings for the other figures. "
    "Claims on the tables are tested again at the paper's own learning rates and strengths, with the seeds of the "
    "tables. A mean over pairs leaves out pairs in which a run did not finish, and the paper's mean beside it is over "
    "the same pairs of its tables. Most of these runs became unstable under a penalty, where its accuracy would have "
    "been lowest: what is left out favours the penalties."
)
"""What a reader should know of the intervals of all claims."""


def run(context: PaperContext) -> TargetResult:
    """Test every claim; add seeds to the rows of those that are not decided, until they are or have all seeds."""
    looks = LookSchedule.between(context.scale.seeds, context.scale.max_seeds)
    evidence, tables = Evidence(context, looks), Evidence(context, looks)  # the tables have no added seeds
    scale = context.scale
    papers = runs_at_paper_settings(context, scale.conditions(), ROWS)
    second_papers = runs_at_paper_settings(context, scale.second_conditions(), SECOND_ROWS)
    fresh_runs = _fresh_replay(context, papers)
    own, own_second, fresh = map(tables.rows, (papers, second_papers, fresh_runs))
    while True:
        main = evidence.rows(runs_at_our_settings(context, scale.conditions(), ROWS))
        second = evidence.rows(runs_at_our_settings(context, scale.second_conditions(), SECOND_ROWS))
        groups = {
            "The explicit step, penalties and replay": [
                *at_both_settings(table_claims(evidence, main, second), table_claims(tables, own, own_second)),
                *([fresh_replay_claim(tables, fresh)] if fresh else []),
            ],
            "Hyper-parameters": search_claims(search(context, search_conditions(context.scale))),
            "Instability": instability_claims.claims(evidence),
            "Layers, and the step itself": layer_claims.claims(evidence),
        }
        claims = [claim for group in groups.values() for claim in group]
        requests = [request for claim in claims for request in claim.wanted]
        if not requests:
            break
        evidence.add(requests)
    groups_of_rows = [
        ResultTable(name, COLUMNS, [claim.to_row() for claim in group]) for name, group in groups.items() if group
    ]
    rows = [row for table in (main, second) for methods in table.values() for row in methods.values()]
    compared = [*papers.values(), *second_papers.values(), *fresh_runs.values()]
    results = unique_runs([*(row.results for row in rows), evidence.results, *compared])
    return TargetResult("claims", [_seeds_text(looks, claims), INTERVALS_NOTE], groups_of_rows, results)


def _fresh_replay(context: PaperContext, papers: Mapping[Condition, Sequence[Result]]) -> dict[Condition, list[Result]]:
    """Return replay with fresh heads beside the explicit step, at the paper's settings; without conditions it lacks."""
    specs = {
        condition: [
            replace(run.spec, heads="fresh")
            for run in runs
            if run.spec.method in REPLAY and run.spec.seed < changed_seeds(context.scale, condition)
        ]
        for condition, runs in papers.items()
    }
    known = context.run_groups({c: group for c, group in specs.items() if group and context.has(group)})
    explicit = {c: [run for run in papers[c] if run.spec.method in EXPLICIT] for c in known}
    return {condition: [*results, *explicit[condition]] for condition, results in known.items()}


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
