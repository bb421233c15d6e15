"""Controls for every comparison: a lower bound without protection, and upper bounds."""

from mooring.lab.methods.method import Method

__all__ = ["METHODS"]

METHODS = [
    Method("plain", "plain fine-tuning on each task, without protection: the lower bound"),
    Method("frozen", "train the heads only and never change the backbone", frozen="always"),
    Method("frozen-after-first", "train the backbone on the first task, then freeze it", frozen="after first"),
    Method("joint", "train on all tasks at once, for as many steps: the upper bound", data="joint"),
]
