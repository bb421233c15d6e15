"""Write the page of a reproduction again from its own `runs.json` and `findings.json`, without training or data.

A change of the page or of a claim needs no GPU then. Results that read weights are kept as they are.

    python benchmarks/stored_page.py docs/reproduction
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mooring.errors import MooringError
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result, Stability
from mooring_lab.model.spec import RunSpec
from mooring_lab.report.picture import Drawing
from mooring_lab.study.study import Study
from mooring_paper.context.paper_context import MissingRuns, PaperContext
from mooring_paper.context.scale import PAPER, Scale
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.page.page_writer import write_page
from mooring_paper.targets import run_targets, select_targets

KEPT_TARGETS = ("effective-lr", "fig-backbone")
"""Targets that read weights, which a page does not store: their results are kept as they are."""


@dataclass(frozen=True)
class StoredTask:
    """A task without its images.

    Attributes:
        train, test: as many values as it has images.
    """

    train: range
    test: range


@dataclass(frozen=True)
class StoredStream:
    """A stream without its images.

    Attributes:
        name, fingerprint: those of the stream.
        tasks: its tasks.
    """

    name: str
    fingerprint: str
    tasks: tuple[StoredTask, ...]


@dataclass(frozen=True)
class StoredPage:
    """The content of `runs.json` and `findings.json`.

    Attributes:
        folder: where they are.
        runs: the runs, by specification.
        streams: the streams, by name.
        targets: the results of `KEPT_TARGETS`, by name.
        backbones: the table of backbones.
        command: the command that trained the runs.
        scale: the data sets and numbers of the reproduction.
    """

    folder: Path
    runs: Mapping[RunSpec, Result] = field(repr=False)
    streams: Mapping[str, StoredStream] = field(repr=False)
    targets: Mapping[str, TargetResult] = field(repr=False)
    backbones: ResultTable = field(repr=False)
    command: str
    scale: Scale

    @classmethod
    def read(cls, folder: Path) -> "StoredPage":
        """Read the page in a folder."""
        try:
            content, findings = (json.loads((folder / f"{name}.json").read_text()) for name in ("runs", "findings"))
            entries = {entry["target"]: entry for entry in findings}
            streams = {
                name: StoredStream(
                    name,
                    stream["data"],
                    tuple(
                        StoredTask(*map(range, sizes)) for sizes in zip(stream["train"], stream["test"], strict=True)
                    ),
                )
                for name, stream in content["streams"].items()
            }
            runs = {result.spec: result for row in content["runs"] if (result := _result(row, content, streams))}
            by_key = {result.spec.key: result for result in runs.values()}
            targets = {name: _kept_target(entries[name], by_key) for name in KEPT_TARGETS if name in entries}
            (backbones,) = (_table(table) for table in entries["page"]["tables"] if table["title"] == "Backbones")
            return cls(folder, runs, streams, targets, backbones, content["command"], _scale(content["scale"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MooringError(f"{folder} has no page of `mooring paper` that can be read: {error!r}") from error

    def context(self, study: Study) -> "StoredContext":
        """Return the source of its runs; the study stays empty."""
        return StoredContext(self, study)


class StoredContext(PaperContext):
    """The source of the runs of a page; it trains nothing.

    Args:
        page: the page.
        study: an empty study.
    """

    def __init__(self, page: StoredPage, study: Study) -> None:
        super().__init__(study, page.scale, device="cuda")
        self.page = page
        self.streams = {stream.fingerprint: stream for stream in page.streams.values()}  # type: ignore[misc]
        self.backbones_table = page.backbones
        for row in page.backbones.rows:
            if row["fingerprint"]:
                self.backbones.setdefault(row["network"], []).append(row["fingerprint"])
        self.kept_targets, self.kept_runs = page.targets, [*page.runs.values()]

    def has(self, specs: Sequence[RunSpec]) -> bool:
        """Return whether all of these runs are stored."""
        return all(spec in self.page.runs for spec in specs)

    def train(self, requests: Sequence[MissingRuns]) -> None:
        """Read runs; refuse those that are not stored."""
        specs = {spec for request in requests for spec in request.specs}
        if missing := sorted(f"{spec.method} on {spec.stream}" for spec in specs if spec not in self.page.runs):
            lacking = f"{self.page.folder} lacks {pluralize(len(missing), 'run')}, such as {missing[0]}"
            raise MooringError(f"{lacking}: train them with `mooring paper`")
        for request in requests:
            self._results[request.reject].update((spec, self.page.runs[spec]) for spec in request.specs)

    def _part(self, data: str, kind: str, shuffle: int | None) -> Any:
        name = f"{data}, {kind}{'' if shuffle is None else ', shuffled'}"
        return self.page.streams.get(name) or StoredStream(name, "", ())  # it has no runs


def _scale(header: Mapping[str, Any]) -> Scale:
    names, numbers = header["streams"], ("seeds", "max_seeds", "search_tasks")
    if set(names) - set(PAPER.streams) or header["network"] != PAPER.network:
        raise ValueError("only the data sets and networks of the paper can be read")
    streams = {name: PAPER.streams[name] for name in names}
    stand_ins = {name: PAPER.stand_ins[name] for name in header.get("stand_ins", ())}
    known = {name: header[name] for name in numbers}
    missing = tuple(header["missing_data"])
    return replace(PAPER, streams=streams, stand_ins=stand_ins, missing_data=missing, **known)


def _result(row: Mapping[str, Any], content: Mapping[str, Any], streams: Mapping[str, StoredStream]) -> Result:
    row = {**content["usual"], **row}
    spec = _spec(row, content["backbones"], streams[row["stream"]].fingerprint)
    layers = content["layers"].get(spec.network, {})
    importance, cka = (
        {layer: _number(value) for layer, value in zip(layers[name], row[name], strict=True)} if name in row else {}
        for name in ("importance", "cka")
    )
    sizes = [len(task.test) for task in streams[spec.stream].tasks]
    return Result(
        spec,
        row["status"],
        row.get("reason", ""),
        [math.nan] * len(sizes),
        [[100 * n / size for n, size in zip(counts, sizes, strict=False)] for counts in row.get("correct", ())],
        stability=[_stability(task, entry) for task, entry in enumerate(row.get("stability", ()), 1)],
        importance=importance,
        cka=cka,
        steps=row["steps"],
        seconds=row["seconds"],
        versions=row["versions"],
    )


def _spec(row: Mapping[str, Any], backbones: Sequence[str], data: str) -> RunSpec:
    init = next((name for name in backbones if row.get("init") and name.startswith(row["init"])), "")
    fields = {name: value for name, value in row.items() if name in RunSpec.__dataclass_fields__}
    spec = RunSpec.from_json({**fields, "data": data, "init": init})
    if spec.key != row["key"]:
        raise ValueError(f"the key of run {row['key']} is not that of its specification")
    return spec


def _stability(task: int, values: Sequence[float | None]) -> Stability:
    largest, safe_strength, *counts = values
    return Stability(task, _number(largest), _number(safe_strength), *counts)  # type: ignore[arg-type]


def _number(value: float | None) -> float:
    """Return a stored number; what is not finite is stored as null."""
    return math.inf if value is None else value


def _table(table: Mapping[str, Any]) -> ResultTable:
    return ResultTable(table["title"], table["columns"], table["rows"])


def _kept_target(entry: Mapping[str, Any], runs: Mapping[str, Result]) -> TargetResult:
    """Return a target whose figures are the files that are there."""
    name, tables = entry["target"], [*map(_table, entry["tables"])]
    drawings = [
        Drawing(f["file"].removeprefix(f"{name}-").removesuffix(".png"), f["title"], f["caption"], f["alt"], None)
        for f in entry["figures"]
    ]
    return TargetResult(name, entry["text"], tables, [runs[key] for key in entry["runs"]], lambda: drawings)


def main(arguments: list[str] | None = None) -> int:
    """Write the page of a folder again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder that `mooring paper all` wrote")
    parser.add_argument("--out", type=Path, help="the folder of the new page; by default the same")
    options = parser.parse_args(arguments)
    try:
        page = StoredPage.read(options.folder)
    except MooringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        context = page.context(Study(Path(folder) / "empty.sqlite"))
        results = run_targets(select_targets(["all"], page.scale.missing_data), context)
        print(write_page(results, options.out or options.folder, context, command=page.command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
