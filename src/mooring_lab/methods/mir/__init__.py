"""Maximally interfered retrieval: replay of the samples whose loss a step on the batch alone would raise most."""

from dataclasses import dataclass

from mooring_lab.methods.strengths import SAMPLES
from mooring_lab.model.method import Method, ReplayOptions


@dataclass(frozen=True)
class RetrievalOptions(ReplayOptions):
    """Options of retrieval: `recalls` is the number of candidates, of which a step replays as many as its batch has."""

    plugin: str = "mooring_lab.methods.mir.interfered_retrieval:InterferedRetrieval"
    recalls: int | None = 50


METHODS = [
    Method(
        "mir",
        "experience replay of the old samples that a step on the batch would harm most (MIR)",
        memory=SAMPLES,
        plugin=RetrievalOptions(),
        group="published",
    ),
]
