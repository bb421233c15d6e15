"""The specification of a run: everything its result depends on, and a key computed from it."""

import hashlib
import json
import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from mooring.errors import MooringError, check_number, check_whole, unknown

BUFFERS = ("follow", "frozen")
DTYPES = ("float32", "float64", "tf32", "bf16")
HEADS = ("inherit", "fresh")
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "steps", "cosine", "warmup-linear")
VERSION = 1
"""The version of the keys; it rises when the same specification gives another result."""


@dataclass(frozen=True)
class RunSpec:
    """One model trained through one stream by one method with one seed.

    Attributes:
        stream: the stream's name; it is only shown.
        data: the fingerprint of the stream's images, labels and tasks.
        method: the method's name in the registry.
        seed: the seed of the initialization, the data order and every other random number.
        network: the network's name, or `package.module:function`.
        lr: the learning rate.
        strength: the factor of a penalty; None for methods without one.
        epochs: the number of passes over each task.
        batch: the number of samples in a batch.
        momentum: the momentum of SGD, or the first beta of AdamW.
        weight_decay: the weight decay of SGD, or AdamW's, which is decoupled from the gradient.
        memory: the number of samples of past tasks that a method keeps; None for methods that keep none.
        heads: the initial head of a task: "inherit" copies the previous task's head, "fresh" keeps the random one.
        init: the fingerprint of the weights that the backbone starts from; empty for random weights.
        dtype: "float32" or "float64" for parameters and arithmetic. On a GPU also "tf32" or "bf16", which apply to
            matrix products and convolutions; everything else is float32.
        schedule: the learning rate over a task. "constant" keeps it. "steps" is a tenth of it after 5/12 of the epochs
            and a hundredth after 10/12. "cosine" falls along half a cosine towards 0, from epoch to epoch.
            "warmup-linear" rises from 0 in the first tenth of all steps and then falls to 0, in straight lines.
        flips: whether half of the training images, chosen at random, are mirrored.
        shifts: the largest random shift of each training image, in pixels, in both directions; black comes in.
        buffers: running statistics of normalization layers from the second task on: "follow" the data, and are merged
            by methods that merge weights at the end of a task; or "frozen" layers use and do not change them.
        optimizer: "sgd" or "adamw", with torch's defaults for what is not named above. It starts again in each task.

    Example:
        >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
        >>> spec.key == RunSpec(stream="another name for it", data="0", method="plain", seed=0).key
        True
    """

    stream: str
    data: str
    method: str
    seed: int
    network: str = "mlp"
    lr: float = 0.03
    strength: float | None = None
    epochs: int = 5
    batch: int = 20
    momentum: float = 0.9
    weight_decay: float = 0.0
    memory: int | None = None
    heads: str = "inherit"
    init: str = ""
    dtype: str = "float32"
    schedule: str = "constant"
    flips: bool = False
    shifts: int = 0
    buffers: str = "follow"
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        """Check that every value is allowed."""
        check_number("lr", self.lr, 0, above=True)
        check_number("momentum", self.momentum, 0, 1)
        if self.optimizer == "adamw" and self.momentum == 1:
            raise MooringError(f"momentum={self.momentum!r} is not allowed with adamw: give a number below 1")
        check_number("weight_decay", self.weight_decay, 0)
        if self.strength is not None:
            check_number("strength", self.strength, 0)
        check_whole("epochs", self.epochs, 1)
        check_whole("batch", self.batch, 1)
        check_whole("memory", 1 if self.memory is None else self.memory, 1)
        check_whole("seed", self.seed, 0, 1 << 62)
        check_whole("shifts", self.shifts, 0)
        if not isinstance(self.flips, bool):
            raise MooringError(f"flips={self.flips!r} is not allowed: give True or False")
        for name in ("lr", "strength", "momentum", "weight_decay"):  # 10 and 10.0 must give the same key
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)

    @cached_property
    def key(self) -> str:
        """The hash of everything but the stream's name."""
        values = {name: value for name, value in self.to_json().items() if name != "stream"}
        text = json.dumps({"version": VERSION, **values}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serializable values, without the `OPTIONAL_FIELDS` that have their default."""
        values = {name: getattr(self, name) for name in FIELD_NAMES}
        return {name: value for name, value in values.items() if (name, value) not in OPTIONAL_FIELDS.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunSpec":
        """Return the specification that `to_json` described; raise an error for unknown fields.

        Example:
            >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
            >>> RunSpec.from_json(spec.to_json()) == spec
            True
        """
        if extra := sorted(values.keys() - set(FIELD_NAMES)):
            raise MooringError(f"a run's spec has {', '.join(map(repr, extra))}: it was made by a newer version")
        return cls(**values)


def rate_factor(schedule: str, step: int, steps: int, epochs: int) -> float:
    """Return the factor of a schedule on the learning rate.

    Args:
        schedule: one of `SCHEDULES`, which `RunSpec.schedule` explains.
        step: the number of the step within a task, from 0.
        steps: of the task.
        epochs: of the task, of as many steps each.

    Example:
        >>> [rate_factor("steps", step, steps=120, epochs=60) for step in (0, 50, 100)]
        [1.0, 0.1, 0.01]
        >>> [rate_factor("warmup-linear", step, steps=20, epochs=1) for step in (0, 1, 2, 11, 20)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if schedule == "warmup-linear":
        warmup = -(-steps // 10)  # at least 1
        return step / warmup if step < warmup else (steps - step) / max(1, steps - warmup)
    epoch = step * epochs // steps
    if schedule == "cosine":
        return (1 + math.cos(math.pi * epoch / epochs)) / 2
    drops = sum(12 * epoch >= part * epochs for part in (5, 10)) if schedule == "steps" else 0
    return (1.0, 0.1, 0.01)[drops]


CHOICES = {"dtype": DTYPES, "heads": HEADS, "schedule": SCHEDULES, "buffers": BUFFERS, "optimizer": OPTIMIZERS}
"""The allowed values of fields that have few."""

FIELD_NAMES = tuple(field.name for field in fields(RunSpec))
"""The names of the fields, computed once because a study can have ten thousand specifications."""

OPTIONAL_FIELDS = {"schedule": "constant", "flips": False, "shifts": 0, "buffers": "follow", "optimizer": "sgd"}
"""Later fields and their defaults, which keys and JSON leave out so that results stored earlier are still found."""
