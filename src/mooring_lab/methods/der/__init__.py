"""Dark experience replay: replayed samples keep the outputs with which they were stored."""

from dataclasses import dataclass

from mooring_lab.methods.strengths import DIGITS_STRENGTHS, SAMPLES
from mooring_lab.model.method import Method, ReplayOptions


@dataclass(frozen=True)
class DarkReplayOptions(ReplayOptions):
    """Options of replay with stored outputs."""

    plugin: str = "mooring_lab.methods.der.dark_experience:DarkExperience"
    uses_strength = True
    acts_at_once = True


METHODS = [
    Method(
        "der++",
        "replay old samples with stored outputs, times a weight (its strength), and with labels (DER++)",
        strength=DIGITS_STRENGTHS["der++"],
        dial=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
        memory=SAMPLES,
        plugin=DarkReplayOptions(),
    ),
]
