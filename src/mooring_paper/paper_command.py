"""`mooring paper`: reproduce the paper's tables, figures and claims."""

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mooring.errors import MooringError, unknown
from mooring_lab.cli.flags import AsJson, StudyFlags, option, with_option_groups
from mooring_lab.cli.output import command_line, open_study
from mooring_lab.cli.pretrain_command import interruptible
from mooring_lab.cli.progress_bar import progress_bar
from mooring_lab.cli.terminal_tables import as_json
from mooring_lab.model.atomic_files import check_writable
from mooring_lab.model.precision import deterministic
from mooring_lab.streams.progress_callback import ProgressCallback
from mooring_lab.study.store import lock_study
from mooring_paper.backbone_plan import BackbonePlan, backbone_folder, plan_backbones
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import MINIATURE, PAPER
from mooring_paper.page.page_writer import write_page
from mooring_paper.page.verdict import verdict_sentences
from mooring_paper.targets import TARGETS, run_targets, select_targets

TRAINING_DEVICES = ("cpu", "cuda")
TARGET_LIST = "; ".join(f"{target.name}: {target.summary}" for target in TARGETS.values())
TARGET_HELP = f"all, or some of {TARGET_LIST}; or a number of the paper, such as fig3, table2 or eq4."


@with_option_groups
def paper(
    flags: StudyFlags,
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help=TARGET_HELP)],
    data: Annotated[
        Path | None,
        option("A folder with cifar100/, flowers102/, ... in it, and cifar10/ for backbones.", metavar="DIR"),
    ] = None,
    sets: Annotated[str, option("Only these data sets, separated by commas.")] = "",
    init: Annotated[
        list[Path] | None,
        option("A backbone to start from; if there are several, each seed takes the next.", metavar="FILE"),
    ] = None,
    other_init: Annotated[list[Path] | None, option("The same for the second network.", metavar="FILE")] = None,
    recipe: Annotated[
        str,
        option(
            "How to pre-train backbones on cifar10 if --init is not given: paper, strong, or none for random weights."
        ),
    ] = "paper",
    second_seeds: Annotated[
        int | None, option("Backbones of the second network to pre-train; one for each seed by default.", min=1)
    ] = None,
    seeds: Annotated[int | None, option("How many seeds; the paper has 5.", min=1)] = None,
    max_seeds: Annotated[
        int | None,
        option("Add seeds up to this number for undecided claims; 20 by default, as many as --seeds for none."),
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
    select_targets(targets)  # refuse a wrong name before a missing folder
    names = tuple(name.strip() for name in sets.split(",") if name.strip())
    scale = (MINIATURE if miniature else PAPER).with_data(data, names).with_seeds(seeds, max_seeds)
    selected = select_targets(targets, scale.missing_data)
    check_writable(out, create=False)
    if scale.second_network == scale.network:
        for name, value in (("--other-init", other_init), ("--second-seeds", second_seeds)):
            if value:
                raise MooringError(f"{name} is for a second network, and this scale has only one: give --init")
    backbones = {scale.second_network: other_init or [], scale.network: init or []}
    backbones = {network: paths for network, paths in backbones.items() if paths}
    plan = plan_backbones(selected, scale, recipe, given=backbones, second_seeds=second_seeds)
    study = open_study(flags)
    context = PaperContext(study, scale, backbones, trained_on)
    _pretrain(plan, context, flags)
    results = run_targets(selected, context)
    study.store.log(command_line())
    files = [*(init or []), *(other_init or []), flags.study]
    page = write_page(results, out, context, command=_portable_command(data, files))
    if json:
        typer.echo(as_json({"page": str(page), "findings": [result.to_json() for result in results]}))
        return
    sentences = [f"{result.name}: {sentence}" for result in results for sentence in result.text]
    typer.echo("\n".join([*verdict_sentences(results), *sentences]).replace("**", ""))
    typer.echo(f"results: {study.store.path}\npage:    {page}")


def _pretrain(plan: BackbonePlan, context: PaperContext, flags: StudyFlags) -> None:
    """Pre-train the backbones of a plan into a folder next to the study; an interrupted call continues."""
    options = context.scale.pretraining
    if not plan or options is None:
        return
    study, notes = context.study, list[str]()
    study.store.check_writable()
    stream = study.open(options)
    check_writable(study.store.path.parent)
    with ExitStack() as stack:
        stack.enter_context(lock_study(study.store.path, wait=flags.wait))
        stack.enter_context(deterministic(flags.deterministic))
        show = None if flags.quiet else _announced(stack.enter_context(progress_bar()))
        report = stack.enter_context(interruptible(show))
        plan.pretrain(stream, context, backbone_folder(study.store.path), report=report, note=notes.append)
    for line in notes:
        print(f"note: {line}", file=sys.stderr)


def _announced(progress: ProgressCallback) -> ProgressCallback:
    """Return a callback that also prints a line for each piece of work where no bar is shown."""
    seen: set[str] = set()

    def report(what: str, done: int, total: int | None) -> None:
        if what not in seen and not sys.stderr.isatty():
            print(what, file=sys.stderr, flush=True)
        seen.add(what)
        progress(what, done, total)

    return report


def _portable_command(data: Path | None, files: list[Path]) -> str:
    """Return the command for another machine: without local folders, and training instead of reading results."""
    names = {str(path): path.name for path in files} | ({str(data): "DIR"} if data else {})
    words = sys.argv[1:]
    for path, name in names.items():
        words = [name if word == path else word.replace(f"={path}", f"={name}") for word in words]
    return shlex.join(["mooring", *(word.replace("--trained-on", "--device") for word in words)])
