"""Mooring fine-tunes a PyTorch model without losing what it could do before."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooring import errors as errors
    from mooring import rules as rules
    from mooring.attachment import attach
    from mooring.curvature.low_rank import Product as Product
    from mooring.diagnose import drift as drift
    from mooring.diagnose import stability as stability
    from mooring.mooring import Mooring
    from mooring.reference import kinds as kinds
    from mooring.rules import EWC, MAS, SI, Budget, Interpolation, Kronecker, Penalty, Proximal, RWalk, Uniform
    from mooring.rules import Balanced as Balanced
    from mooring.rules import Random as Random
    from mooring.state.memory import Memory as Memory
else:
    from importlib import import_module

    _RULES = "EWC MAS SI Balanced Kronecker RWalk Random Uniform Budget Interpolation Penalty Proximal"
    _MODULES = {
        "attach": "attachment",
        "Mooring": "mooring",
        "Memory": "state.memory",
        "Product": "curvature.low_rank",
        **dict.fromkeys(_RULES.split(), "rules"),
    }
    _SUBMODULES = {
        "drift": "diagnose.drift",
        "errors": "errors",
        "kinds": "reference.kinds",
        "rules": "rules",
        "stability": "diagnose.stability",
    }

    def __getattr__(name: str) -> object:
        """Import a public name on its first use: without torch, `import mooring` and `mooring --help` are fast."""
        if name in _SUBMODULES:
            value = import_module(f"mooring.{_SUBMODULES[name]}")
        elif name in _MODULES:
            value = getattr(import_module(f"mooring.{_MODULES[name]}"), name)
        else:
            raise AttributeError(f"module 'mooring' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES, *_SUBMODULES})


__all__ = [
    "EWC",
    "MAS",
    "SI",
    "Budget",
    "Interpolation",
    "Kronecker",
    "Mooring",
    "Penalty",
    "Proximal",
    "RWalk",
    "Uniform",
    "attach",
]

__version__ = "0.1.0"
