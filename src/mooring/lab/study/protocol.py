"""The paper's protocol: search a grid on the first tasks, then train on the rest with what was best there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mooring.errors import MooringError, check_whole
from mooring.lab.methods import Method, find_method
from mooring.lab.model.metrics import SCORE_TOLERANCE
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import Row, summarize
from mooring.lab.networks.initialization import BackboneWeights, initial_network
from mooring.lab.streams.slices import select_tasks
from mooring.lab.streams.stream import Stream
from mooring.lab.study.comparison import Comparison, comparison, seeds_of
from mooring.lab.study.defaults import LRS, STRENGTHS
from mooring.lab.study.study import Study, checked_baseline, read_start
from mooring.pulls import Penalty, Proximal

__all__ = ["Choice", "Tuned", "choices_of", "tune"]


@dataclass(frozen=True)
class Choice:
    """What the grid search chose for a method on a stream.

    Attributes:
        stream: what was searched.
        method: which method.
        best: the row of the grid with the highest mean accuracy, the first where there are several; None where none
            finished.
        grid: every row.
    """

    stream: str
    method: str
    best: Row | None
    grid: tuple[Row, ...]

    @property
    def dropped(self) -> tuple[Row, ...]:
        """The rows of the grid that were rejected or unstable with some seed, which is why they were not chosen."""
        return tuple(row for row in self.grid if row.unfinished)

    @property
    def as_good(self) -> tuple[Row, ...]:
        """The other rows with the accuracy of the best: between these the order of the grid decided."""
        if self.best is None:
            return ()
        most = self.best.metrics["accuracy"].mean
        steady = (row for row in self.grid if not row.unfinished and row is not self.best)
        return tuple(row for row in steady if row.metrics["accuracy"].mean >= most - SCORE_TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        best = None if self.best is None else self.best.to_json()
        dropped = [
            {"lr": row.setting.lr, "strength": row.setting.strength, "status": bad.status, "reason": bad.reason}
            for row in self.dropped
            for bad in row.unfinished[:1]
        ]
        as_good = [{"lr": row.setting.lr, "strength": row.setting.strength} for row in self.as_good]
        told = {"stream": self.stream, "method": self.method, "best": best, "as_good": as_good, "dropped": dropped}
        return {**told, "grid": len(self.grid)}


@dataclass(frozen=True)
class Tuned:
    """What came of a search and of the training after it.

    Attributes:
        choices: one for each stream and method.
        rows: the training on the tasks that were not searched, at the chosen settings.
    """

    choices: tuple[Choice, ...]
    rows: tuple[Row, ...]


def tune(
    study: Study,
    *,
    tasks: int = 3,
    lrs: Sequence[float] = LRS,
    strengths: Sequence[float] | None = None,
    search_seeds: int | Sequence[int] = 1,
    baseline: str | None = None,
    **told: Any,
) -> Tuned:
    """Search learning rates and strengths on the first tasks, then train on the rest.

    The best is the one with the highest average accuracy over the searched tasks. Settings whose penalty does not
    interpolate everywhere after the first task (0 < lr * strength * importance < 1) are rejected there and then.

    Args:
        study: where results are kept.
        tasks: how many tasks are searched; the others are trained and scored.
        lrs: the learning rates to try.
        strengths: the strengths to try, for methods that have one; by default the paper's grid for penalties, and
            each method's own dial where its strength is something else.
        search_seeds: of the search; how many, or which.
        baseline: a method to compare accuracy with, seed by seed.
        told: the arguments of `mooring.lab.study.comparison.comparison` but for lr and strength.

    Example:
        >>> import tempfile
        >>> told = {"stream": "digits", "methods": "plain,ewc", "seeds": 1, "epochs": 1}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tuned = tune(Study(f"{folder}/digits.sqlite"), lrs=[0.02], strengths=[1.0, 1e9], **told)
        >>> [choice.best.label for choice in tuned.choices], [row.label for row in tuned.choices[1].dropped]
        (['plain', 'ewc 1'], ['ewc 1e+09'])
    """
    check_whole("tasks", tasks, 1)
    for name, given in (("lrs", lrs), ("strengths", strengths)):
        if given is not None and not isinstance(given, list | tuple):
            raise MooringError(f"{name}={given!r} is not allowed: give numbers in a list")
    asked = comparison(**told)
    asked = replace(asked, streams=tuple((each, how.on(study.device)) for each, how in asked.streams))
    baseline = checked_baseline(baseline, asked.methods)
    grid = _grid(asked, lrs, strengths, search_seeds)
    study.store.check_writable()
    choices: list[Choice] = []
    chosen: list[RunSpec] = []
    streams: dict[str, Stream] = {}
    weights: dict[str, BackboneWeights] = {}
    for number, (source, training) in enumerate(asked.streams):
        init = read_start(training, weights)
        stream = study.open(source)
        if len(stream.tasks) <= tasks:
            raise MooringError(f"{stream.name} has {len(stream.tasks)} tasks: search fewer than that, not {tasks}")
        first, rest = select_tasks(stream, 0, tasks), select_tasks(stream, tasks)
        first = replace(first, name=f"{stream.name}: first {tasks}, searched")
        rest = replace(rest, name=f"{stream.name}: other {len(rest.tasks)}, trained")
        initial_network(training.network, stream, 0, weights=weights.get(init))  # refused here, if it is to be
        searched = grid.specs(grid.streams[number][1], first.name, first.fingerprint, init)
        results = study.run(searched, {first.fingerprint: first}, weights, reject=True)
        found = choices_of(first.name, results, asked.methods)
        choices += found
        streams[rest.fingerprint] = rest
        for spec in asked.specs(training, rest.name, rest.fingerprint, init):
            best = next(choice.best for choice in found if choice.method == spec.method)
            if best is not None:
                chosen.append(replace(spec, lr=best.setting.lr, strength=best.setting.strength))
    known = baseline if any(spec.method == baseline for spec in chosen) else None  # all of its settings may be dropped
    rows = summarize(study.run(chosen, streams, weights), known) if chosen else []
    return Tuned(tuple(choices), tuple(rows))


def _grid(
    asked: Comparison, lrs: Sequence[float], strengths: Sequence[float] | None, seeds: int | Sequence[int]
) -> Comparison:
    """The same comparison at every point of the grid."""
    strong = [find_method(name) for name in asked.methods if find_method(name).has_strength]
    return replace(
        asked,
        seeds=seeds_of(seeds),
        lr=dict.fromkeys(asked.methods, tuple(lrs)),
        strength={method.name: _strengths(method) if strengths is None else tuple(strengths) for method in strong},
    )


def _strengths(method: Method) -> tuple[float, ...]:
    """The paper's grid where the strength is a penalty's; else the method's dial."""
    return STRENGTHS if isinstance(method.pull(1.0), Penalty | Proximal) else method.dial


def choices_of(stream: str, results: Sequence[Result], methods: Sequence[str]) -> list[Choice]:
    """For each method, the best of what was tried: the highest mean accuracy, among those that every seed finished.

    Where several have it, the first of the grid is taken, and `Choice.as_good` names the others.

    Args:
        stream: what was searched.
        results: the runs of the search, of any of the methods.
        methods: those to choose for.
    """
    found = []
    for method in methods:
        grid = summarize([result for result in results if result.spec.method == method])
        steady = [row for row in grid if not row.unfinished]
        best = max(steady, key=lambda row: row.metrics["accuracy"].mean, default=None)
        found.append(Choice(stream, method, best, tuple(grid)))
    return found
