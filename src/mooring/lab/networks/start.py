"""Where a run's network starts: drawn by the run's own seed, or from weights in a file."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.lab.model.order import seeded_generator
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks import BACKBONES, build_network
from mooring.lab.networks.headed import MultiHeadNetwork
from mooring.lab.streams.stream import Stream

__all__ = ["BackboneWeights", "initial_network", "initial_networks", "read_weights"]


@dataclass(frozen=True)
class BackboneWeights:
    """A backbone's weights from a file.

    Attributes:
        path: where they came from.
        fingerprint: of the tensors; what else is written in the file does not matter.
        tensors: by parameter and buffer name.
    """

    path: str
    fingerprint: str
    tensors: dict[str, Tensor]


def read_weights(path: Path | str) -> BackboneWeights:
    """The weights in a safetensors file.

    Args:
        path: such as `mooring pretrain` writes.
    """
    if Path(path).is_dir():
        raise MooringError(f"{path} is a folder: give a .safetensors file; `mooring pretrain` makes one")
    try:
        return BackboneWeights(str(path), _fingerprint(tensors := load_file(path)), tensors)
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MooringError(
            f"{path} is not a safetensors file that can be read: {reason}; `mooring pretrain` makes one"
        ) from error


def _fingerprint(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def initial_network(
    network: str,
    stream: Stream,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    weights: BackboneWeights | None = None,
) -> MultiHeadNetwork:
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
        >>> one, other = initial_network("mlp", stream, seed=1), initial_network("mlp", stream, seed=1)
        >>> bool((one.heads[1].weight == other.heads[1].weight).all())
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded_generator(seed, "start").initial_seed())
        made = _in_float32(network, stream)
    if weights is not None:
        _load(made.backbone, weights, network)
    return made.to(dtype)


def initial_networks(
    specs: Sequence[RunSpec], stream: Stream, dtype: torch.dtype, weights: Mapping[str, BackboneWeights]
) -> list[MultiHeadNetwork]:
    """The network that each run begins with; runs of one seed and one start share theirs, so it must not be changed.

    Args:
        specs: the runs, all of one network.
        stream: what they go through.
        dtype: of the parameters.
        weights: what backbones start from, by fingerprint.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> specs = [RunSpec("digits", stream.fingerprint, "plain", seed, lr=lr) for seed in (0, 1) for lr in (1, 2)]
        >>> len({id(network) for network in initial_networks(specs, stream, torch.float32, {})})
        2
    """
    made: dict[tuple[int, str], MultiHeadNetwork] = {}
    for spec in specs:
        given = weights.get(spec.init)
        if spec.init and given is None:
            raise MooringError(
                f"the weights {spec.init[:8]} that a run starts from are not here: give --init with their file"
            )
        if (spec.seed, spec.init) not in made:
            made[spec.seed, spec.init] = _kept(spec.network, stream, spec.seed, dtype, given)
    return [made[spec.seed, spec.init] for spec in specs]


KEPT = 32
"""How many networks stay at hand for other fleets; to draw one takes longer than a fleet has to spare."""

_KEPT: dict[Hashable, MultiHeadNetwork] = {}


def _kept(
    network: str, stream: Stream, seed: int, dtype: torch.dtype, weights: BackboneWeights | None
) -> MultiHeadNetwork:
    """What `initial_network` gives; one of ours that was made before is not made again."""
    if ":" in network:
        return initial_network(network, stream, seed, dtype=dtype, weights=weights)
    heads = len(stream.tasks) if stream.heads == "per task" else 1
    key = (
        network,
        BACKBONES.get(network),
        stream.shape,
        stream.outputs,
        heads,
        seed,
        dtype,
        weights and weights.fingerprint,
    )
    found = _KEPT.pop(key, None) or initial_network(network, stream, seed, dtype=dtype, weights=weights)
    _KEPT[key] = found  # the last that was asked for is the last to go
    if len(_KEPT) > KEPT:
        del _KEPT[next(iter(_KEPT))]
    return found


def _in_float32(network: str, stream: Stream) -> MultiHeadNetwork:
    """Drawn in float32 whatever the default is: a run does not depend on what happens around it."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return build_network(network, stream)
    finally:
        torch.set_default_dtype(usual)


def _load(backbone: nn.Module, weights: BackboneWeights, network: str) -> None:
    """Every tensor of the backbone from the file; what else the file has, such as an old classifier, is not needed."""
    wanted = backbone.state_dict()
    for name, tensor in wanted.items():
        found = weights.tensors.get(name)
        if found is None or found.shape != tensor.shape:
            has = "is missing" if found is None else f"has shape {tuple(found.shape)}, not {tuple(tensor.shape)}"
            raise MooringError(f"{weights.path} does not fit network {network!r}: {name!r} {has}")
    backbone.load_state_dict({name: weights.tensors[name] for name in wanted})
