"""Initial networks: random weights from the run's seed, or backbone weights from a file."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mooring.errors import MooringError, first_line
from mooring_lab.model.order import seeded_generator
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks import BACKBONES, build_network
from mooring_lab.networks.multi_head import MultiHeadNetwork
from mooring_lab.streams.stream import Stream


@dataclass(frozen=True)
class BackboneWeights:
    """A backbone's tensors from a file, by parameter or buffer name, and their hash, without the file's metadata."""

    path: str
    fingerprint: str
    tensors: dict[str, Tensor]


def read_weights(path: Path | str) -> BackboneWeights:
    """Read the weights of a safetensors file, such as `mooring pretrain` writes."""
    if Path(path).is_dir():
        raise MooringError(f"{path} is a folder: give a .safetensors file; `mooring pretrain` makes one")
    if not Path(path).exists():
        raise MooringError(f"there is no file {path}: `mooring pretrain` makes one with initial weights")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        reason = first_line(error)
        problem = f"is not a safetensors file that can be read: {reason}"
        raise MooringError(f"{path} {problem}; `mooring pretrain` makes one") from error
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return BackboneWeights(str(path), digest.hexdigest(), tensors)


def initial_network(
    network: str,
    stream: Stream,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    weights: BackboneWeights | None = None,
) -> MultiHeadNetwork:
    """Return the network that a run starts from; its parameters have the given dtype.

    The stream decides the image shape and the heads. The backbone's weights are random unless they are given. The
    global random state does not change.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> one, other = initial_network("mlp", stream, seed=1), initial_network("mlp", stream, seed=1)
        >>> bool((one.heads[1].weight == other.heads[1].weight).all())
        True
    """
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # the network does not depend on the caller's default dtype
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeded_generator(seed, "start").initial_seed())
            model = build_network(network, stream)
    finally:
        torch.set_default_dtype(default_dtype)
    if weights is not None:
        _load(model.backbone, weights, network)
    return model.to(dtype)


def initial_networks(
    specs: Sequence[RunSpec], stream: Stream, dtype: torch.dtype, weights: Mapping[str, BackboneWeights]
) -> list[MultiHeadNetwork]:
    """Return the network that each run starts from. Runs with equal seeds and weights share one: do not modify it.

    All runs have the same network. `weights` has the weights of backbones, by fingerprint.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> specs = [RunSpec("digits", stream.fingerprint, "plain", seed, lr=lr) for seed in (0, 1) for lr in (1, 2)]
        >>> len({id(network) for network in initial_networks(specs, stream, torch.float32, {})})
        2
    """
    networks: dict[tuple[int, str], MultiHeadNetwork] = {}
    for spec in specs:
        backbone = weights.get(spec.init)
        if spec.init and backbone is None:
            missing = f"the weights {spec.init[:8]}, which were not given"
            raise MooringError(f"a run starts from {missing}: give --init with their file")
        if (spec.seed, spec.init) not in networks:
            networks[spec.seed, spec.init] = _cached_network(spec.network, stream, spec.seed, dtype, backbone)
    return [networks[spec.seed, spec.init] for spec in specs]


MAX_CACHED_NETWORKS = 32
"""How many networks are kept for later fleets, because a new initialization is slow compared with a fleet's step."""

_CACHE: dict[Hashable, MultiHeadNetwork] = {}


def _cached_network(
    network: str, stream: Stream, seed: int, dtype: torch.dtype, weights: BackboneWeights | None
) -> MultiHeadNetwork:
    """Return `initial_network(...)`, from the cache if it is a network of this package that was made before."""
    if ":" in network:
        return initial_network(network, stream, seed, dtype=dtype, weights=weights)
    form = (network, BACKBONES.get(network), stream.shape, stream.outputs, stream.head_count)
    key = (form, seed, dtype, weights and weights.fingerprint)
    model = _CACHE.pop(key, None) or initial_network(network, stream, seed, dtype=dtype, weights=weights)
    _CACHE[key] = model  # at the end, so that the least recently used one is dropped first
    if len(_CACHE) > MAX_CACHED_NETWORKS:
        del _CACHE[next(iter(_CACHE))]
    return model


def _load(backbone: nn.Module, weights: BackboneWeights, network: str) -> None:
    """Load every tensor of the backbone; other tensors of the file, such as an old classifier, are ignored."""
    state = backbone.state_dict()
    for name, tensor in state.items():
        stored = weights.tensors.get(name)
        if stored is None or stored.shape != tensor.shape:
            problem = "is missing" if stored is None else f"has shape {tuple(stored.shape)}, not {tuple(tensor.shape)}"
            raise MooringError(f"{weights.path} does not fit network {network!r}: {name!r} {problem}")
    backbone.load_state_dict({name: weights.tensors[name] for name in state})
