"""Importances by name."""

from mooring.errors import MooringError, unknown
from mooring.rules.ewc import EWC
from mooring.rules.importance import Importance
from mooring.rules.kronecker import Kronecker
from mooring.rules.mas import MAS
from mooring.rules.random import Random
from mooring.rules.rwalk import RWalk
from mooring.rules.si import SI
from mooring.rules.uniform import Uniform

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
            "or an instance of a mooring.rules.Importance subclass"
        )
    return importance
