"""What makes a run: everything its result depends on, and a name made of just that."""

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from mooring.errors import MooringError, check_number, check_whole, unknown

__all__ = ["DTYPES", "HEADS", "RunSpec"]

DTYPES = ("float32", "float64", "tf32", "bf16")
HEADS = ("inherit", "fresh")
VERSION = 1
"""Of what a key stands for: raised when the same spec would give another result."""


@dataclass(frozen=True)
class RunSpec:
    """One model trained through one stream by one method with one seed.

    Attributes:
        stream: what the stream is called, for people.
        data: the fingerprint of the stream's images, labels and tasks.
        method: a name from the registry.
        seed: of the initialisation, the data order and whatever else is drawn.
        network: a name, or `package.module:function`.
        lr: the learning rate.
        strength: the factor of a penalty; None for methods without one.
        epochs: passes over each task.
        batch: samples in a batch.
        momentum: of SGD, whose state starts anew with each task.
        weight_decay: of SGD.
        memory: how many samples a replay method keeps; None for the others.
        heads: how a task's head starts: "inherit" from the task before, or "fresh".
        init: the fingerprint of the weights that the backbone starts from; empty for a random start.
        dtype: of parameters and arithmetic: "float32" or "float64"; or, on a GPU, of products alone, with the rest in
            float32: "tf32" or "bf16".

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

    def __post_init__(self) -> None:
        """Refuse numbers outside their range, before any work."""
        check_number("lr", self.lr, 0, above=True)
        check_number("momentum", self.momentum, 0, 1)
        check_number("weight_decay", self.weight_decay, 0)
        if self.strength is not None:
            check_number("strength", self.strength, 0)
        counts = {"epochs": self.epochs, "batch": self.batch, "memory": 1 if self.memory is None else self.memory}
        for name, value in counts.items():
            check_whole(name, value, 1)
        check_whole("seed", self.seed, 0, 1 << 62)
        for name in ("lr", "strength", "momentum", "weight_decay"):  # 10 and 10.0 are the same run
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        for name, given, allowed in (("dtype", self.dtype, DTYPES), ("heads", self.heads, HEADS)):
            if given not in allowed:
                raise unknown(name, given, allowed)

    @cached_property
    def key(self) -> str:
        """The content address: the same for the same run, whatever its stream is called."""
        told = {name: value for name, value in self.to_json().items() if name != "stream"}
        written = json.dumps({"version": VERSION, **told}, sort_keys=True)
        return hashlib.blake2b(written.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {name: getattr(self, name) for name in NAMES}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "RunSpec":
        """From plain values; what a newer version added is refused.

        Example:
            >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
            >>> RunSpec.from_json(spec.to_json()) == spec
            True
        """
        if extra := sorted(told.keys() - set(NAMES)):
            raise MooringError(f"a run's spec has {', '.join(map(repr, extra))}: it was made by a newer version")
        return cls(**told)


NAMES = tuple(field.name for field in fields(RunSpec))
"""Of a spec's fields; there may be ten thousand specs."""
