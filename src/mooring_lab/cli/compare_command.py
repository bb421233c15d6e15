"""`mooring compare` and `mooring tune`: several methods on the same stream, the second by the paper's protocol.

That protocol searches on the first tasks, and then trains on the others.
"""

from dataclasses import asdict
from typing import Annotated

from mooring_lab.cli import flags
from mooring_lab.study.defaults import COMPARED_METHODS, LRS


@flags.with_option_groups
def compare(
    stream_flags: flags.StreamFlags,
    training_flags: flags.TrainingFlags,
    study_flags: flags.StudyFlags,
    output_flags: flags.OutputFlags,
    methods: flags.Methods = COMPARED_METHODS,
    seeds: flags.Seeds = "5",
    strength: Annotated[
        list[str] | None,
        flags.option(
            "Strengths to train with, separated by commas: NUMBERS for every method that has one, or METHOD=NUMBERS; "
            "repeatable.",
            metavar="NUMBERS",
        ),
    ] = None,
    lr: Annotated[
        list[str] | None,
        flags.option(
            "Learning rates, separated by commas: NUMBERS for every method, or METHOD=NUMBERS; repeatable.",
            metavar="NUMBERS",
        ),
    ] = None,
) -> None:
    """Run `mooring compare`."""
    from mooring_lab.cli.output import choose_baseline, command_line, open_study, print_results
    from mooring_lab.cli.parse import parse_numbers_by_method, parse_seeds
    from mooring_lab.study.comparison import comparison

    compared = comparison(
        stream_flags.options(),
        methods,
        parse_seeds(seeds),
        strength=parse_numbers_by_method("--strength", strength or []),
        lr=parse_numbers_by_method("--lr", lr or []),
        **asdict(training_flags),
    )
    study = open_study(study_flags, output_flags.report)
    rows = study.compare(compared, baseline=choose_baseline(output_flags.baseline, compared.methods))
    study.store.log(command_line())
    print_results(study, rows, output_flags)


@flags.with_option_groups
def tune(
    stream_flags: flags.StreamFlags,
    training_flags: flags.TrainingFlags,
    study_flags: flags.StudyFlags,
    output_flags: flags.OutputFlags,
    methods: flags.Methods = COMPARED_METHODS,
    seeds: flags.Seeds = "5",
    search_tasks: Annotated[int, flags.option("Tasks to search on; methods are then trained on the others.")] = 3,
    search_seeds: Annotated[str, flags.option("Seeds of the search: how many, or which.", metavar="SEEDS")] = "1",
    lrs: Annotated[str, flags.option("Learning rates to search.", metavar="NUMBERS")] = ",".join(
        f"{lr:g}" for lr in LRS
    ),
    strengths: Annotated[
        str,
        flags.option("Strengths to search; by default the paper's, or the method's own range.", metavar="NUMBERS"),
    ] = "",
) -> None:
    """Run `mooring tune`."""
    from mooring_lab.cli.output import choose_baseline, command_line, open_study, print_tuned
    from mooring_lab.cli.parse import parse_numbers, parse_seeds
    from mooring_lab.methods import resolve_methods
    from mooring_lab.study import protocol

    study = open_study(study_flags, output_flags.report)
    tuned = protocol.tune(
        study,
        tasks=search_tasks,
        lrs=parse_numbers("--lrs", lrs),
        strengths=parse_numbers("--strengths", strengths) if strengths else None,
        search_seeds=parse_seeds(search_seeds, "--search-seeds"),
        baseline=choose_baseline(output_flags.baseline, resolve_methods(methods)),
        stream=stream_flags.options(),
        methods=methods,
        seeds=parse_seeds(seeds),
        **asdict(training_flags),
    )
    study.store.log(command_line())
    print_tuned(study, tuned, output_flags)
