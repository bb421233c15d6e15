"""The laboratory: streams, networks, methods, fleets and studies of forgetting. Needs the extra `mooring[lab]`."""

try:
    from mooring.lab.comparison import Comparison, comparison
    from mooring.lab.protocol import Tuned, tune
    from mooring.lab.results import Result
    from mooring.lab.spec import RunSpec
    from mooring.lab.study import Study
    from mooring.lab.summary import Row, summarize
except ModuleNotFoundError as error:
    if (error.name or "").startswith("mooring"):
        raise
    told = f"the laboratory needs {error.name}: pip install 'mooring[lab]'"
    raise ModuleNotFoundError(told, name=error.name) from error

__all__ = ["Comparison", "Result", "Row", "RunSpec", "Study", "Tuned", "comparison", "summarize", "tune"]
