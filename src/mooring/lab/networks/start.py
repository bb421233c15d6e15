"""Where a run's network starts: drawn by the run's own seed, or from weights in a file."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.lab.networks import build
from mooring.lab.networks.headed import Headed
from mooring.lab.order import generator
from mooring.lab.streams.stream import Stream

__all__ = ["Weights", "read_weights", "start"]


@dataclass(frozen=True)
class Weights:
    """A backbone's weights from a file.

    Attributes:
        path: where they came from.
        fingerprint: of the file's bytes.
        tensors: by parameter and buffer name.
    """

    path: str
    fingerprint: str
    tensors: dict[str, Tensor]


def read_weights(path: Path | str) -> Weights:
    """The weights in a safetensors file.

    Args:
        path: such as `mooring pretrain` writes.
    """
    try:
        digest = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
        return Weights(str(path), digest, load_file(path))
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MooringError(f"{path} is not a safetensors file that can be read: {reason}") from error


def start(
    network: str, stream: Stream, seed: int, *, dtype: torch.dtype = torch.float32, weights: Weights | None = None
) -> Headed:
    """The network of that name for a stream, as a run of that seed begins with it. Global random state stays put.

    Args:
        network: a name, or `package.module:function`.
        stream: whose images and heads it is for.
        seed: the run's.
        dtype: of the parameters.
        weights: what the backbone starts from instead of random numbers.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> one, other = start("mlp", stream, seed=1), start("mlp", stream, seed=1)
        >>> bool((one.heads[1].weight == other.heads[1].weight).all())
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "start").initial_seed())
        made = build(network, stream)
    if weights is not None:
        _load(made.backbone, weights, network)
    return made.to(dtype)


def _load(backbone: nn.Module, weights: Weights, network: str) -> None:
    """Every tensor of the backbone from the file; what else the file has, such as an old classifier, is not needed."""
    wanted = backbone.state_dict()
    for name, tensor in wanted.items():
        found = weights.tensors.get(name)
        if found is None or found.shape != tensor.shape:
            has = "is missing" if found is None else f"has shape {tuple(found.shape)}, not {tuple(tensor.shape)}"
            raise MooringError(f"{weights.path} does not fit network {network!r}: {name!r} {has}")
    backbone.load_state_dict({name: weights.tensors[name] for name in wanted})
