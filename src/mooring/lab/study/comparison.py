"""A comparison: streams x methods x seeds, and the runs it comes to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooring.errors import MooringError, check_whole, unknown
from mooring.lab.methods import find_method, resolve_methods
from mooring.lab.methods.strengths import default_strength
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.training import Training, default_training
from mooring.lab.networks import backbone_factory, versioned_name
from mooring.lab.streams.options import StreamOptions
from mooring.lab.streams.stream import Stream
from mooring.lab.study.defaults import COMPARED_METHODS, MAX_SEEDS

__all__ = ["Comparison", "comparison"]

Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Comparison:
    """What is to be compared. Everything that can be wrong with it is refused when it is made.

    Attributes:
        streams: what to train through, each with how.
        methods: names from the registry.
        seeds: of the runs; the same for all methods.
        lr: learning rates of single methods, instead of the common one; several make several rows.
        strength: strengths of single methods, instead of their defaults; several make several rows.
    """

    streams: tuple[tuple[StreamOptions | Stream, Training], ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    lr: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    strength: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be run, before any data is read."""
        for name, strengths in self.strength.items():
            if not find_method(name).has_strength:
                raise MooringError(f"{name} has no strength to give: leave it out")
            for strength in strengths:
                find_method(name).pull(strength)  # refuses what is outside its range
        for kind, given in (("lr", self.lr), ("strength", self.strength)):
            for name in given:
                if name not in self.methods:
                    among = f"{name} is not among the methods ({', '.join(self.methods)})"
                    raise MooringError(f"{among}: add it to methods, or leave its {kind} out")
        if not self.streams:
            raise MooringError("no stream to run: give at least one")
        for source, training in self.streams:
            if not isinstance(source, StreamOptions | Stream):
                raise MooringError(f"stream={source!r} is not allowed: give a name, StreamOptions or a Stream")
            backbone_factory(training.network)
            if not self.specs(training, "", "", ""):
                raise MooringError("nothing to run: give at least one method and one seed")

    def specs(self, training: Training, stream: str, data: str, init: str) -> list[RunSpec]:
        """The runs on one stream.

        Args:
            training: how.
            stream: what it is called.
            data: its fingerprint.
            init: the fingerprint of the weights to start from, or nothing.
        """
        made = []
        network = versioned_name(training.network)
        for name in self.methods:
            method = find_method(name)
            usual = default_strength(method, paper=training.paper)
            strengths: tuple[float | None, ...] = self.strength.get(name, (usual,))
            memory = (method.memory if training.memory is None else training.memory) if method.memory else None
            for lr in self.lr.get(name, (training.lr,)):
                for strength in strengths:
                    for seed in self.seeds:
                        rest: dict[str, Any] = {
                            **training.spec_fields(),
                            "memory": memory,
                            "init": init,
                            "network": network,
                        }
                        made.append(RunSpec(stream, data, name, seed, lr=lr, strength=strength, **rest))
        return made


def comparison(
    stream: str | StreamOptions | Stream | Sequence[str | StreamOptions | Stream] = "digits",
    methods: str | Sequence[str] = COMPARED_METHODS,
    seeds: int | Sequence[int] = 5,
    *,
    lr: Numbers | Mapping[str, Numbers] | None = None,
    strength: Numbers | Mapping[str, Numbers] | None = None,
    **training: Any,
) -> Comparison:
    """A comparison from plain values, as they come from a command line, a file or a notebook.

    Args:
        stream: one or several: names, options, or streams made in Python.
        methods: names, in a list or with commas; "all" stands for every one.
        seeds: how many, or which.
        lr: one learning rate for all methods, several, or some for each method by name.
        strength: the same for those methods that have a strength.
        training: any field of `Training`; what is None counts as not given.

    Example:
        >>> made = comparison("digits", "plain,ewc", seeds=2, strength={"ewc": [10, 100]})
        >>> len(made.specs(made.streams[0][1], "", "", ""))
        6
    """
    if not isinstance(methods, str | list | tuple):
        raise MooringError(f"methods={methods!r} is not allowed: give names")
    names = tuple(resolve_methods(methods if isinstance(methods, str) else list(methods)))
    strong = [name for name in names if find_method(name).has_strength]
    streams: list[Any] = list(stream) if isinstance(stream, list | tuple) else [stream]
    one_lr = lr if isinstance(lr, int | float) else None
    opened = [StreamOptions(each) if isinstance(each, str) else each for each in streams]
    _check_training(training)
    memory = training.get("memory")
    if memory is not None:
        check_whole("memory", memory, 1)
    if strength is not None and not isinstance(strength, Mapping) and not strong:
        raise MooringError(f"none of {', '.join(names)} has a strength to give: leave it out")
    return Comparison(
        streams=tuple((each, default_training(getattr(each, "name", ""), lr=one_lr, **training)) for each in opened),
        methods=names,
        seeds=seeds_of(seeds),
        lr={} if lr is None or one_lr is not None else _by_method("lr", lr, names),
        strength={} if strength is None else _by_method("strength", strength, strong),
    )


def seeds_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """Which seeds, from how many or which."""
    if isinstance(given, int) and not isinstance(given, bool):
        check_whole("seeds", given, 0, MAX_SEEDS)  # that there are none is refused with what there is to run
        return tuple(range(given))
    if not isinstance(given, list | tuple | range):
        raise MooringError(f"seeds={given!r} is not allowed: say how many, or which in a list")
    return tuple(given)


def _check_training(given: Mapping[str, Any]) -> None:
    known = [name for name in Training.__dataclass_fields__ if name not in ("lr", "paper")]
    for name in given:
        if name not in known:
            raise unknown("setting", name, ["stream", "methods", "seeds", "lr", "strength", *known])


def _by_method(kind: str, given: Numbers | Mapping[str, Numbers], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """A tuple of numbers for each method: from a mapping as it is, from anything else the same for all."""
    if isinstance(given, Mapping):
        return {find_method(name).name: _numbers(kind, value) for name, value in given.items()}
    return {name: _numbers(kind, given) for name in names}


def _numbers(kind: str, value: Numbers) -> tuple[float, ...]:
    if isinstance(value, list | tuple) and not value:
        raise MooringError(f"{kind}=[] is not allowed: give at least one number")
    return tuple(value) if isinstance(value, list | tuple) else (value,)  # type: ignore[return-value]
