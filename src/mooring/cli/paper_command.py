"""`mooring paper`: reproduce the paper's tables, figures and claims."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.flags import AsJson, StudyFlags, option, with_option_groups
from mooring.cli.output import command_line, open_study
from mooring.cli.terminal_tables import as_json
from mooring.errors import MooringError, unknown
from mooring.lab.model.atomic_files import check_writable
from mooring.lab.model.plurals import pluralize
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import MINIATURE, PAPER, Scale
from mooring.paper.reproduction_page import add_table_notes, write_page
from mooring.paper.targets import TARGETS, Target, run_targets, select_targets, training_cost

TRAINING_DEVICES = ("cpu", "cuda")
TARGET_LIST = "; ".join(f"{target.name}: {target.summary}" for target in TARGETS.values())


@with_option_groups
def paper(
    flags: StudyFlags,
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help=f"all, or some of {TARGET_LIST}.")],
    data: Annotated[Path | None, option("A folder with cifar100/, flowers102/, ... in it.", metavar="DIR")] = None,
    sets: Annotated[str, option("Only these data sets, separated by commas.")] = "",
    regimes: Annotated[
        str, option("Only these regimes of 1-epoch and 30-epochs in the main table, separated by commas.")
    ] = "",
    init: Annotated[
        list[Path] | None, option("A backbone to start from; seeds take several in turn.", metavar="FILE")
    ] = None,
    other_init: Annotated[list[Path] | None, option("The same for the second network.", metavar="FILE")] = None,
    instead: Annotated[
        Path | None, option("Another backbone, whose effect `reasons` measures.", metavar="FILE")
    ] = None,
    seeds: Annotated[int | None, option("How many seeds; the paper has 5.", min=1)] = None,
    max_seeds: Annotated[
        int | None, option("Up to how many seeds undecided claims get, 20 by default; as many as --seeds adds none.")
    ] = None,
    rescore: Annotated[
        int | None, option("Score the best settings of the search again, with this many seeds.", min=2)
    ] = None,
    miniature: Annotated[
        bool, option("Run a small version of everything on the embedded digits.", "--miniature")
    ] = False,
    trained_on: Annotated[str | None, option("Read results that were trained on this device: cpu or cuda.")] = None,
    out: Annotated[Path, option("The folder of the page.", metavar="DIR")] = Path("reproduction"),
    json: AsJson = False,
) -> None:
    """Reproduce the paper: train what has no result yet, and write a page that compares our numbers with its own."""
    if trained_on not in (None, *TRAINING_DEVICES):
        raise unknown("device for --trained-on", trained_on, TRAINING_DEVICES)
    selected = select_targets(targets)
    scale = (MINIATURE if miniature else PAPER).with_data(data, _names(sets)).with_regimes(_names(regimes))
    scale = scale.with_seeds(seeds, max_seeds, rescore)
    check_writable(out, create=False)
    if other_init and scale.second_network == scale.network:
        raise MooringError("--other-init is for a second network, and this scale has only one: give --init")
    study = open_study(flags)
    backbones = {scale.second_network: other_init or [], scale.network: init or []}
    backbones = {network: paths for network, paths in backbones.items() if paths}
    context = PaperContext(study, scale, backbones, trained_on, instead)
    if not flags.quiet:
        print(_cost_line(selected, scale), file=sys.stderr)
    results = add_table_notes(run_targets(selected, context))
    study.store.log(command_line())
    files = [*(init or []), *(other_init or []), *filter(None, [instead]), flags.study]
    page = write_page(results, out, context, command=_portable_command(data, files))
    if json:
        typer.echo(as_json({"page": str(page), "findings": [result.to_json() for result in results]}))
        return
    for result in results:
        typer.echo("\n".join([f"{result.name}:", *(f"  {line}" for line in result.text)]))
    typer.echo(f"results: {study.store.path}\npage:    {page}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _portable_command(data: Path | None, files: list[Path]) -> str:
    """Return the command for another machine: without local folders, and training instead of reading results."""
    names = {str(path): path.name for path in files} | ({str(data): "DIR"} if data else {})
    words = sys.argv[1:]
    for path, name in names.items():
        words = [name if word == path else word.replace(f"={path}", f"={name}") for word in words]
    return shlex.join(["mooring", *(word.replace("--trained-on", "--device") for word in words)])


def _cost_line(targets: list[Target], scale: Scale) -> str:
    """Return a line with an upper bound on what will be trained."""
    costs = {name: cost for name, cost in training_cost(targets, scale).items() if cost.models}
    by_target = ", ".join(f"{name} {cost.models}" for name, cost in costs.items())
    total = pluralize(sum(cost.models for cost in costs.values()), "model")
    steps = sum(cost.steps for cost in costs.values())
    if not steps:
        return f"{total} to train"
    work = f"{total} on {', '.join(scale.streams)}, about {steps:.2g} iterations in total ({by_target})"
    return f"at most {work}; existing results are reused"
