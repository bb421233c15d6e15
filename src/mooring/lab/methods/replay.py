"""Replay: methods that keep a few old samples, to see what keeping none costs."""

from mooring.lab.methods.method import Method

__all__ = ["METHODS", "VARIANTS"]

MEMORY = 500

METHODS = [
    Method("er", "experience replay: a batch of old samples beside each new one", data="er", memory=MEMORY),
    Method("a-gem", "project the gradient so that the loss on old samples does not rise", data="a-gem", memory=MEMORY),
]

VARIANTS = [
    Method("a-gem-256", "A-GEM with a gradient from 256 old samples", data="a-gem", memory=MEMORY, recalls=256),
]
