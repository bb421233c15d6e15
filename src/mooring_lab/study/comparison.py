"""A comparison: streams x methods x seeds, and the runs that it consists of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mooring.errors import MooringError, check_whole, unknown
from mooring_lab.methods import find_method, resolve_methods
from mooring_lab.methods.registry import default_strength
from mooring_lab.model.scenarios import scenario_title
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.training import Training, default_training
from mooring_lab.networks import backbone_factory
from mooring_lab.streams.options import StreamOptions
from mooring_lab.streams.stream import Stream, in_scenario
from mooring_lab.study.defaults import COMPARED_METHODS, MAX_SEEDS

Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Comparison:
    """What to compare. Everything that can be wrong with it is refused when it is created.

    Attributes:
        streams: the streams, each with how to train on it.
        methods: names from the registry.
        seeds: the seeds of the runs; the same for all methods.
        lr: learning rates of single methods, instead of the common one; several make several rows.
        strength: strengths of single methods, instead of their defaults; several make several rows.
    """

    streams: tuple[tuple[StreamOptions | Stream, Training], ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    lr: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    strength: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, before any data is read."""
        for method in map(find_method, self.methods):
            if method.strength is not None:
                method.check_strength(method.strength)  # a default strength outside the method's range
        for name, strengths in self.strength.items():
            if not find_method(name).has_strength:
                raise MooringError(f"{name} has no strength to give: leave it out")
            for strength in strengths:
                find_method(name).check_strength(strength)
        for option, by_method in (("lr", self.lr), ("strength", self.strength)):
            for name in by_method:
                if name not in self.methods:
                    raise MooringError(
                        f"{name} is not among the methods ({', '.join(self.methods)}): "
                        f"add it to methods, or leave its {option} out"
                    )
        if not self.streams:
            raise MooringError("no stream to run: give at least one")
        for source, training in self.streams:
            if not isinstance(source, StreamOptions | Stream):
                raise MooringError(f"stream={source!r} is not allowed: give a name, StreamOptions or a Stream")
            scenario = scenario_of(source)
            for name in self.methods:
                find_method(name).check_scenario(scenario)
            if training.heads == "fresh" and scenario != "task":
                raise MooringError(
                    f"heads='fresh' is for tasks with heads of their own, and {source.name} is "
                    f"{scenario_title(scenario)}: leave heads out, or give scenario task"
                )
            backbone_factory(training.network)
            if not self.specs(training, "", "", ""):
                raise MooringError("nothing to run: give at least one method and one seed")

    def specs(self, training: Training, stream: str, data: str, init: str) -> list[RunSpec]:
        """Return the runs on one stream.

        Args:
            training: how to train.
            stream: the name of the stream.
            data: the fingerprint of the stream.
            init: the fingerprint of the initial weights; empty for random weights.
        """
        specs = []
        for name in self.methods:
            method = find_method(name)
            default: tuple[float | None, ...] = (default_strength(method, paper=training.paper),)
            memory = (method.memory if training.memory is None else training.memory) if method.memory else None
            common: dict[str, Any] = {**training.spec_fields(), "memory": memory, "init": init}
            if method.importance is None:
                common["buffers"] = "follow"
            for lr in self.lr.get(name, (training.lr,)):
                for strength in self.strength.get(name, default):
                    for seed in self.seeds:
                        specs.append(RunSpec(stream, data, name, seed, lr=lr, strength=strength, **common))
        return specs


def comparison(
    stream: str | StreamOptions | Stream | Sequence[str | StreamOptions | Stream] = "digits",
    methods: str | Sequence[str] = COMPARED_METHODS,
    seeds: int | Sequence[int] = 5,
    *,
    scenario: str | None = None,
    lr: Numbers | Mapping[str, Numbers] | None = None,
    strength: Numbers | Mapping[str, Numbers] | None = None,
    **training: Any,
) -> Comparison:
    """Make a comparison from plain values, as they come from a command line, a file or a notebook.

    Args:
        stream: one or several: names, options, or streams made in Python.
        methods: names, in a list or separated by commas; "all" stands for every method.
        seeds: how many, or which.
        scenario: "task", "class" or "domain", for all streams; by default each stream's own.
        lr: one learning rate for all methods, several, or those of each method by name.
        strength: the same for the methods that have a strength.
        training: any field of `Training`; None counts as not given.

    Example:
        >>> asked = comparison("digits", "plain,ewc", seeds=2, strength={"ewc": [10, 100]})
        >>> len(asked.specs(asked.streams[0][1], "", "", ""))
        6
    """
    if not isinstance(methods, str | list | tuple):
        raise MooringError(f"methods={methods!r} is not allowed: give names")
    names = tuple(resolve_methods(methods if isinstance(methods, str) else list(methods)))
    with_strength = [name for name in names if find_method(name).has_strength]
    streams: list[Any] = list(stream) if isinstance(stream, list | tuple) else [stream]
    sources = [StreamOptions(source) if isinstance(source, str) else source for source in streams]
    if scenario is not None:
        sources = [_in_scenario(source, scenario) for source in sources]
    common_lr = lr if isinstance(lr, int | float) else None
    known = [name for name in Training.__dataclass_fields__ if name not in ("lr", "paper")]
    for name in training:
        if name not in known:
            raise unknown("setting", name, ["stream", "methods", "seeds", "scenario", "lr", "strength", *known])
    if (memory := training.get("memory")) is not None:
        check_whole("memory", memory, 1)
    if strength is not None and not isinstance(strength, Mapping) and not with_strength:
        raise MooringError(f"none of {', '.join(names)} has a strength to give: leave it out")
    trainings = [default_training(getattr(source, "name", ""), lr=common_lr, **training) for source in sources]
    return Comparison(
        streams=tuple(zip(sources, trainings, strict=True)),
        methods=names,
        seeds=seed_numbers(seeds),
        lr={} if lr is None or common_lr is not None else _by_method("lr", lr, names),
        strength={} if strength is None else _by_method("strength", strength, with_strength),
    )


def scenario_of(source: StreamOptions | Stream) -> str:
    """Return the scenario of a stream, or the one that its options choose.

    Example:
        >>> scenario_of(StreamOptions("digits-permuted"))
        'domain'
    """
    return source.scenario if isinstance(source, Stream) else source.chosen_scenario


def _in_scenario(source: Any, scenario: str) -> Any:
    if isinstance(source, Stream):
        return in_scenario(source, scenario)
    return replace(source, scenario=scenario) if isinstance(source, StreamOptions) else source


def seed_numbers(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return the seeds, given how many or which.

    Example:
        >>> seed_numbers(3), seed_numbers([7, 9])
        ((0, 1, 2), (7, 9))
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        check_whole("seeds", seeds, 0, MAX_SEEDS)  # 0 seeds are refused later: "nothing to run"
        return tuple(range(seeds))
    if not isinstance(seeds, list | tuple | range):
        raise MooringError(f"seeds={seeds!r} is not allowed: say how many, or which in a list")
    return tuple(seeds)


def _by_method(
    option: str, values: Numbers | Mapping[str, Numbers], names: Sequence[str]
) -> dict[str, tuple[float, ...]]:
    """Return the numbers of each method: those of a mapping, or the same numbers for all."""
    if isinstance(values, Mapping):
        return {find_method(name).name: _numbers(option, value) for name, value in values.items()}
    return {name: _numbers(option, values) for name in names}


def _numbers(option: str, value: Numbers) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        return (value,)  # type: ignore[return-value]
    if not value:
        raise MooringError(f"{option}=[] is not allowed: give at least one number")
    return tuple(value)
