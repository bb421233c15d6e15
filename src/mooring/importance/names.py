"""Importances by name."""

from mooring.errors import MooringError, unknown
from mooring.importance.definition import Importance
from mooring.importance.ewc import EWC
from mooring.importance.kronecker import Kronecker
from mooring.importance.mas import MAS
from mooring.importance.random import Random
from mooring.importance.rwalk import RWalk
from mooring.importance.si import SI
from mooring.importance.uniform import Uniform

IMPORTANCES: dict[str, type[Importance]] = {
    c.__name__.lower(): c for c in (EWC, MAS, SI, RWalk, Uniform, Random, Kronecker)
}


def resolve(importance: str | Importance) -> Importance:
    """Return the importance of that name with default options, or the instance itself.

    Example:
        >>> resolve("mas")
        MAS(decay=0.2)
    """
    if isinstance(importance, str):
        if importance not in IMPORTANCES:
            raise unknown("importance", importance, IMPORTANCES)
        return IMPORTANCES[importance]()
    if not isinstance(importance, Importance):
        raise MooringError(
            f"importance={importance!r} is not an importance: give one of {', '.join(IMPORTANCES)}, "
            "or an instance of a mooring.importance.Importance subclass"
        )
    return importance
