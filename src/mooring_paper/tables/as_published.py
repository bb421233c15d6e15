"""The methods as the authors' public code defines them, at the paper's settings, next to the paper's numbers."""

from dataclasses import replace

from mooring_lab.model.spec import RunSpec
from mooring_paper.context.paper_context import PaperContext, paper_setting, unique_runs
from mooring_paper.context.scale import PUBLISHED_CODE, PUBLISHED_SUFFIX, Condition
from mooring_paper.context.target_result import TargetResult
from mooring_paper.tables.accuracy_tables import AS_PUBLISHED, CODE_WIDTHS, condition_table, second_specs

NOT_RUN = "Not run yet: `mooring paper as-published` trains the methods of the authors' public code."


def run(context: PaperContext) -> TargetResult:
    """Train the published definitions in the main table, and the second one with the widths of the published ResNet.

    Tables without stored runs are left out where nothing is trained.
    """
    scale = context.scale
    specs = {(condition, AS_PUBLISHED): _specs(context, condition) for condition in scale.conditions()}
    if scale.code_network in context.backbones:
        for condition in scale.second_conditions():
            own = [replace(spec, network=scale.code_network) for spec in second_specs(context, condition)]
            specs[condition, CODE_WIDTHS] = [context.with_seed(spec, spec.seed) for spec in own]
    runs = context.run_groups({key: group for key, group in specs.items() if group and context.has(group)})
    tables = [condition_table(condition, results, settings) for (condition, settings), results in runs.items()]
    return TargetResult("as-published", [] if tables else [NOT_RUN], tables, unique_runs(runs.values()))


def _specs(context: PaperContext, condition: Condition) -> list[RunSpec]:
    """Return the runs of every method that the code defines otherwise, one for each seed."""
    return [
        replace(spec, method=f"{method}{PUBLISHED_SUFFIX}")
        for method in PUBLISHED_CODE
        for spec in context.seed_specs(condition, method, paper_setting(context.scale, condition, method))
    ]
