"""Selection and naming of the parameters and buffers of a model that are moored."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from mooring.distributed.dtensor import reshard
from mooring.errors import MooringError

Exclude = str | nn.Module | Iterable[str | nn.Module]
"""Names, glob patterns or modules."""


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefix that torch.compile adds.

    Example:
        >>> clean_name("_orig_mod.features.0.weight")
        'features.0.weight'
    """
    return name.replace("_orig_mod.", "")


def module_names(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's modules by clean name; the model itself is ''.

    Example:
        >>> list(module_names(nn.Sequential(nn.ReLU())))
        ['', '0']
    """
    return {clean_name(f"{name}.").removesuffix("."): module for name, module in model.named_modules()}


def layer_of(name: str) -> str:
    """Return the layer of a parameter: the name of the module that owns it.

    Example:
        >>> layer_of("features.0.weight"), layer_of("scale")
        ('features.0', '(root)')
    """
    return name.rpartition(".")[0] or "(root)"


def check_exclude(model: nn.Module, exclude: Exclude) -> tuple[str, ...]:
    """Return `exclude` as patterns; refuse entries that mean nothing in this model.

    A pattern must match a parameter or lie under an existing module. Heads can therefore be named before they exist,
    and a misspelt name is refused. A module stands for its name: a module that replaces it later is excluded too.
    """
    if not isinstance(exclude, Iterable | nn.Module):
        raise MooringError(f"exclude={exclude!r} is not allowed: give names, patterns like 'heads.*', or modules")
    modules = module_names(model)
    names = [clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    patterns = []
    for entry in (exclude,) if isinstance(exclude, str | nn.Module) else tuple(exclude):
        if isinstance(entry, nn.Module):
            known = [name for name, module in modules.items() if module is entry]
            if not known:
                raise MooringError(f"exclude: {type(entry).__name__} is not a module of this model")
            patterns.append(known[0] or "*")
        elif isinstance(entry, str):
            parent = re.split(r"[*?[]", entry)[0].removesuffix(".")
            future = parent != entry and parent != "" and parent in modules
            if not (entry in modules or future or any(_matches(name, entry) for name in names)):
                raise MooringError(
                    f"exclude: {entry!r} matches no parameter; give a name, a pattern like 'heads.*', or a module"
                )
            patterns.append(entry)
        else:
            raise MooringError(f"exclude: {entry!r} is not a name, a pattern or a module")
    return tuple(patterns)


def moorable(model: nn.Module, exclude: tuple[str, ...]) -> dict[Tensor, str]:
    """Return the names of the model's parameters by object, each tied one once, without the excluded ones.

    A tied parameter is excluded if any of its names is.
    """
    reshard(model.modules())
    names: dict[Tensor, str] = {}
    left_out = set()
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, clean_name(name))
        if any(_matches(clean_name(name), pattern) for pattern in exclude):
            left_out.add(p)
    return {p: name for p, name in names.items() if p not in left_out}


def tied_by_exclusion(model: nn.Module, exclude: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (other name, excluded name) of each parameter that several modules share and that not all names exclude.

    Example:
        >>> model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
        >>> model["head"].weight = model["embed"].weight
        >>> tied_by_exclusion(model, ("head",)), tied_by_exclusion(model, ("head", "embed"))
        ([('embed.weight', 'head.weight')], [])
    """
    named: dict[Tensor, dict[nn.Module, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, p in module.named_parameters(recurse=False):
            named.setdefault(p, {}).setdefault(module, []).append(clean_name(f"{path}.{key}".removeprefix(".")))
    ties = []
    for owners in named.values():
        excluded = {
            names[0]: any(_matches(name, pattern) for name in names for pattern in exclude) for names in owners.values()
        }
        if len({*excluded.values()}) == 2:
            kept, left_out = (next(name for name, out in excluded.items() if out is wanted) for wanted in (False, True))
            ties.append((kept, left_out))
    return ties


def norm_modules(model: nn.Module, exclude: tuple[str, ...], held: Sequence[Tensor]) -> dict[str, nn.Module]:
    """Return the normalization modules with running statistics that belong to one optimizer, by name.

    A module belongs to the optimizer of its first trainable parameter, or, if it has none, to the optimizer of the last
    trainable parameter before it. With several optimizers each statistic is therefore held once.
    """
    own, modules = set(held), dict[str, nn.Module]()
    last = next((p for p in model.parameters() if p.requires_grad), None)
    for name, module in module_names(model).items():
        trainable = [p for p in module.parameters(recurse=False) if p.requires_grad]
        owner, last = trainable[0] if trainable else last, trainable[-1] if trainable else last
        if not isinstance(module, nn.modules.batchnorm._NormBase) or owner not in own:
            continue
        if any(_matches(name, pattern) or fnmatchcase(f"{name}.weight", pattern) for pattern in exclude):
            continue
        if isinstance(module.running_mean, Tensor):
            modules[name] = module
    return modules


STATISTICS = ("running_mean", "running_var")
"""The names of running statistics in their layer."""


def norm_buffers(model: nn.Module, exclude: tuple[str, ...], held: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the running statistics of `norm_modules`, by name."""
    modules = norm_modules(model, exclude, held)
    return {f"{name}.{key}": getattr(module, key) for name, module in modules.items() for key in STATISTICS}


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern names the parameter itself or a module above it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
