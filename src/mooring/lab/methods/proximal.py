"""The penalty as a proximal step, which cannot extrapolate at any strength."""

from mooring.importance import EWC
from mooring.lab.methods.method import Method
from mooring.lab.methods.strengths import DIGITS
from mooring.merges import total
from mooring.pulls import Proximal

__all__ = ["METHODS"]

METHODS = [
    Method(
        "proximal-ewc",
        "EWC's penalty as a step of its own, with the mean Fisher of each task, summed",
        lambda seed: EWC(decay=None, per_sample=True),
        Proximal,
        strength=DIGITS["proximal-ewc"],
        merge=total,
    )
]
