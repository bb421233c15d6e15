"""Contexts that restore a model (parameters, buffers, gradients, modes, random states) and gradients outside it."""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from mooring.backends.eager import autocast_disabled
from mooring.distributed.dtensor import reshard
from mooring.observe.output_observer import probing

OF_TORCH = nn.Module().__dict__.keys() - {"training"}
"""The attributes of every module, such as its parameters and hooks."""

REBOUND = (bool, int, float, Tensor, tuple, list, dict, type(None))
"""The types of attributes that are bound as before."""

Settings = dict[str, dict[str, Any]]
"""The plain attributes of the modules that are not torch's own, by the module's name."""

PLAIN = (bool, int, float, str, type(None))


_preserved: dict[int, int] = {}
"""How many of these contexts each thread is in."""


def is_preserved() -> bool:
    """Return whether this thread preserves a model's state now, so that a pass is no part of training.

    Example:
        >>> with preserve_model_state(nn.Linear(1, 1)):
        ...     is_preserved()
        True
    """
    return _preserved.get(get_ident(), 0) > 0


@contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, set its gradients aside, and restore everything but its weights bit for bit.

    Models of transformers keep no keys and values for the next token meanwhile, which would not be read.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> with preserve_model_state(model):
        ...     _ = model.train()(torch.randn(4, 2) + 9)
        >>> model.running_mean
        tensor([0., 0.])
    """
    modules = list(model.modules())
    parameters = {p for module in modules for p in module._parameters.values() if p is not None}
    buffers = {b for module in modules for b in module._buffers.values() if b is not None}
    bindings = [(module, _bindings(module), dict(module._buffers)) for module in modules]
    containers = [(c, c.copy()) for module in modules for c in _containers(module)]
    attributes = [t for _, values, _ in bindings for t in values.values() if isinstance(t, Tensor)]
    constants = [t for t in attributes if not t.requires_grad]  # others may belong to a graph under way
    kept = [(t, t.detach().clone()) for t in {*_renormalized(modules), *buffers, *constants}]
    gradients = [(p, p.grad) for p in parameters]
    devices = sorted({t.device.index for t in (*parameters, *buffers) if t.device.type == "cuda"})
    random_state = random.getstate()
    numpy = sys.modules.get("numpy")  # data loading may use its random state
    numpy_state = numpy.random.get_state() if numpy else None
    thread = get_ident()
    with torch.random.fork_rng(devices), without_caches(modules):
        model.eval()
        for p, _ in gradients:
            p.grad = None
        _preserved[thread] = _preserved.get(thread, 0) + 1
        try:
            yield
        finally:
            _preserved[thread] -= 1
            random.setstate(random_state)
            if numpy:
                numpy.random.set_state(numpy_state)
            for module, values, own_buffers in bindings:
                module.__dict__.update(values)
                module._buffers.clear()
                module._buffers.update(own_buffers)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)


@contextmanager
def without_caches(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Set `use_cache` of the configurations of models of transformers to False, and restore it."""
    own = (module.__dict__.get("config") or getattr(type(module), "config", None) for module in modules)
    configs = {id(config): config for config in own if config is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextmanager
def preserve_other_gradients(loss: Tensor, model: nn.Module) -> Iterator[None]:
    """Restore the gradients of what a loss depends on outside the model, such as a GAN's discriminator.

    Example:
        >>> model, other = nn.Linear(2, 2), nn.Linear(2, 1)
        >>> loss = other(model(torch.ones(1, 2))).sum()
        >>> with preserve_other_gradients(loss, model):
        ...     loss.backward()
        >>> model.weight.grad is None, other.weight.grad is None
        (False, True)
    """
    own = {*model.parameters()}
    gradients = [(leaf, leaf.grad) for leaf in _leaves(loss) if leaf not in own]
    for leaf, _ in gradients:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient


def _leaves(loss: Tensor) -> set[Tensor]:
    """Return the tensors in which a backward pass accumulates gradients."""
    leaves, visited, pending = set[Tensor](), set[Any](), [loss.grad_fn]
    while pending:
        node: Any = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor) and leaf.is_leaf:
            leaves.add(leaf)
        pending += [parent for parent, _ in node.next_functions]
    return leaves


def _bindings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that a forward pass may replace: its mode, counters, tensors, caches."""
    return {name: v for name, v in module.__dict__.items() if name not in OF_TORCH and isinstance(v, REBOUND)}


def _containers(module: nn.Module) -> Iterator[Any]:
    """Yield the lists and dictionaries of a module that a forward pass may fill, such as hidden states and caches."""
    for name, value in module.__dict__.items():
        if name not in OF_TORCH and type(value) in (list, dict):
            yield value


def _renormalized(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters that a forward pass writes to: those of embeddings with a largest norm."""
    for module in modules:
        if module.__dict__.get("max_norm") is not None:
            yield from module.parameters(recurse=False)


def read_settings(model: nn.Module) -> Settings:
    """Return the plain attributes of a model's modules, without their mode.

    Example:
        >>> class Heads(nn.Module):
        ...     head = "old"
        >>> model = Heads()
        >>> model.head = "new"
        >>> read_settings(model)
        {'': {'head': 'new'}}
    """
    own = ((name, module) for name, module in model.named_modules() if not type(module).__module__.startswith("torch."))
    settings = {name: _plain_attributes(module) for name, module in own}
    return {name: attributes for name, attributes in settings.items() if attributes}


@contextmanager
def applied_settings(modules: Mapping[str, nn.Module], settings: Settings) -> Iterator[None]:
    """Give the modules of a model, by name, these settings, and restore their own after."""
    present = {name: _values(modules[name], settings[name]) for name in settings if name in modules}
    for name in present:
        modules[name].__dict__.update(settings[name])
    try:
        yield
    finally:
        for name, attributes in present.items():
            modules[name].__dict__.update(attributes)
            for missing in settings[name].keys() - attributes.keys():
                modules[name].__dict__.pop(missing, None)


def _values(module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Return the present values of attributes, such as a hidden state in the place of a None."""
    return {name: module.__dict__[name] for name in names if name in module.__dict__}


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    attributes = module.__dict__.items()
    return {name: v for name, v in attributes if isinstance(v, PLAIN) and name != "training" and name[:1] != "_"}


@contextmanager
def passive(model: nn.Module, settings: Settings | None) -> Iterator[None]:
    """Put a model into eval mode, with these settings, for passes that are no part of training; restore both.

    Parameters that a pass left gathered are sharded again, because the next pass would not see that shards moved. The
    modules are listed once, and their modes are written as they are stored: there may be a thousand, in every step.
    """
    modules = dict(model.named_modules())
    training = [module.__dict__ for module in modules.values() if module.training]
    for attributes in training:
        attributes["training"] = False
    recurrent = _trained_without_dropout(modules.values()) if torch.is_grad_enabled() else []
    try:
        with (
            probing(),
            autocast_disabled(),
            without_caches(modules.values()),
            applied_settings(modules, settings or {}),
        ):
            yield
    finally:
        reshard(modules.values())
        for attributes, own in recurrent:
            attributes.update(own)
        for attributes in training:
            attributes["training"] = True


def _trained_without_dropout(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Put recurrent layers into training mode without dropout, and return their attributes and what these were.

    cuDNN computes gradients of recurrent layers in training mode only.
    """
    changed = [(module.__dict__, module.__dict__["dropout"]) for module in modules if isinstance(module, nn.RNNBase)]
    for attributes, _ in changed:
        attributes.update(training=True, dropout=0.0)
    return [(attributes, {"training": False, "dropout": dropout}) for attributes, dropout in changed]


def state_of_passes(model: nn.Module) -> str:
    """Return the name of a tensor that a model keeps in an attribute, such as a hidden state; empty if there is none.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> model.hidden = torch.zeros(1)
        >>> state_of_passes(model)
        'hidden'
    """
    for prefix, module in model.named_modules():
        for name, value in _bindings(module).items():
            parts = value if isinstance(value, tuple | list) else [value]
            if any(isinstance(part, Tensor) and part.numel() for part in parts):
                return f"{prefix}.{name}" if prefix else name
    return ""


def traces_of(model: nn.Module) -> list[Any]:
    """Return what a pass through a model would change besides its parameters, in a form that can be compared.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> before = traces_of(model)
        >>> traces_of(model) == before
        True
        >>> _ = model(torch.ones(3, 2))  # in training mode
        >>> traces_of(model) == before
        False
    """
    traces: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        traces.append(torch.cuda.get_rng_state(device).tolist())
    for module in model.modules():
        buffers = [(id(b), b._version) for b in module._buffers.values() if b is not None]
        values = _bindings(module).values()
        tensors = [(id(t), t._version) for t in values if isinstance(t, Tensor)]
        containers = [[id(item) for item in content] for content in _containers(module)]
        traces.append((buffers, [id(v) for v in values], tensors, containers))
    return traces
