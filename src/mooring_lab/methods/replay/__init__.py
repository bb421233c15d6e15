"""Replay of samples of previous tasks: experience replay and A-GEM."""

from typing import Any

from mooring_lab.methods.strengths import SAMPLES
from mooring_lab.model.method import Method, ReplayOptions

EXPERIENCE_REPLAY = "mooring_lab.methods.replay.experience_replay:ExperienceReplay"
AGEM = "mooring_lab.methods.replay.agem:AGEM"
SLICES = "mooring_lab.methods.replay.slot_memory"


def _as_published(name: str, plugin: str, **options: Any) -> Method:
    plugin_options = ReplayOptions(f"{SLICES}:{plugin}", past_only=True, fresh_heads=True, **options)
    line = f"{name} as the paper's public code defines it"
    return Method(f"{name}-as-published", line, memory=SAMPLES, plugin=plugin_options)


def _er(name: str, line: str, **options: Any) -> Method:
    return Method(name, line, memory=SAMPLES, plugin=ReplayOptions(EXPERIENCE_REPLAY, **options), group="published")


def _agem(name: str, line: str, **options: Any) -> Method:
    plugin = ReplayOptions(AGEM, past_only=True, **options)
    return Method(name, line, memory=SAMPLES, plugin=plugin, group="published")


METHODS = [
    _er("er", "experience replay: every step also trains on a batch of old samples"),
    _agem("a-gem", "project the gradient so that the loss on old samples does not rise"),
]

VARIANTS = [
    _agem("a-gem-256", "A-GEM with a gradient from 256 old samples", recalls=256),
    _er("er-50", "experience replay of 50 samples in each step", recalls=50),
    _er("er-past", "experience replay of samples of past tasks only", past_only=True),
    _er("er-2-updates", "er with 2 steps in a row on each batch", updates=2),
    _agem("a-gem-2-updates", "a-gem with 2 steps in a row on each batch", updates=2),
    _as_published("er", "SliceReplay", updates=2),
    _as_published("a-gem", "SliceAGEM"),
]
