"""Mooring fine-tunes a PyTorch model without losing what it could do before."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooring import adapters as adapters
    from mooring import drift as drift
    from mooring import errors as errors
    from mooring import importance as importance
    from mooring import pulls as pulls
    from mooring import stability as stability
    from mooring.attachment import attach
    from mooring.importance import EWC, MAS, SI, Kronecker, RWalk, Uniform
    from mooring.importance import Balanced as Balanced
    from mooring.importance import Random as Random
    from mooring.moor import Mooring
    from mooring.pulls import Budget, Interpolation, Penalty, Proximal
    from mooring.state.memory import Memory as Memory
else:
    from importlib import import_module

    _MODULES = {
        "attach": "attachment",
        "Mooring": "moor",
        "Memory": "state.memory",
        **dict.fromkeys(("EWC", "MAS", "SI", "Balanced", "Kronecker", "RWalk", "Random", "Uniform"), "importance"),
        **dict.fromkeys(("Budget", "Interpolation", "Penalty", "Proximal"), "pulls"),
    }
    _SUBMODULES = ("adapters", "drift", "errors", "importance", "pulls", "stability")

    def __getattr__(name: str) -> object:
        """Import a public name on its first use: without torch, `import mooring` and `mooring --help` are fast."""
        if name in _SUBMODULES:
            return import_module(f"mooring.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'mooring' has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"mooring.{_MODULES[name]}"), name)
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
