"""Methods that moor nothing: controls for every comparison, and replay of samples of previous tasks."""

from dataclasses import replace
from typing import Any

from mooring_lab.methods.method import Method

SAMPLES = 500
"""The default size of the memory, in samples."""

CONTROLS = [
    Method("plain", "plain fine-tuning on each task, without protection"),
    Method("frozen", "train the heads only and never change the backbone", frozen="always"),
    Method("frozen-after-first", "train the backbone on the first task, then freeze it", frozen="after first"),
    Method("joint", "train on all tasks at once, for as many steps: a reference without forgetting", data="joint"),
]

REPLAY = [
    Method("er", "experience replay: every step also trains on a batch of old samples", data="er", memory=SAMPLES),
    Method("a-gem", "project the gradient so that the loss on old samples does not rise", data="a-gem", memory=SAMPLES),
]


def _variant(of: Method, suffix: str, line: str, **fields: Any) -> Method:
    return replace(of, name=f"{of.name}-{suffix}", line=line, **fields)


_ER, _A_GEM = REPLAY

VARIANTS = [
    _variant(_A_GEM, "256", "A-GEM with a gradient from 256 old samples", recalls=256),
    _variant(_ER, "50", "experience replay of 50 samples in each step", recalls=50),
    _variant(_ER, "past", "experience replay of samples of past tasks only", past_only=True),
    *(
        _variant(method, "2-updates", f"{method.name} with 2 steps in a row on each batch", updates=2)
        for method in REPLAY
    ),
]
