"""Default strengths of methods: values to start from.

A good strength depends on the network, the data and the learning rate; `mooring tune` searches for it.
"""

from mooring.lab.methods.method import Method

__all__ = ["DIGITS_STRENGTHS", "PAPER_STRENGTHS", "default_strength", "paper_strength"]

MIDDLE = {"soft": 0.3, "sfa": 0.5, "wise-ft": 0.5, "cofima": 1.0}
"""The middle of the range of a stiffness, two shares and a weight."""

DIGITS_STRENGTHS = {
    "ewc": 1e7,
    "mas": 0.03,
    "si": 3.0,
    "rwalk": 3.0,
    "uniform": 0.3,
    "random": 3.0,
    "proximal-ewc": 1e4,
    "budget-ewc": 1e-5,
    "budget-kronecker": 1e-5,
    **MIDDLE,
    "l2-sp": 0.1,
}
"""Tuned with `mooring tune` on the digits, two classes per task (docs/tuning.md)."""

PAPER_STRENGTHS = {
    "ewc": 1e3,
    "mas": 0.01,
    "si": 0.01,
    "rwalk": 1e-4,
    "uniform": 100.0,
    "random": 100.0,
    "proximal-ewc": 1e5,
    "budget-ewc": 1e-4,
    "budget-kronecker": 1e-3,
    **MIDDLE,
    "l2-sp": 100.0,
}
"""The paper's strengths for CIFAR-100, one epoch, learning rate 0.001. From proximal-ewc on they are ours."""


def paper_strength(method: str) -> float | None:
    """Return the paper's strength of a method; balanced, clamped and signed forms have that of their base method.

    Example:
        >>> paper_strength("clamped-ewc"), paper_strength("si-signed"), paper_strength("plain")
        (1000.0, 0.01, None)
    """
    for name in (method, method.removeprefix("balanced-").removeprefix("clamped-"), method.partition("-")[0]):
        if name in PAPER_STRENGTHS:
            return PAPER_STRENGTHS[name]
    return None


def default_strength(method: Method, *, paper: bool) -> float | None:
    """Return the strength of a method when the user gives none.

    Args:
        method: the method; a method of your own always has its own strength.
        paper: take the paper's strength if there is one, as for every stream but the digits.

    Example:
        >>> from mooring.lab.methods import find_method
        >>> default_strength(find_method("mas"), paper=False), default_strength(find_method("mas"), paper=True)
        (0.03, 0.01)
    """
    strength = paper_strength(method.name) if paper and method.has_strength else None
    return method.strength if strength is None else strength
