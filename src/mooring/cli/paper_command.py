"""`mooring paper`: the paper's tables, figures and claims, ours beside theirs."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.option_groups import AsJson, StudyFlags, spread
from mooring.cli.output import command_line, opened
from mooring.cli.terminal_tables import as_json
from mooring.errors import MooringError, unknown
from mooring.lab.model.atomic_files import check_writable
from mooring.lab.model.plurals import pluralize
from mooring.paper.ablations.explained import explained
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import MINIATURE, PAPER, Scale
from mooring.paper.page.cost import cost
from mooring.paper.page.reproduction_page import write_findings
from mooring.paper.schedule import findings_of
from mooring.paper.targets import TARGETS, Target, chosen

__all__ = ["paper"]

TRAINED_ON = ("cpu", "cuda")


def _listed() -> str:
    return "; ".join(f"{target.name}: {target.line}" for target in TARGETS.values())


@spread
def paper(
    kept: StudyFlags,
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help=f"all, or some of {_listed()}.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="A folder with cifar100/, flowers102/, ... in it.", metavar="DIR")
    ] = None,
    sets: Annotated[str, typer.Option("--sets", help="Some of the data sets only, with commas.")] = "",
    regimes: Annotated[
        str, typer.Option("--regimes", help="The main table in some of 1-epoch, 30-epochs only, with commas.")
    ] = "",
    init: Annotated[
        list[Path] | None,
        typer.Option(
            "--init", help="A backbone to start from; several are taken in turn by the seeds.", metavar="FILE"
        ),
    ] = None,
    other_init: Annotated[
        list[Path] | None, typer.Option("--other-init", help="The same for the second network.", metavar="FILE")
    ] = None,
    instead: Annotated[
        Path | None,
        typer.Option("--instead", help="Another backbone, whose effect `reasons` measures.", metavar="FILE"),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="How many; 5 in the paper.", min=1)] = None,
    miniature: Annotated[bool, typer.Option("--miniature", help="Everything small, on the embedded digits.")] = False,
    trained_on: Annotated[
        str | None, typer.Option("--trained-on", help="Read results that were trained on that device: cpu or cuda.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Where the page goes.", metavar="DIR")] = Path("reproduction"),
    json: AsJson = False,
) -> None:
    """Reproduce the paper: train what has no result yet, and write ours beside theirs."""
    if trained_on not in (None, *TRAINED_ON):
        raise unknown("device for --trained-on", trained_on, TRAINED_ON)
    wanted = chosen(targets)
    asked = (MINIATURE if miniature else PAPER).on(data, _names(sets)).through(_names(regimes))
    scale = asked if seeds is None else replace(asked, seeds=seeds)
    check_writable(out, create=False)
    if other_init and scale.other == scale.network:
        raise MooringError("--other-init is for the second network, and there is one only: give --init")
    study = opened(kept)
    backbones = {scale.other: other_init or [], scale.network: init or []}
    lab = Laboratory(
        study, scale, {network: paths for network, paths in backbones.items() if paths}, trained_on, instead
    )
    if not kept.quiet:
        print(_cost(wanted, scale), file=sys.stderr)
    findings = explained(findings_of(wanted, lab))
    study.store.log(command_line())
    told = _elsewhere(data, [*(init or []), *(other_init or []), *filter(None, [instead]), kept.study])
    page = write_findings(findings, out, lab, command=told)
    if json:
        typer.echo(as_json({"page": str(page), "findings": [finding.to_json() for finding in findings]}))
        return
    for finding in findings:
        typer.echo("\n".join([f"{finding.name}:", *(f"  {line}" for line in finding.text)]))
    typer.echo(f"results: {study.store.path}\npage:    {page}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _elsewhere(data: Path | None, files: list[Path]) -> str:
    """The command as others type it: they keep their data and their backbones elsewhere, and have no results yet."""
    names = {str(path): path.name for path in files} | ({str(data): "DIR"} if data else {})
    words = sys.argv[1:]
    for path, name in names.items():
        words = [name if word == path else word.replace(f"={path}", f"={name}") for word in words]
    words = [word.replace("--trained-on", "--device") for word in words]  # they train
    return shlex.join(["mooring", *words])


def _cost(targets: list[Target], scale: Scale) -> str:
    """What there is to train at most, before the first model."""
    costs = {name: each for name, each in cost(targets, scale).items() if each.models}
    each = ", ".join(f"{name} {found.models}" for name, found in costs.items())
    total = pluralize(sum(found.models for found in costs.values()), "model")
    steps = sum(found.steps for found in costs.values())
    where = f"{', '.join(scale.streams)}, about {steps:.2g} iterations of one"
    return f"at most {total} on {where} ({each}); none is trained twice" if steps else f"{total} to train"
