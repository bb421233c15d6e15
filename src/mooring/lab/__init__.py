"""The laboratory: streams, networks, methods, fleets and studies of forgetting. Needs the extra `mooring[lab]`."""

from mooring.lab.comparison import Comparison, comparison
from mooring.lab.protocol import Tuned, tune
from mooring.lab.results import Result
from mooring.lab.spec import RunSpec
from mooring.lab.study import Study
from mooring.lab.summary import Row, summarize

__all__ = ["Comparison", "Result", "Row", "RunSpec", "Study", "Tuned", "comparison", "summarize", "tune"]
