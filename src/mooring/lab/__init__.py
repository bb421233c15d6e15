"""The laboratory: streams, networks, methods, fleets and studies. Needs the extra `mooring[lab]`."""

try:
    from mooring.lab.model.results import Result
    from mooring.lab.model.spec import RunSpec
    from mooring.lab.model.summary import Row, summarize
    from mooring.lab.study.comparison import Comparison, comparison
    from mooring.lab.study.protocol import Tuned, tune
    from mooring.lab.study.study import Study
except ModuleNotFoundError as error:
    if (error.name or "").startswith("mooring"):
        raise
    message = f"the laboratory needs {error.name}: pip install 'mooring[lab]'"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["Comparison", "Result", "Row", "RunSpec", "Study", "Tuned", "comparison", "summarize", "tune"]
