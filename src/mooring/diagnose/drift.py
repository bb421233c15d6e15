"""Drift of a model by layer: of its parameters, and of its representations (CKA)."""

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import local_tensor, reduce_over_shards
from mooring.errors import MooringError
from mooring.state.selection import layer_of, module_names

__all__ = ["cka", "debiased_cka", "drift_by_layer", "gram", "likeness", "parameter_drift"]

FEATURE_BYTES = 1 << 30
"""Memory limit of the features collected in one pass over the inputs."""


def parameter_drift(parts: Iterable[tuple[str, Tensor, Tensor]]) -> dict[str, float]:
    """Return ||theta - anchor|| / ||anchor|| by layer; 0 if nothing moved, infinite if the anchor is zero.

    Args:
        parts: (name, parameter, anchor) of each parameter; the anchor of a sharded one is that of the local part.

    Example:
        >>> parameter_drift([("layer.weight", torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))])
        {'layer': 0.2}
    """
    names, thetas, squares = [], [], []
    for name, theta, anchor in parts:
        names.append(name)
        thetas.append(theta)
        d = local_tensor(theta).detach().double() - anchor.double()
        squares.append(torch.stack([d.square().sum(), anchor.double().square().sum()]))
    return drift_by_layer(zip(names, reduce_over_shards(squares, thetas), strict=True))


def drift_by_layer(squares: Iterable[tuple[str, Iterable[Any]]]) -> dict[str, float]:
    """Return what `parameter_drift` returns, from each parameter's name with ||theta - anchor||^2 and ||anchor||^2.

    Example:
        >>> drift_by_layer([("layer.weight", (9.0, 100.0)), ("layer.bias", (0.0, 0.0))])
        {'layer': 0.3}
    """
    sums: dict[str, list[float]] = {}
    for name, (d, anchor) in squares:
        layer = sums.setdefault(layer_of(name), [0.0, 0.0])
        layer[0] += float(d)
        layer[1] += float(anchor)
    return {name: math.sqrt(d / size) if size else math.inf if d else 0.0 for name, (d, size) in sums.items()}


def debiased_cka(x: Tensor, y: Tensor) -> float:
    """Compute debiased linear CKA between two sets of features of the same inputs.

    HSIC_1(K, M) / sqrt(HSIC_1(K, K) * HSIC_1(M, M)) with K = x x', M = y y' and the unbiased estimator
    HSIC_1 = [tr(K~ M~) + (1'K~1)(1'M~1) / ((n-1)(n-2)) - 2 (1'K~M~1) / (n-2)] / (n (n-3)), where ~ has a zero diagonal.

    Args:
        x: features of shape (n, ...), n >= 4.
        y: features of shape (n, ...) of the same inputs.

    Returns:
        1 for features equal up to rotation and scale, about 0 for unrelated ones. It is an estimate, which may lie
        slightly outside [0, 1] for small n.

    Example:
        >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        >>> round(debiased_cka(x, 2 * x.flip(1)), 6)
        1.0
    """
    if x.shape[0] != y.shape[0]:
        raise MooringError(f"CKA compares features of the same inputs, not of {x.shape[0]} and {y.shape[0]}")
    if x.shape[0] < 4:
        raise MooringError(f"debiased CKA needs at least 4 inputs, not {x.shape[0]}")
    return float(likeness(gram(x), gram(y)))


@torch.no_grad()
def cka(
    model_a: nn.Module,
    model_b: nn.Module,
    inputs: Tensor | Iterable[Any],
    layers: str | Sequence[str] | None = None,
    *,
    batch_size: int = 256,
) -> dict[str, float]:
    """Compute debiased linear CKA between two models, layer by layer, over all inputs.

    The models run in eval mode, batch by batch, and do not change. The result does not depend on the batch size. If
    the features of all layers do not fit into memory at once, the inputs are read again for the next group of layers,
    so `inputs` must be a tensor, or an iterable that can be read more than once.

    Args:
        model_a: the first model, such as a copy from after the first task.
        model_b: the second model, with the same layer names.
        inputs: a tensor of inputs, or an iterable of batches, such as a DataLoader. Of a batch that is a tuple or list
            the first element is used.
        layers: names or glob patterns of modules; by default all that own parameters and run.
        batch_size: the batch size for a tensor of inputs.

    Returns:
        CKA by layer name, in the model's order.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> {name: round(value, 4) for name, value in cka(model, model, torch.randn(20, 4)).items()}
        {'0': 1.0, '2': 1.0}
    """
    names = remaining = _pick_layers(model_a, model_b, (layers,) if isinstance(layers, str) else layers)
    batches: Iterable[Any] = torch.split(inputs, batch_size) if isinstance(inputs, Tensor) else inputs
    if isinstance(batches, Iterator):
        raise MooringError(
            "cka: inputs is an iterator, which can be read only once: give a tensor, a list of batches or a DataLoader"
        )
    scores: dict[str, float] = {}
    while remaining:
        with torch.random.fork_rng():  # a DataLoader draws from the global random state
            features = _collect((model_a, model_b), batches, remaining)
        if not features and (layers is not None or not scores):
            raise MooringError(f"cka: layer {remaining[0]!r} gave no tensor (it may not have run): name other layers")
        scores |= {name: debiased_cka(*features[name]) for name in features}
        remaining = [name for name in remaining if name not in scores] if features else []
    return {name: scores[name] for name in names if name in scores}


def _pick_layers(model_a: nn.Module, model_b: nn.Module, layers: Sequence[str] | None) -> list[str]:
    modules, other = {name: m for name, m in module_names(model_a).items() if name}, module_names(model_b)
    owners = [name for name, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
    names = owners if layers is None else [n for n in modules if any(fnmatchcase(n, pattern) for pattern in layers)]
    for pattern in layers or ():
        if not any(fnmatchcase(n, pattern) for n in modules):
            raise MooringError(f"cka: no layer matches {pattern!r}; the layers are {', '.join(modules)}")
    for name in names:
        if name not in other:
            raise MooringError(f"cka: the second model has no layer {name!r}")
    if not names:
        raise MooringError("cka: the model has no layers with parameters: name the modules to compare")
    return names


def _collect(
    models: tuple[nn.Module, nn.Module], batches: Iterable[Any], names: list[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Collect the features over all batches, of as many of the first layers as fit into memory."""
    pieces: list[dict[str, list[Tensor]]] = [{}, {}]
    total = len(batches) if isinstance(batches, Sized) else 16
    wanted: list[str] | None = None
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(x, Tensor):
            raise MooringError(f"cka: a batch is a {type(x).__name__}: give tensors, or tuples that start with one")
        for model, kept in zip(models, pieces, strict=True):
            for name, feature in _features(model, x, names if wanted is None else wanted).items():
                kept.setdefault(name, []).append(feature)
        if wanted is None:  # estimate from the first batch how many layers fit; keep at least one
            both = [name for name in names if all(name in kept for kept in pieces)]
            used = accumulate(sum(kept[name][0].nbytes for kept in pieces) * total for name in both)
            wanted = [name for name, size in zip(both, used, strict=True) if size <= FEATURE_BYTES] or both[:1]
            pieces = [{name: kept[name] for name in wanted} for kept in pieces]
    if wanted is None:
        raise MooringError("debiased CKA needs at least 4 inputs, not 0")
    return {name: (torch.cat(pieces[0][name]), torch.cat(pieces[1][name])) for name in wanted}


def _features(model: nn.Module, x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the flattened outputs of the named modules for one batch, in eval mode."""
    features: dict[str, Tensor] = {}
    modes = [(module, module.training) for module in model.modules()]

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple | list) else output
        if isinstance(output, Tensor):
            rows = output.unsqueeze(1) if output.ndim == 1 else output.flatten(1)
            dtype = torch.promote_types(output.dtype, torch.float32)
            features[name] = rows.to(dtype, copy=True)  # the next layer may work in place

    modules = module_names(model)
    handles = [modules[name].register_forward_hook(partial(keep, name)) for name in names]
    try:
        model.eval()
        model(x.to(next((p.device for p in model.parameters()), x.device)))
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return features


def likeness(k: Tensor, m: Tensor) -> Tensor:
    """Compute debiased CKA from two results of `gram` of shape (..., n, n); NaN if one of them does not vary.

    Example:
        >>> x = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0))  # three models at once
        >>> likeness(gram(x, 1), gram(2 * x, 1))
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    scale = (_hsic(k, k).clamp(min=0) * _hsic(m, m).clamp(min=0)).sqrt()
    return torch.where(scale > 0, _hsic(k, m) / scale, torch.nan)


def gram(x: Tensor, leading: int = 0) -> Tensor:
    """Return x x' of centred features with a zero diagonal; centring only reduces rounding errors.

    Args:
        x: features of shape (..., n, ...).
        leading: the number of dimensions before n.

    Example:
        >>> gram(torch.tensor([1.0, 2.0, 6.0]))
        tensor([[ 0.,  2., -6.],
                [ 2.,  0., -3.],
                [-6., -3.,  0.]], dtype=torch.float64)
    """
    x = x.reshape(*x.shape[: leading + 1], -1)
    x = x - x.mean(-2, keepdim=True)
    k = (x @ x.mT).double()
    k.diagonal(dim1=-2, dim2=-1).zero_()
    return k


def _hsic(k: Tensor, m: Tensor) -> Tensor:
    """Compute the unbiased estimator HSIC_1 from matrices with zero diagonals."""
    n = k.shape[-1]
    rows_k, rows_m = k.sum(-2), m.sum(-2)
    both, cross = (k * m).sum((-2, -1)), (rows_k * rows_m).sum(-1)
    value = both + rows_k.sum(-1) * rows_m.sum(-1) / ((n - 1) * (n - 2)) - 2 * cross / (n - 2)
    return value / (n * (n - 3))
