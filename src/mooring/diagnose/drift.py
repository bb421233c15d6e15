"""How far a model has moved: its parameters, layer by layer, and its representations (CKA)."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import local_tensor, sum_over_shards
from mooring.errors import MooringError
from mooring.state.selection import layer_of, module_names

__all__ = ["cka", "debiased_cka", "drift_by_layer", "gram", "likeness", "parameter_drift"]

FEATURE_BYTES = 1 << 30
"""How much memory the collected features of one pass over the inputs may take."""


def parameter_drift(parts: Iterable[tuple[str, Tensor, Tensor]]) -> dict[str, float]:
    """||theta - anchor|| / ||anchor|| for each layer; 0 where nothing moved, infinite from a zero anchor.

    Args:
        parts: (name, parameter, anchor) of each parameter; of a sharded one, the anchor of the part on this rank.

    Example:
        >>> parameter_drift([("layer.weight", torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))])
        {'layer': 0.2}
    """
    names, thetas, squares = [], [], []
    for name, theta, anchor in parts:
        names.append(name)
        thetas.append(theta)
        wide = anchor.double()
        squares.append(
            torch.stack([(local_tensor(theta).detach().double() - wide).square().sum(), wide.square().sum()])
        )
    return drift_by_layer(zip(names, sum_over_shards(squares, thetas), strict=True))


def drift_by_layer(squares: Iterable[tuple[str, Iterable[Any]]]) -> dict[str, float]:
    """What `parameter_drift` says, from sums of squares that are known.

    Args:
        squares: the name of each parameter, with ||theta - anchor||^2 and ||anchor||^2.

    Example:
        >>> drift_by_layer([("layer.weight", (9.0, 100.0)), ("layer.bias", (0.0, 0.0))])
        {'layer': 0.3}
    """
    moved: dict[str, float] = {}
    size: dict[str, float] = {}
    for name, (d, own) in squares:
        layer = layer_of(name)
        moved[layer] = moved.get(layer, 0.0) + float(d)
        size[layer] = size.get(layer, 0.0) + float(own)
    return {
        layer: math.sqrt(moved[layer] / size[layer]) if size[layer] else _from_zero(moved[layer]) for layer in moved
    }


def _from_zero(moved: float) -> float:
    return math.inf if moved else 0.0


def debiased_cka(x: Tensor, y: Tensor) -> float:
    """Debiased linear CKA between two sets of features of the same inputs.

    HSIC_1(K, M) / sqrt(HSIC_1(K, K) * HSIC_1(M, M)) with K = x x', M = y y' and the unbiased estimator
    HSIC_1 = [tr(K~ M~) + (1'K~1)(1'M~1) / ((n-1)(n-2)) - 2 (1'K~M~1) / (n-2)] / (n (n-3)), where ~ has a zero diagonal.

    Args:
        x: features of shape (n, ...), n >= 4.
        y: features of shape (n, ...) of the same inputs.

    Returns:
        1 for features equal up to rotation and scale, about 0 for unrelated ones. A score of an estimator:
        it may leave [0, 1] a little where n is small.

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
    """Debiased linear CKA between two models, layer by layer, over all the inputs given.

    The models run in eval mode, batch by batch, and are left as they were. The result does not depend on how
    the inputs are cut into batches. Where the features of all layers do not fit into memory at once, the inputs
    are passed again for the next group of layers, so `inputs` must be a tensor or iterable more than once.

    Args:
        model_a: the first model, such as a copy from after the first task.
        model_b: the second, with the same layer names.
        inputs: a tensor of inputs, or an iterable of batches (a DataLoader); of a batch that is a tuple or
            list, the first element.
        layers: names or glob patterns of modules; by default all that own parameters and run.
        batch_size: how a tensor of inputs is cut.

    Returns:
        CKA by layer name, in the model's order.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> {name: round(value, 4) for name, value in cka(model, model, torch.randn(20, 4)).items()}
        {'0': 1.0, '2': 1.0}
    """
    names = _pick_layers(model_a, model_b, (layers,) if isinstance(layers, str) else layers)
    batches: Iterable[Any] = torch.split(inputs, batch_size) if isinstance(inputs, Tensor) else inputs
    if isinstance(batches, Iterator):
        raise MooringError("cka: inputs can be read only once; give a tensor, a list of batches or a DataLoader")
    scores: dict[str, float] = {}
    waiting = names
    while waiting:
        with torch.random.fork_rng():  # a DataLoader draws from the global random state
            features = _collect((model_a, model_b), batches, waiting)
        if not features and (layers is not None or not scores):
            raise MooringError(f"cka: layer {waiting[0]!r} gave no tensor: it did not run; name the layers to compare")
        scores |= {name: debiased_cka(*features[name]) for name in features}
        waiting = [name for name in waiting if name not in scores] if features else []
    return {name: scores[name] for name in names if name in scores}


def _pick_layers(model_a: nn.Module, model_b: nn.Module, layers: Sequence[str] | None) -> list[str]:
    modules = {name: module for name, module in module_names(model_a).items() if name}
    every = list(modules)
    owners = [name for name, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
    names = owners if layers is None else [n for n in every if any(fnmatchcase(n, pattern) for pattern in layers)]
    for pattern in layers or ():
        if not any(fnmatchcase(n, pattern) for n in every):
            raise MooringError(f"cka: no layer is called {pattern!r}; there are {', '.join(every)}")
    other = module_names(model_b)
    for name in names:
        if name not in other:
            raise MooringError(f"cka: the second model has no layer {name!r}")
    if not names:
        raise MooringError("cka: the model has no layers with parameters; name the modules to compare")
    return names


def _collect(
    models: tuple[nn.Module, nn.Module], batches: Iterable[Any], names: list[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The features of as many of the first layers as fit into memory, over all batches."""
    pieces: list[dict[str, list[Tensor]]] = [{}, {}]
    total = len(batches) if isinstance(batches, Sized) else None
    wanted: set[str] | None = None
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(x, Tensor):
            raise MooringError(f"cka: a batch is a {type(x).__name__}: give tensors, or tuples that begin with one")
        for model, kept in zip(models, pieces, strict=True):
            for name, feature in _features(model, x, names if wanted is None else sorted(wanted)).items():
                kept.setdefault(name, []).append(feature)
        if wanted is None:
            wanted = _that_fit(pieces, names, total)
            for kept in pieces:
                for name in set(kept) - wanted:
                    del kept[name]
    if wanted is None:
        raise MooringError("debiased CKA needs at least 4 inputs, not 0")
    return {n: (torch.cat(pieces[0][n]), torch.cat(pieces[1][n])) for n in names if n in pieces[0] and n in pieces[1]}


def _that_fit(pieces: list[dict[str, list[Tensor]]], names: list[str], batches: int | None) -> set[str]:
    """The first layers whose features fit, judged from the first batch; always at least one."""
    chosen: set[str] = set()
    used = 0
    for name in names:
        if all(name in kept for kept in pieces):
            used += sum(kept[name][0].nbytes for kept in pieces) * (batches or 16)
            if chosen and used > FEATURE_BYTES:
                break
            chosen.add(name)
    return chosen


def _features(model: nn.Module, x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """The flattened outputs of the named modules for one batch, taken in eval mode."""
    found: dict[str, Tensor] = {}
    modules = module_names(model)
    modes = [(module, module.training) for module in model.modules()]

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple | list) else output
            if isinstance(output, Tensor):
                wide = torch.promote_types(output.dtype, torch.float32)
                found[name] = _rows(output).to(wide, copy=True)  # the next layer may work in place

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in names]
    device = next((p.device for p in model.parameters()), x.device)
    try:
        model.eval()
        model(x.to(device))
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return found


def _rows(x: Tensor) -> Tensor:
    """One row of features for each input."""
    return x.unsqueeze(1) if x.ndim == 1 else x.flatten(1)


def likeness(k: Tensor, m: Tensor) -> Tensor:
    """Debiased CKA from what `gram` gives, of shape (..., n, n); not a number where one of the two does not vary.

    Example:
        >>> x = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0))  # of three models at once
        >>> likeness(gram(x, 1), gram(2 * x, 1))
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    scale = (_hsic(k, k).clamp(min=0) * _hsic(m, m).clamp(min=0)).sqrt()
    return torch.where(scale > 0, _hsic(k, m) / scale, torch.nan)


def gram(x: Tensor, leading: int = 0) -> Tensor:
    """x x' of centred features, with a zero diagonal; centring changes nothing but the rounding.

    Args:
        x: features of shape (n, ...), after as many leading dimensions as are told.
        leading: the number of these.

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
    """The unbiased estimator HSIC_1 from matrices with zero diagonals."""
    n = k.shape[-1]
    rows_k, rows_m = k.sum(-2), m.sum(-2)
    both, cross = (k * m).sum((-2, -1)), (rows_k * rows_m).sum(-1)
    value = both + rows_k.sum(-1) * rows_m.sum(-1) / ((n - 1) * (n - 2)) - 2 * cross / (n - 2)
    return value / (n * (n - 3))
