"""The registry of claim definitions: one function for each claim, registered by the claim's statement."""

from collections.abc import Callable, Sequence

from recomputation.evidence import Pair, Recomputed

Definition = Callable[..., Recomputed]
DEFINITIONS: dict[str, Definition] = {}


def claim(statement: str) -> Callable[[Definition], Definition]:
    """Register the definition of the claims whose statement matches a regular expression; its groups are arguments."""

    def register(definition: Definition) -> Definition:
        DEFINITIONS[statement] = definition
        return definition

    return register


def swapped(pairs: Sequence[Pair]) -> list[Pair]:
    """Return pairs in the other order."""
    return [pair.swapped for pair in pairs]
