"""`mooring pretrain`: backbones that streams start from."""

from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.flags import DTYPE_HELP, AsJson, Deterministic, Device, StreamFlags, option, with_option_groups
from mooring.cli.terminal_tables import as_json
from mooring.errors import MooringError


@with_option_groups
def pretrain(
    stream_flags: StreamFlags,
    out: Annotated[
        Path, option("The file of the backbone; several become NAME-SEED.safetensors.", metavar="FILE")
    ] = Path("backbone.safetensors"),
    network: Annotated[str, option("As in `mooring compare`.")] = "cnn6",
    seed: Annotated[int, option("Seed of initial weights, order, flips and shifts.")] = 0,
    seeds: Annotated[int, option("Number of backbones to train at once: --seed and the seeds after it.")] = 1,
    epochs: Annotated[int, option("Epochs over the data set.")] = 60,
    lr: Annotated[float, option("The learning rate of the first epoch.")] = 0.1,
    schedule: Annotated[
        str,
        option("Learning rate: constant, steps (a tenth after 5/12 of all epochs, a hundredth after 10/12), cosine."),
    ] = "steps",
    batch: Annotated[int, option("Samples per batch.")] = 128,
    momentum: Annotated[float, option("Momentum of SGD.")] = 0.9,
    weight_decay: Annotated[float, option("Weight decay of SGD.")] = 1e-4,
    flips: Annotated[bool, option("Mirror each image with probability 1/2.", "--flips/--no-flips")] = True,
    shifts: Annotated[int, option("Shift each image by up to this many pixels, padded with black.")] = 0,
    dtype: Annotated[str, option(DTYPE_HELP)] = "auto",
    device: Device = "cpu",
    deterministic: Deterministic = False,
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
            raise MooringError(f"{file} is a folder: give a file for the backbone, such as {file}/backbone.safetensors")
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
    if json:  # an object for one backbone and a list for several
        entries = [{"backbone": str(b.path), "seed": b.seed, "accuracy": b.accuracy} for b in backbones]
        typer.echo(as_json(entries if len(entries) > 1 else {k: entries[0][k] for k in ("backbone", "accuracy")}))
        return
    for backbone in backbones:
        typer.echo(f"{backbone.path}: {backbone.accuracy:.2f} % on the test images")
