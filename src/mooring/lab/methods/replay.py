"""Replay methods, which keep some samples of previous tasks."""

from mooring.lab.methods.method import Method

__all__ = ["METHODS", "VARIANTS"]

SAMPLES = 500
"""The default size of the memory, in samples."""

METHODS = [
    Method("er", "experience replay: every step also trains on a batch of old samples", data="er", memory=SAMPLES),
    Method(
        "a-gem",
        "project the gradient so that the loss on old samples does not rise",
        data="a-gem",
        memory=SAMPLES,
    ),
]

VARIANTS = [
    Method("a-gem-256", "A-GEM with a gradient from 256 old samples", data="a-gem", memory=SAMPLES, recalls=256),
]
