"""`mooring pretrain`: backbones for streams to start from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.option_groups import AsJson, StreamFlags, spread
from mooring.cli.progress_bar import progress_bar
from mooring.cli.terminal_tables import as_json
from mooring.errors import MooringError
from mooring.lab.engines.signals import InterruptedStudyError, stoppable
from mooring.lab.model.atomic_files import check_writable
from mooring.lab.model.determinism import deterministic as same_bits
from mooring.lab.networks import backbone_factory
from mooring.lab.streams.options import open_stream
from mooring.lab.study.pretraining import PretrainedBackbone, Pretraining
from mooring.lab.study.pretraining import pretrain as teach
from mooring.lab.study.study import checked_device

__all__ = ["pretrain"]


@spread
def pretrain(
    streams: StreamFlags,
    out: Annotated[
        Path,
        typer.Option("--out", help="Where the backbone goes; of several, NAME-SEED.safetensors.", metavar="FILE"),
    ] = Path("backbone.safetensors"),
    network: Annotated[str, typer.Option("--network", help="As in `mooring compare`.")] = "cnn6",
    seed: Annotated[int, typer.Option("--seed", help="Of start, order, flips and shifts.")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", help="How many backbones at once: --seed and those after it.")] = 1,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the data set.")] = 60,
    lr: Annotated[float, typer.Option("--lr", help="The learning rate of the first epoch.")] = 0.1,
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            help="The rate: constant, steps (a tenth after 5/12 of the epochs, a hundredth after 10/12) or cosine.",
        ),
    ] = "steps",
    batch: Annotated[int, typer.Option("--batch", help="Samples in a batch.")] = 128,
    momentum: Annotated[float, typer.Option("--momentum", help="Of SGD.")] = 0.9,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of SGD.")] = 1e-4,
    flips: Annotated[bool, typer.Option("--flips/--no-flips", help="Mirror half of the images.")] = True,
    shifts: Annotated[
        int, typer.Option("--shifts", help="Move each image by up to so many pixels; black comes in.")
    ] = 0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32 or float64; on a GPU also tf32 (the default there) and bf16.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits each time, on a GPU too; slower there.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Teach backbones every class of a stream at once; `mooring compare --init FILE` starts from one."""
    settings = Pretraining(
        network, seed, epochs, lr, batch, momentum, weight_decay, flips, shifts, schedule, seeds, dtype
    )
    backbone_factory(network)
    asked = streams.options()
    if len(asked) > 1:
        raise MooringError(f"a backbone is taught on one stream, not on {len(asked)}")
    for file in (out,) if out.is_dir() else settings.files(out).values():
        if file.is_dir():
            told = file / "backbone.safetensors"
            raise MooringError(f"{file} is a folder: give a file for the backbone, such as {told}")
    settings.on(checked_device(device, deterministic=deterministic))
    check_writable(out.parent, create=False)
    notes: list[str] = []
    with progress_bar() as shown:
        stream = open_stream(asked[0], shown)
        check_writable(out.parent)
        with stoppable() as stop, same_bits(deterministic):

            def report(what: str, done: int, whole: int | None) -> None:
                if stop.asked:
                    saved = "interrupted; every whole epoch is saved, and the same command continues from here"
                    raise InterruptedStudyError(saved, stop.error().status)
                shown(what, done, whole)

            taught = teach(stream, settings, out, device=device, report=report, note=notes.append)
    for line in notes:
        typer.echo(f"note: {line}", err=True)
    _tell(taught, json)


def _tell(taught: Sequence[PretrainedBackbone], json: bool) -> None:
    """One backbone alone, or a list of them."""
    if json:
        every = [{"backbone": str(each.path), "seed": each.seed, "accuracy": each.accuracy} for each in taught]
        typer.echo(as_json(every if len(every) > 1 else {k: every[0][k] for k in ("backbone", "accuracy")}))
        return
    for each in taught:
        typer.echo(f"{each.path}: {each.accuracy:.2f} % on the test images")
