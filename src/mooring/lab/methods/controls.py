"""The controls that every comparison carries: what no protection gives, and what perfect protection would."""

from mooring.lab.methods.method import Method

__all__ = ["METHODS"]

METHODS = [
    Method("plain", "fine-tune on each task, protect nothing: the floor"),
    Method("frozen", "never change the backbone, train the heads only", frozen="always"),
    Method("frozen-after-first", "train the backbone on the first task, then freeze it", frozen="after first"),
    Method("joint", "train on all tasks at once, for as many steps: the ceiling", data="joint"),
]
