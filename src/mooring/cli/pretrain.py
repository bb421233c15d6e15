"""`mooring pretrain`: a backbone for streams to start from."""

from pathlib import Path
from typing import Annotated

import typer

from mooring.cli.bar import progress_bar
from mooring.cli.options import AsJson, StreamFlags, spread
from mooring.cli.tables import as_json
from mooring.errors import MooringError
from mooring.lab.files import check_writable
from mooring.lab.networks import backbone
from mooring.lab.pretraining import Pretraining
from mooring.lab.pretraining import pretrain as teach
from mooring.lab.streams.options import open_stream
from mooring.lab.study import checked_device

__all__ = ["pretrain"]


@spread
def pretrain(
    streams: StreamFlags,
    out: Annotated[Path, typer.Option("--out", help="Where the backbone goes.", metavar="FILE")] = Path(
        "backbone.safetensors"
    ),
    network: Annotated[str, typer.Option("--network", help="As in `mooring compare`.")] = "cnn6",
    seed: Annotated[int, typer.Option("--seed", help="Of start, order and flips.")] = 0,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the data set.")] = 60,
    lr: Annotated[float, typer.Option("--lr", help="A tenth after 5/12 of the epochs, a hundredth after 10/12.")] = 0.1,
    batch: Annotated[int, typer.Option("--batch", help="Samples in a batch.")] = 128,
    momentum: Annotated[float, typer.Option("--momentum", help="Of SGD.")] = 0.9,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of SGD.")] = 1e-4,
    flips: Annotated[bool, typer.Option("--flips/--no-flips", help="Mirror half of the images.")] = True,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    json: AsJson = False,
) -> None:
    """Teach a backbone every class of a stream at once; `mooring compare --init FILE` starts from it."""
    settings = Pretraining(network, seed, epochs, lr, batch, momentum, weight_decay, flips)
    backbone(network)
    asked = streams.options()
    if len(asked) > 1:
        raise MooringError(f"a backbone is taught on one stream, not on {len(asked)}")
    if out.is_dir():
        raise MooringError(f"{out} is a folder: give a file for the backbone, such as {out / 'backbone.safetensors'}")
    checked_device(device)
    check_writable(out.parent, make=False)
    with progress_bar() as shown:
        stream = open_stream(asked[0], shown)
        check_writable(out.parent)
        accuracy = teach(stream, settings, out, device=device, report=shown)
    told = {"backbone": str(out), "accuracy": accuracy}
    typer.echo(as_json(told) if json else f"{out}: {accuracy:.2f} % on the test images")
