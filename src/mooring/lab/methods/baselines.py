"""Methods that moor nothing: controls for every comparison, and replay of samples of previous tasks."""

from mooring.lab.methods.method import Method

SAMPLES = 500
"""The default size of the memory, in samples."""

CONTROLS = [
    Method("plain", "plain fine-tuning on each task, without protection: the lower bound"),
    Method("frozen", "train the heads only and never change the backbone", frozen="always"),
    Method("frozen-after-first", "train the backbone on the first task, then freeze it", frozen="after first"),
    Method("joint", "train on all tasks at once, for as many steps: the upper bound", data="joint"),
]

REPLAY = [
    Method("er", "experience replay: every step also trains on a batch of old samples", data="er", memory=SAMPLES),
    Method("a-gem", "project the gradient so that the loss on old samples does not rise", data="a-gem", memory=SAMPLES),
]

VARIANTS = [
    Method("a-gem-256", "A-GEM with a gradient from 256 old samples", data="a-gem", memory=SAMPLES, recalls=256)
]
