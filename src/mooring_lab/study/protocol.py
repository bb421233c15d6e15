"""The paper's protocol: search a grid on the first tasks, then train on the other tasks with the best setting."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mooring.errors import MooringError, check_whole
from mooring.rules import Penalty, Proximal
from mooring_lab.methods import find_method
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row, summarize
from mooring_lab.networks.initialization import BackboneWeights
from mooring_lab.streams.slices import hold_out, select_tasks
from mooring_lab.streams.stream import Stream
from mooring_lab.study.comparison import Comparison, comparison, seed_numbers
from mooring_lab.study.defaults import LRS, STRENGTHS
from mooring_lab.study.study import Study, resolve_baseline

SCORE_DIGITS = 9
"""Decimals of an accuracy in percent that compare settings; a test set is too small for a difference beyond them."""


@dataclass(frozen=True)
class Choice:
    """The setting that the grid search chose for a method on a stream.

    Attributes:
        stream: the stream that was searched.
        method: the method.
        best: the row of the grid with the highest mean accuracy, the first if there are several; None if no row
            finished.
        grid: every row.
    """

    stream: str
    method: str
    best: Row | None
    grid: tuple[Row, ...]

    @property
    def dropped(self) -> tuple[Row, ...]:
        """The rows that were not considered, because a seed was rejected or unstable."""
        return tuple(row for row in self.grid if row.unfinished)

    @property
    def as_good(self) -> tuple[Row, ...]:
        """The other rows with the accuracy of the best; the order of the grid decided between them."""
        if self.best is None:
            return ()
        others = (row for row in self.grid if not row.unfinished and row is not self.best)
        return tuple(row for row in others if search_score(row) >= search_score(self.best))

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain values."""
        dropped = [
            {"lr": row.setting.lr, "strength": row.setting.strength, "status": result.status, "reason": result.reason}
            for row in self.dropped
            for result in row.unfinished[:1]
        ]
        return {
            "stream": self.stream,
            "scenario": self.grid[0].scenario if self.grid else None,
            "method": self.method,
            "best": None if self.best is None else self.best.to_json(),
            "as_good": [{"lr": row.setting.lr, "strength": row.setting.strength} for row in self.as_good],
            "dropped": dropped,
            "grid": len(self.grid),
        }


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search and of the training after it.

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
    **arguments: Any,
) -> Tuned:
    """Search learning rates and strengths on the first tasks, then train on the others.

    The best setting is the one with the highest average accuracy over the searched tasks. Settings whose penalty does
    not interpolate everywhere after the first task (0 < lr * strength * importance < 1) are rejected there.

    Where the other tasks have the same classes, as permuted and rotated streams do, their test images are images of the
    searched tasks too. The search then scores held-out training images, and no test image.

    Args:
        study: where results are kept.
        tasks: how many tasks are searched; the others are trained and scored.
        lrs: the learning rates to try.
        strengths: the strengths to try, for methods that have one; by default the paper's grid for penalties, and
            each method's own dial if its strength is something else.
        search_seeds: the seeds of the search: how many, or which.
        baseline: a method to compare accuracy with, seed by seed.
        arguments: the arguments of `mooring_lab.study.comparison.comparison`, except lr and strength.

    Example:
        >>> import tempfile
        >>> arguments = {"stream": "digits", "methods": "plain,ewc", "seeds": 1, "epochs": 1}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tuned = tune(Study(f"{folder}/digits.sqlite"), lrs=[0.02], strengths=[1.0, 1e9], **arguments)
        >>> [choice.best.label for choice in tuned.choices], [row.label for row in tuned.choices[1].dropped]
        (['plain', 'ewc 1'], ['ewc 1e+09'])
    """
    check_whole("tasks", tasks, 1)
    for name, values in (("lrs", lrs), ("strengths", strengths)):
        if values is not None and not isinstance(values, list | tuple):
            raise MooringError(f"{name}={values!r} is not allowed: give numbers in a list")
    asked = comparison(**arguments)
    asked = replace(asked, streams=tuple((source, training.on(study.device)) for source, training in asked.streams))
    baseline = resolve_baseline(baseline, asked.methods)
    grid = _grid(asked, lrs, strengths, search_seeds)
    study.store.check_writable()
    choices: list[Choice] = []
    chosen: list[RunSpec] = []
    streams: dict[str, Stream] = {}
    weights: dict[str, BackboneWeights] = {}
    for source, training in asked.streams:
        stream, init, training = study.load(source, training, weights)
        if len(stream.tasks) <= tasks:
            raise MooringError(f"{stream.name} has {len(stream.tasks)} tasks: search fewer than that, not {tasks}")
        searched, trained = select_tasks(stream, 0, tasks), select_tasks(stream, tasks)
        name = f"{stream.name}: first {tasks}, searched"
        if _share_classes(searched, trained):  # perhaps the same images, such as permuted ones
            searched, name = hold_out(searched), f"{name} on held-out training images"
        searched = replace(searched, name=name)
        trained = replace(trained, name=f"{stream.name}: other {len(trained.tasks)}, trained")
        specs = grid.specs(training, searched.name, searched.fingerprint, init)
        results = study.run(specs, {searched.fingerprint: searched}, weights, reject=True)
        stream_choices = choose_settings(searched.name, results, asked.methods)
        choices += stream_choices
        best = {choice.method: choice.best for choice in stream_choices}
        streams[trained.fingerprint] = trained
        for spec in asked.specs(training, trained.name, trained.fingerprint, init):
            if row := best[spec.method]:
                chosen.append(replace(spec, lr=row.setting.lr, strength=row.setting.strength))
    # Every setting of the baseline may have been dropped.
    known = baseline if any(spec.method == baseline for spec in chosen) else None
    rows = summarize(study.run(chosen, streams, weights), known) if chosen else []
    return Tuned(tuple(choices), tuple(rows))


def _share_classes(one: Stream, other: Stream) -> bool:
    """Return whether a class is in both streams."""
    first, second = ({label for task in stream.tasks for label in task.classes} for stream in (one, other))
    return not first.isdisjoint(second)


def _grid(
    asked: Comparison, lrs: Sequence[float], strengths: Sequence[float] | None, seeds: int | Sequence[int]
) -> Comparison:
    """Return the same comparison at every point of the grid; by default the paper's for penalties, else the dials."""
    by_method: dict[str, tuple[float, ...]] = {}
    for method in map(find_method, asked.methods):
        if method.has_strength:
            default = STRENGTHS if isinstance(method.pull(1.0), Penalty | Proximal) else method.dial
            by_method[method.name] = default if strengths is None else tuple(strengths)
    lr = dict.fromkeys(asked.methods, tuple(lrs))
    return replace(asked, seeds=seed_numbers(seeds), lr=lr, strength=by_method)


def search_score(row: Row) -> float:
    """Return the mean accuracy of a finished row, rounded: without it, the last bits of a sum decide between equals."""
    return round(row.metrics["accuracy"].mean, SCORE_DIGITS)


def choose_settings(stream: str, results: Sequence[Result], methods: Sequence[str]) -> list[Choice]:
    """Choose, for each method, the setting with the highest mean accuracy among those that every seed finished.

    If several settings have it, the first of the grid is chosen, and `Choice.as_good` names the others.

    Args:
        stream: the stream that was searched.
        results: the runs of the search, of any of the methods.
        methods: the methods to choose for.
    """
    choices = []
    for method in methods:
        grid = summarize([result for result in results if result.spec.method == method])
        finished = [row for row in grid if not row.unfinished]
        best = max(finished, key=search_score, default=None)
        choices.append(Choice(stream, method, best, tuple(grid)))
    return choices
