"""Measure the time of the paper's CIFAR-100 table with one epoch, and of the grid search before it.

The table is one comparison of 13 methods with 5 seeds at the paper's settings, on all tasks but the first three, which
the search uses. The grid is `mooring_lab.tune` with the paper's grids: every configuration on the first three tasks,
then the best of each method with 5 seeds on the others. Each is measured twice in one process, with a new study file;
the second time, everything is compiled.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleets.noise import cifar100
from fleets.output import add_common, keep, say, where
from mooring_lab import Result, Row, RunSpec, Study, tune
from mooring_lab.engines.runner import SilentReporter
from mooring_lab.methods import find_method, resolve_methods
from mooring_lab.streams import Stream
from mooring_lab.streams.options import StreamOptions
from mooring_lab.streams.slices import limit_images, select_tasks
from mooring_lab.study.defaults import LRS, STRENGTHS

__all__ = ["METHODS", "add_options", "run"]

METHODS = "plain,ewc,mas,si,rwalk,vanilla,random,explicit-ewc,explicit-mas,explicit-si,explicit-rwalk,a-gem,er"
"""The rows of the paper's table."""

RATES = {"rwalk": 0.003}
"""The paper's learning rates for this table that are not 0.001; its strengths are the library's defaults."""

PHASES = {"table": ("table",), "grid": ("search", "rest")}
"""The phases of each part, in order."""


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--part", choices=["table", "grid", "all"], default="all")
    parser.add_argument(
        "--times", type=int, default=2, help="measurements of each part, each with a new study file in the same process"
    )
    parser.add_argument("--data", help="CIFAR-100 as Parquet files in the Hub's layout; random images otherwise")
    parser.add_argument("--init", help="a safetensors file with the backbone's initial weights")
    parser.add_argument("--network", default="cnn6")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--search-tasks", type=int, default=3)
    parser.add_argument("--lrs", type=_numbers, default=list(LRS))
    parser.add_argument("--strengths", type=_numbers, default=list(STRENGTHS))
    parser.add_argument("--tasks", type=int, help="use only this many tasks")
    parser.add_argument("--limit", type=int, help="use only this many images per task")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every part the given number of times."""
    source = _source(options)
    kind = f"images from {options.data}" if options.data else "random images"
    say(options, f"{options.network}, batch {options.batch}, one epoch, {kind}, {where(options.device)}")
    parts = {"table": _table, "grid": _grid}
    actions = parts if options.part == "all" else {options.part: parts[options.part]}
    measurements: list[dict[str, Any]] = []
    for dtype in options.dtype:
        for part, action in actions.items():
            for number in range(options.times):
                measurements.append(_timed(options, part, dtype, number, action, source))
                keep(options, measurements)
    return measurements


def _source(options: argparse.Namespace) -> StreamOptions | Stream:
    """Return the options of CIFAR-100, or a stream of random images with its shape."""
    if options.data:
        return StreamOptions("cifar100", data=options.data, tasks=options.tasks, limit=options.limit)
    stream = select_tasks(cifar100(), tasks=options.tasks)
    return limit_images(stream, options.limit) if options.limit else stream


def _timed(
    options: argparse.Namespace,
    part: str,
    dtype: str,
    number: int,
    action: Callable[..., Sequence[Row]],
    source: StreamOptions | Stream,
) -> dict[str, Any]:
    shape = {"network": options.network, "batch": options.batch, "epochs": 1, "init": options.init, "dtype": dtype}
    arguments = {"stream": source, "methods": options.methods, "seeds": options.seeds, **shape}
    say(
        options, f"\n{part}, {dtype}, " + ("first time" if number == 0 else f"time {number + 1}, in a fresh study file")
    )
    with tempfile.TemporaryDirectory(prefix="mooring-study-") as folder:
        log = Log(options, PHASES[part])
        study = Study(Path(folder) / "paper.sqlite", device=options.device, reporter=log)
        start = time.perf_counter()
        rows = action(options, study, arguments)
        seconds = time.perf_counter() - start
        statuses = Counter(result.status for result in study.results())
    ended = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    split = ", ".join(f"{phase['phase']} {phase['seconds']:.1f} s" for phase in log.studies)
    say(options, f"{part}: {sum(statuses.values())} runs in {seconds:.1f} s from call to results ({split}; {ended})")
    if number == 0:
        for row in rows:
            means = [
                f"{name} {row.metrics[name].mean:5.2f}" for name in ("accuracy", "forgetting") if name in row.metrics
            ]
            shown = ", ".join(means) or row.verdict
            say(options, f"  {row.label:20s}lr {row.setting.lr:<8g}{shown}")
    counts = {"part": part, "time": number + 1, "runs": sum(statuses.values()), "statuses": dict(statuses)}
    details = {"seconds": seconds, "studies": log.studies, "rows": [row.to_json() for row in rows]}
    return {**counts, **details, "dtype": dtype, "data": options.data or "random", "device": where(options.device)}


def _table(options: argparse.Namespace, study: Study, arguments: dict[str, Any]) -> Sequence[Row]:
    methods = resolve_methods(options.methods)
    lr = {name: RATES.get(name, 0.001) for name in methods}
    skip, source = options.search_tasks, arguments["stream"]
    other_tasks = select_tasks(source, skip=skip) if isinstance(source, Stream) else replace(source, skip=skip)
    say(
        options,
        f"{len(methods)} methods x {options.seeds} seeds = {len(methods) * options.seeds} runs from task {skip + 1} on",
    )
    return study.compare(lr=lr, **{**arguments, "stream": other_tasks})


def _grid(options: argparse.Namespace, study: Study, arguments: dict[str, Any]) -> Sequence[Row]:
    methods = resolve_methods(options.methods)
    with_strength = sum(find_method(name).has_strength for name in methods)
    lrs, strengths = len(options.lrs), len(options.strengths)
    without_strength = len(methods) - with_strength
    count = with_strength * lrs * strengths + without_strength * lrs
    grid = f"{with_strength} methods x {lrs} learning rates x {strengths} strengths + {without_strength} x {lrs}"
    say(options, f"{grid} = {count} configurations x {options.search_tasks} tasks, 1 seed; then the best on the rest")
    tuned = tune(study, tasks=options.search_tasks, lrs=options.lrs, strengths=options.strengths, **arguments)
    for choice in tuned.choices:
        best = "none finished" if choice.best is None else choice.best.label
        say(options, f"  {choice.method:16s}{len(choice.grid):4d} tried,{len(choice.dropped):4d} dropped; best {best}")
    return tuned.rows


class Log(SilentReporter):
    """A reporter that prints and records the time of each fleet."""

    def __init__(self, options: argparse.Namespace, phases: Sequence[str]) -> None:
        self.options, self.phases = options, phases
        self.studies: list[dict[str, Any]] = []

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Start the clock of a phase."""
        self.start = self.mark = time.perf_counter()
        self.fleets, self.work = fleets, work
        phase, runs = self.phases[len(self.studies)], sum(map(len, fleets))
        self.studies.append({"phase": phase, "runs": runs, "model_steps": sum(work), "seconds": 0.0, "fleets": []})
        say(self.options, f"{phase}: {runs} runs in {len(fleets)} fleets, {sum(work):,} model-steps")

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Record a fleet; its time is that since the previous fleet."""
        now = time.perf_counter()
        methods = list(dict.fromkeys(spec.method for spec in self.fleets[number]))
        us = (now - self.mark) / self.work[number] * 1e6
        fleet = {"runs": len(self.fleets[number]), "methods": methods, "seconds": now - self.mark, "us": us}
        self.studies[-1]["fleets"].append(fleet)
        self.studies[-1]["seconds"] = now - self.start
        self.mark = now
        line = f"  fleet {number + 1}: {fleet['runs']:4d} runs{fleet['seconds']:9.1f} s{us:9.1f} us a model-step"
        say(self.options, f"{line}  {', '.join(methods)}")

    def note(self, line: str) -> None:
        """Print a note."""
        say(self.options, f"  {line}")
