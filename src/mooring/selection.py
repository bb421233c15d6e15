"""Which parameters and buffers of a model are moored, and what they are called."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from mooring.errors import MooringError

__all__ = ["Exclude", "check_exclude", "clean_name", "layer_of", "moorable", "norm_buffers"]

Exclude = str | nn.Module | Iterable[str | nn.Module]
"""Names, glob patterns or modules."""


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile puts before it.

    Example:
        >>> clean_name("_orig_mod.features.0.weight")
        'features.0.weight'
    """
    return name.replace("_orig_mod.", "")


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: the module that owns it.

    Example:
        >>> layer_of("features.0.weight"), layer_of("scale")
        ('features.0', '(root)')
    """
    return name.rpartition(".")[0] or "(root)"


def check_exclude(model: nn.Module, exclude: Exclude) -> tuple[str | nn.Module, ...]:
    """`exclude` as a tuple, after checking that each entry means something in this model.

    A pattern must match a parameter or lie under a module that exists, so that heads can be named before
    they are there and a misspelt name is not silently nothing.
    """
    entries = (exclude,) if isinstance(exclude, str | nn.Module) else tuple(exclude)
    modules = {clean_name(f"{name}.")[:-1]: module for name, module in model.named_modules()}
    names = [clean_name(name) for name, _ in model.named_parameters()]
    for entry in entries:
        if isinstance(entry, nn.Module):
            known = any(entry is module for module in modules.values())
            if not known:
                raise MooringError(f"exclude: {type(entry).__name__} is not a module of this model")
        elif isinstance(entry, str):
            parent = re.split(r"[*?[]", entry)[0].removesuffix(".")
            future = parent != entry and parent != "" and parent in modules
            if not (entry in modules or future or any(_matches(name, entry) for name in names)):
                raise MooringError(
                    f"exclude: {entry!r} matches no parameter; give a name, a pattern like 'heads.*', or a module"
                )
        else:
            raise MooringError(f"exclude: {entry!r} is not a name, a pattern or a module")
    return entries


def moorable(model: nn.Module, exclude: tuple[str | nn.Module, ...]) -> dict[Tensor, str]:
    """The model's parameters by object, each once however often it is tied, without the excluded ones."""
    left_out = {p for entry in exclude if isinstance(entry, nn.Module) for p in entry.parameters()}
    patterns = [entry for entry in exclude if isinstance(entry, str)]
    return {
        p: clean_name(name)
        for name, p in model.named_parameters()
        if p not in left_out and not any(_matches(clean_name(name), pattern) for pattern in patterns)
    }


def norm_buffers(model: nn.Module, trained: Sequence[Tensor]) -> dict[str, Tensor]:
    """The running statistics of the normalisation modules that one optimizer looks after, by name.

    A module is looked after by whoever trains its first parameter; one without parameters, by whoever trains the last
    parameter before it. So with several optimizers each statistic is held once.
    """
    own, buffers, last = set(trained), {}, next(model.parameters(), None)
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        owner, last = parameters[0] if parameters else last, parameters[-1] if parameters else last
        if not isinstance(module, nn.modules.batchnorm._NormBase) or owner not in own:
            continue
        for key in ("running_mean", "running_var"):
            if isinstance(buffer := getattr(module, key, None), Tensor):
                buffers[clean_name(f"{name}.{key}")] = buffer
    return buffers


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names the parameter itself or a module above it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
