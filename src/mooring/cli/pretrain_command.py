"""`mooring pretrain`: backbones that streams start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooring.cli.option_groups import (
    DETERMINISTIC_HELP,
    DEVICE_HELP,
    DTYPE_HELP,
    AsJson,
    StreamFlags,
    with_option_groups,
)
from mooring.cli.terminal_tables import as_json
from mooring.errors import MooringError

if TYPE_CHECKING:
    from mooring.lab.study.pretraining import PretrainedBackbone

__all__ = ["pretrain"]


@with_option_groups
def pretrain(
    stream_flags: StreamFlags,
    out: Annotated[
        Path,
        typer.Option("--out", help="The file of the backbone; several become NAME-SEED.safetensors.", metavar="FILE"),
    ] = Path("backbone.safetensors"),
    network: Annotated[str, typer.Option("--network", help="As in `mooring compare`.")] = "cnn6",
    seed: Annotated[int, typer.Option("--seed", help="Seed of initial weights, order, flips and shifts.")] = 0,
    seeds: Annotated[
        int, typer.Option("--seeds", help="Number of backbones to train at once: --seed and the seeds after it.")
    ] = 1,
    epochs: Annotated[int, typer.Option("--epochs", help="Epochs over the data set.")] = 60,
    lr: Annotated[float, typer.Option("--lr", help="The learning rate of the first epoch.")] = 0.1,
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            help="Learning rate: constant, steps (a tenth after 5/12 of all epochs, a hundredth after 10/12), cosine.",
        ),
    ] = "steps",
    batch: Annotated[int, typer.Option("--batch", help="Samples per batch.")] = 128,
    momentum: Annotated[float, typer.Option("--momentum", help="Momentum of SGD.")] = 0.9,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Weight decay of SGD.")] = 1e-4,
    flips: Annotated[bool, typer.Option("--flips/--no-flips", help="Mirror each image with probability 1/2.")] = True,
    shifts: Annotated[
        int, typer.Option("--shifts", help="Shift each image by up to this many pixels, padded with black.")
    ] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help=DTYPE_HELP)] = "auto",
    device: Annotated[str, typer.Option("--device", help=DEVICE_HELP)] = "cpu",
    deterministic: Annotated[bool, typer.Option("--deterministic", help=DETERMINISTIC_HELP)] = False,
    json: AsJson = False,
) -> None:
    """Run `mooring pretrain`."""
    from mooring.cli.progress_bar import progress_bar
    from mooring.lab.engines.signals import InterruptedStudyError, stop_on_signal
    from mooring.lab.model.atomic_files import check_writable
    from mooring.lab.model.precision import deterministic as deterministic_mode
    from mooring.lab.networks import backbone_factory
    from mooring.lab.streams.options import open_stream
    from mooring.lab.study import pretraining
    from mooring.lab.study.study import check_device

    settings = pretraining.Pretraining(
        network, seed, epochs, lr, batch, momentum, weight_decay, flips, shifts, schedule, seeds, dtype
    )
    backbone_factory(network)
    options = stream_flags.options()
    if len(options) > 1:
        raise MooringError(f"a backbone is trained on one stream, not on {len(options)}: give one --stream")
    for file in (out,) if out.is_dir() else settings.files(out).values():
        if file.is_dir():
            example = file / "backbone.safetensors"
            raise MooringError(f"{file} is a folder: give a file for the backbone, such as {example}")
    settings.on(check_device(device, deterministic=deterministic))
    check_writable(out.parent, create=False)
    notes: list[str] = []
    with progress_bar() as progress:
        stream = open_stream(options[0], progress)
        check_writable(out.parent)
        with stop_on_signal() as stop, deterministic_mode(deterministic):

            def report(what: str, done: int, total: int | None) -> None:
                if stop.asked:
                    saved = "interrupted; every finished epoch is saved, and the same command continues from there"
                    raise InterruptedStudyError(saved, stop.error().status)
                progress(what, done, total)

            backbones = pretraining.pretrain(stream, settings, out, device=device, report=report, note=notes.append)
    for line in notes:
        typer.echo(f"note: {line}", err=True)
    _print(backbones, json)


def _print(backbones: Sequence[PretrainedBackbone], json: bool) -> None:
    """Print each backbone and its accuracy; JSON is an object for one backbone and a list for several."""
    if json:
        entries = [
            {"backbone": str(backbone.path), "seed": backbone.seed, "accuracy": backbone.accuracy}
            for backbone in backbones
        ]
        typer.echo(as_json(entries if len(entries) > 1 else {k: entries[0][k] for k in ("backbone", "accuracy")}))
        return
    for backbone in backbones:
        typer.echo(f"{backbone.path}: {backbone.accuracy:.2f} % on the test images")
