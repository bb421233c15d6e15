"""Default strengths of methods: values to start from.

A good strength depends on the network, the data and the learning rate; `mooring tune` searches for it.
"""

SAMPLES = 500
"""The default size of a memory, in samples."""

STRENGTHS = {
    "ewc": (1e7, 1e3),
    "mas": (0.03, 0.01),
    "si": (3.0, 0.01),
    "rwalk": (3.0, 1e-4),
    "uniform": (0.3, 100.0),
    "random": (3.0, 100.0),
    "summed-ewc": (300.0, 10.0),
    "clamped-summed-ewc": (1e3, 1e5),
    "laplace-kronecker": (10.0, 1.0),
    "clamped-laplace-kronecker": (1e3, 1e3),
    "proximal-ewc": (1e4, 1e5),
    "budget-ewc": (1e-5, 1e-4),
    "budget-kronecker": (1e-5, 1e-3),
    "l2-sp": (30.0, 100.0),
    # the middle of the range of a stiffness, two shares and a weight
    "soft": (0.3, 0.3),
    "sfa": (0.5, 0.5),
    "wise-ft": (0.5, 0.5),
    "cofima": (1.0, 1.0),
    # elsewhere a weight of 1, and the budget in nats that `attach` has by default
    "distil": (1.0, 1.0),
    "lwf": (3.0, 1.0),
    "der++": (0.1, 0.1),
    "mooring": (0.1, 0.1),
    "budget-measured": (0.003, 0.1),
    "budget-distil": (0.003, 0.1),
    # on the digits by docs/projections.md; elsewhere the papers' (1 - 0.97, a = 10, Adam's 0.01), and for OWM ours
    "gpm": (0.01, 0.03),
    "nscl": (100.0, 10.0),
    "owm": (0.01, 0.01),
    "ftp": (0.001, 0.01),
    "tpgm": (0.01, 0.01),
}
"""The strengths on the digits and those of the paper."""

DIGITS_STRENGTHS = {name: digits for name, (digits, _) in STRENGTHS.items()}
"""Tuned with `mooring tune` or a sweep on the digits, two classes per task (docs/tuning.md)."""

PAPER_STRENGTHS = {name: paper for name, (_, paper) in STRENGTHS.items()}
"""The paper's strengths for CIFAR-100, one epoch, learning rate 0.001. From summed-ewc on they are ours."""


def paper_strength(method: str) -> float | None:
    """Return the paper's strength of a method; balanced, clamped and signed forms have that of their base method.

    Example:
        >>> paper_strength("clamped-ewc"), paper_strength("si-signed"), paper_strength("plain")
        (1000.0, 0.01, None)
    """
    names = (method, method.removeprefix("balanced-").removeprefix("clamped-"), method.partition("-")[0])
    return next((PAPER_STRENGTHS[name] for name in names if name in PAPER_STRENGTHS), None)
