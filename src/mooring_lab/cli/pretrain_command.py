"""`mooring pretrain`: backbones that streams start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooring.errors import MooringError
from mooring_lab.cli.flags import (
    DTYPE_HELP,
    SCHEDULE_HELP,
    AsJson,
    Deterministic,
    Device,
    StreamFlags,
    option,
    with_option_groups,
)
from mooring_lab.cli.terminal_tables import as_json

if TYPE_CHECKING:
    from mooring_lab.streams.progress_callback import ProgressCallback


@with_option_groups
def pretrain(
    stream_flags: StreamFlags,
    out: Annotated[
        Path,
        option("The file to write; if there are several backbones, NAME-SEED.safetensors for each.", metavar="FILE"),
    ] = Path("backbone.safetensors"),
    network: Annotated[str, option("mlp, cnn6, resnet18-third, or package.module:function.")] = "cnn6",
    seed: Annotated[int, option("Seed of initial weights, order, flips and shifts.")] = 0,
    seeds: Annotated[int, option("Number of backbones to train at once: --seed and the seeds after it.")] = 1,
    recipe: Annotated[
        str,
        option(
            "The settings to start from, which the options below override: paper (60 epochs in steps, no shifts) or "
            "strong (30 epochs of cosine, shifts of 4 pixels, more weight decay)."
        ),
    ] = "paper",
    epochs: Annotated[int | None, option("Epochs over the data set.")] = None,
    lr: Annotated[float | None, option("The learning rate that the schedule starts from.")] = None,
    schedule: Annotated[str | None, option(SCHEDULE_HELP, metavar="NAME")] = None,
    batch: Annotated[int | None, option("Samples per batch; 128 by default.")] = None,
    optimizer: Annotated[
        str | None,
        option("sgd, the default, or adamw, which needs a smaller --lr than the recipes have, such as 0.001."),
    ] = None,
    momentum: Annotated[float | None, option("Momentum of SGD, or first beta of AdamW; 0.9 by default.")] = None,
    weight_decay: Annotated[float | None, option("Weight decay of the optimizer.")] = None,
    flips: Annotated[
        bool | None, option("Mirror each image with probability 1/2, as both recipes do.", "--flips/--no-flips")
    ] = None,
    shifts: Annotated[int | None, option("Shift each image by up to this many pixels, padded with black.")] = None,
    dtype: Annotated[str, option(DTYPE_HELP)] = "auto",
    device: Device = "cpu",
    deterministic: Deterministic = False,
    json: AsJson = False,
) -> None:
    """Run `mooring pretrain`."""
    from mooring_lab.cli.progress_bar import progress_bar
    from mooring_lab.model.atomic_files import check_writable
    from mooring_lab.model.precision import deterministic as deterministic_mode
    from mooring_lab.networks import backbone_factory
    from mooring_lab.streams.options import open_stream
    from mooring_lab.study import pretraining
    from mooring_lab.study.study import check_device

    settings = pretraining.settings_by_recipe(
        recipe,
        network=network,
        seed=seed,
        seeds=seeds,
        epochs=epochs,
        lr=lr,
        schedule=schedule,
        batch=batch,
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=weight_decay,
        flips=flips,
        shifts=shifts,
        dtype=dtype,
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
        with interruptible(progress) as report, deterministic_mode(deterministic):
            backbones = pretraining.pretrain(stream, settings, out, device=device, report=report, note=notes.append)
    for line in notes:
        typer.echo(f"note: {line}", err=True)
    if json:  # an object for one backbone and a list for several
        entries = [
            {"backbone": str(b.path), "recipe": recipe, "seed": b.seed, "accuracy": b.accuracy} for b in backbones
        ]
        typer.echo(as_json(entries if len(entries) > 1 else entries[0]))
        return
    for backbone in backbones:
        typer.echo(f"{backbone.path}: {backbone.accuracy:.2f} % on the test images")


@contextmanager
def interruptible(progress: ProgressCallback | None) -> Iterator[ProgressCallback]:
    """Give a callback for pre-training that reports progress, if asked, and stops after Ctrl-C or SIGTERM."""
    from mooring_lab.engines.signals import InterruptedStudyError, stop_on_signal

    with stop_on_signal() as stop:

        def report(what: str, done: int, total: int | None) -> None:
            if stop.asked:
                saved = "interrupted; every finished epoch is saved, and the same command continues from there"
                raise InterruptedStudyError(saved, stop.error().status)
            if progress is not None:
                progress(what, done, total)

        yield report
