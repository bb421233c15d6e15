"""The settings that a model's forward pass reads, such as its present head, recorded and applied again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Settings = dict[str, dict[str, Any]]
"""The plain attributes of the modules that are not torch's own, by the module's name."""

PLAIN = (bool, int, float, str, type(None))


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
    present = {name: _plain_attributes(modules[name]) for name in settings if name in modules}
    for name in present:
        modules[name].__dict__.update(settings[name])
    try:
        yield
    finally:
        for name, attributes in present.items():
            modules[name].__dict__.update(attributes)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    attributes = module.__dict__.items()
    return {name: v for name, v in attributes if isinstance(v, PLAIN) and name != "training" and name[:1] != "_"}
