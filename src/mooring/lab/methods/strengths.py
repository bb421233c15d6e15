"""The strengths that methods have when none is given: a place to start from and no more.

A good strength depends on the network, the data and the learning rate; `mooring tune` searches for it.
"""

from mooring.lab.methods.method import Method

__all__ = ["DIGITS_STRENGTHS", "PAPER_STRENGTHS", "default_strength", "paper_strength"]

OPEN = {"soft": 0.3, "sfa": 0.5, "wise-ft": 0.5, "cofima": 1.0}
"""Stiffness, shares and a weight: where their range has its middle."""

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
    **OPEN,
    "l2-sp": 0.1,
}
"""Found by `mooring tune` on the digits, two at a time (docs/tuning.md)."""

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
    **OPEN,
    "l2-sp": 100.0,
}
"""The paper's own for CIFAR-100 in one epoch at learning rate 0.001; it has none of those from proximal-ewc on."""


def paper_strength(method: str) -> float | None:
    """The paper's strength of a method, of which the balanced, clamped and signed forms have their plain form's.

    Example:
        >>> paper_strength("clamped-ewc"), paper_strength("si-signed"), paper_strength("plain")
        (1000.0, 0.01, None)
    """
    for name in (method, method.removeprefix("balanced-").removeprefix("clamped-"), method.partition("-")[0]):
        if name in PAPER_STRENGTHS:
            return PAPER_STRENGTHS[name]
    return None


def default_strength(method: Method, *, paper: bool) -> float | None:
    """The strength of a method when none is given.

    Args:
        method: which one; a method of your own has its own strength everywhere.
        paper: whether to start from the paper's, as everywhere but on the digits.

    Example:
        >>> from mooring.lab.methods import find_method
        >>> default_strength(find_method("mas"), paper=False), default_strength(find_method("mas"), paper=True)
        (0.03, 0.01)
    """
    found = paper_strength(method.name) if paper and method.has_strength else None
    return method.strength if found is None else found
