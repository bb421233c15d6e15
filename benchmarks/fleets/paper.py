"""The paper's CIFAR-100 table in one epoch, and the grid search before it, from the call to the results.

The table is one comparison of 13 methods with 5 seeds at the paper's settings, on the tasks that the search leaves: all
but the first three. The grid is `mooring.lab.tune` with the
paper's grids: every configuration on the first three tasks, then the best of each method with 5 seeds on the others.
Each is done twice in one process, in a study file of its own: the second time, everything is compiled.
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
from mooring.lab import Result, Row, RunSpec, Study, tune
from mooring.lab.engines.reporting import SilentReporter
from mooring.lab.methods import find_method, resolve_methods
from mooring.lab.streams import Stream
from mooring.lab.streams.options import StreamOptions
from mooring.lab.streams.slices import limit_images, select_tasks
from mooring.lab.study.defaults import LRS, STRENGTHS

__all__ = ["METHODS", "add_options", "run"]

METHODS = "plain,ewc,mas,si,rwalk,vanilla,random,explicit-ewc,explicit-mas,explicit-si,explicit-rwalk,a-gem,er"
"""The rows of the paper's table."""

RATES = {"rwalk": 0.003}
"""The paper's learning rates for this table, where they are not 0.001; its strengths are the library's defaults."""

PHASES = {"table": ("table",), "grid": ("search", "rest")}
"""What a part trains, one after the other."""


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--part", choices=["table", "grid", "all"], default="all")
    parser.add_argument("--times", type=int, default=2, help="each in a fresh study file of the same process")
    parser.add_argument("--data", help="CIFAR-100 as Parquet files in the Hub's layout; random images otherwise")
    parser.add_argument("--init", help="a safetensors file that backbones start from")
    parser.add_argument("--network", default="cnn6")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--search-tasks", type=int, default=3)
    parser.add_argument("--lrs", type=_numbers, default=list(LRS))
    parser.add_argument("--strengths", type=_numbers, default=list(STRENGTHS))
    parser.add_argument("--tasks", type=int, help="so many tasks only")
    parser.add_argument("--limit", type=int, help="so many images in a task only")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every part, as often as asked for."""
    source = _source(options)
    kind = f"images from {options.data}" if options.data else "random images"
    say(options, f"{options.network}, batch {options.batch}, one epoch, {kind}, {where(options.device)}")
    parts = {"table": _table, "grid": _grid}
    wanted = parts if options.part == "all" else {options.part: parts[options.part]}
    told: list[dict[str, Any]] = []
    for dtype in options.dtype:
        for part, action in wanted.items():
            for time_number in range(options.times):
                found = _timed(options, part, dtype, time_number, action, source)
                told.append(found)
                keep(options, told)
    return told


def _source(options: argparse.Namespace) -> StreamOptions | Stream:
    """The stream as a user asks for it; of random images, the same made in Python."""
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
    asked = {"stream": source, "methods": options.methods, "seeds": options.seeds, **shape}
    say(
        options, f"\n{part}, {dtype}, " + ("first time" if number == 0 else f"time {number + 1}, in a fresh study file")
    )
    with tempfile.TemporaryDirectory(prefix="mooring-study-") as folder:
        log = Log(options, PHASES[part])
        study = Study(Path(folder) / "paper.sqlite", device=options.device, reporter=log)
        began = time.perf_counter()
        rows = action(options, study, asked)
        seconds = time.perf_counter() - began
        statuses = Counter(result.status for result in study.results())
    ended = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    split = ", ".join(f"{phase['phase']} {phase['seconds']:.1f} s" for phase in log.studies)
    say(options, f"{part}: {sum(statuses.values())} runs in {seconds:.1f} s from call to results ({split}; {ended})")
    if number == 0:
        for row in rows:
            figures = [row.metrics[name].mean for name in ("accuracy", "forgetting") if row.metrics]
            shown = f"accuracy {figures[0]:5.1f}, forgetting {figures[1]:5.2f}" if figures else row.verdict
            say(options, f"  {row.label:20s}lr {row.setting.lr:<8g}{shown}")
    counts = {"part": part, "time": number + 1, "runs": sum(statuses.values()), "statuses": dict(statuses)}
    figures = {"seconds": seconds, "studies": log.studies, "rows": [row.to_json() for row in rows]}
    return {**counts, **figures, "dtype": dtype, "data": options.data or "random", "device": where(options.device)}


def _table(options: argparse.Namespace, study: Study, asked: dict[str, Any]) -> Sequence[Row]:
    chosen = resolve_methods(options.methods)
    lr = {name: RATES.get(name, 0.001) for name in chosen}
    skip, source = options.search_tasks, asked["stream"]
    rest = select_tasks(source, skip=skip) if isinstance(source, Stream) else replace(source, skip=skip)
    say(
        options,
        f"{len(chosen)} methods x {options.seeds} seeds = {len(chosen) * options.seeds} runs from task {skip + 1} on",
    )
    return study.compare(lr=lr, **{**asked, "stream": rest})


def _grid(options: argparse.Namespace, study: Study, asked: dict[str, Any]) -> Sequence[Row]:
    chosen = resolve_methods(options.methods)
    strong = sum(find_method(name).has_strength for name in chosen)
    lrs, strengths = len(options.lrs), len(options.strengths)
    count = strong * lrs * strengths + (len(chosen) - strong) * lrs
    sums = f"{strong} methods x {lrs} learning rates x {strengths} strengths + {len(chosen) - strong} x {lrs}"
    say(options, f"{sums} = {count} configurations x {options.search_tasks} tasks, 1 seed; then the best on the rest")
    tuned = tune(study, tasks=options.search_tasks, lrs=options.lrs, strengths=options.strengths, **asked)
    for choice in tuned.choices:
        best = "none finished" if choice.best is None else choice.best.label
        say(options, f"  {choice.method:16s}{len(choice.grid):4d} tried,{len(choice.dropped):4d} dropped; best {best}")
    return tuned.rows


class Log(SilentReporter):
    """Says when each fleet of a study was done, and keeps the figures."""

    def __init__(self, options: argparse.Namespace, phases: Sequence[str]) -> None:
        self.options, self.phases = options, phases
        self.studies: list[dict[str, Any]] = []

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Runs are about to be trained."""
        self.began = self.mark = time.perf_counter()
        self.fleets, self.work = fleets, work
        phase, runs = self.phases[len(self.studies)], sum(map(len, fleets))
        self.studies.append({"phase": phase, "runs": runs, "model_steps": sum(work), "seconds": 0.0, "fleets": []})
        say(self.options, f"{phase}: {runs} runs in {len(fleets)} fleets, {sum(work):,} model-steps")

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """A fleet is done; its time is what passed since the one before it."""
        now = time.perf_counter()
        methods = list(dict.fromkeys(spec.method for spec in self.fleets[number]))
        us = (now - self.mark) / self.work[number] * 1e6
        found = {"runs": len(self.fleets[number]), "methods": methods, "seconds": now - self.mark, "us": us}
        self.studies[-1]["fleets"].append(found)
        self.studies[-1]["seconds"] = now - self.began
        self.mark = now
        line = f"  fleet {number + 1}: {found['runs']:4d} runs{found['seconds']:9.1f} s{us:9.1f} us a model-step"
        say(self.options, f"{line}  {', '.join(methods)}")

    def note(self, line: str) -> None:
        """Something a user should know."""
        say(self.options, f"  {line}")
