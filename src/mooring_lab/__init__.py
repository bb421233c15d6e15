"""The laboratory: streams, networks, methods, fleets and studies. Needs the extra `mooring[lab]`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooring_lab.model.results import Result
    from mooring_lab.model.spec import RunSpec
    from mooring_lab.model.summary import Row, summarize
    from mooring_lab.study.comparison import Comparison, comparison
    from mooring_lab.study.protocol import Tuned, tune
    from mooring_lab.study.study import Study
else:
    from importlib import import_module

    _MODULES = {
        "Result": "model.results",
        "RunSpec": "model.spec",
        **dict.fromkeys(("Row", "summarize"), "model.summary"),
        **dict.fromkeys(("Comparison", "comparison"), "study.comparison"),
        **dict.fromkeys(("Tuned", "tune"), "study.protocol"),
        "Study": "study.study",
    }

    def __getattr__(name: str) -> object:
        """Import a public name on its first use: methods are listed without torch."""
        if name not in _MODULES:
            raise AttributeError(f"module 'mooring_lab' has no attribute {name!r}")
        try:
            module = import_module(f"mooring_lab.{_MODULES[name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("mooring"):
                raise
            message = f"the laboratory needs {error.name}: pip install 'mooring[lab]'"
            raise ModuleNotFoundError(message, name=error.name) from error
        globals()[name] = value = getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})


__all__ = ["Comparison", "Result", "Row", "RunSpec", "Study", "Tuned", "comparison", "summarize", "tune"]
