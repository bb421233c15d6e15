"""The rows of `runs.json`, from which every cell and claim of a reproduction can be computed again.

The file is one JSON object; each run is one line. Its header has what runs share:

- `command`: the command that trained the runs.
- `scale`: networks, regimes, data sets, seeds and grids.
- `usual`: the most common value of each of `SHARED_FIELDS`, none of which is ever missing.
- `streams`: the fingerprint of each stream, and the number of training and of test images of each task.
- `backbones`: the fingerprints of the initial weights.
- `layers`: the names of the layers of each network, for each of `LAYER_FIELDS`.
- `stability`: the names of the numbers of a stability verdict.

A row has the specification of a run under the names of `RunSpec`, then

- `status`, `reason`, `steps`, `seconds` and `versions`.
- `correct`: row i has the number of correctly classified test images of tasks 0 to i after task i. The accuracy is
  100 * correct / test images, without rounding.
- `stability`: one list for each consolidation.
- `importance`, `cka`: one number for each layer; left out on the tasks of the grid search, where nothing reads them.

A row leaves out missing values, empty lists and values equal to `usual`. Floats have `DIGITS` significant digits, which
are exact for float32; infinite values and NaN are null.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from mooring_lab.model.results import Result, Stability
from mooring_lab.streams.stream import Stream
from mooring_paper.context.scale import Scale

SHARED_FIELDS = ("momentum", "weight_decay", "heads", "dtype", "versions")
LAYER_FIELDS = ("importance", "cka")
STABILITY_FIELDS = tuple(field.name for field in fields(Stability) if field.name != "task")
DIGITS = 9
FINGERPRINT_DIGITS = 8
"""Digits of a backbone's fingerprint that a row keeps."""


def runs_json(runs: Sequence[Result], streams: Mapping[str, Stream], scale: Scale, command: str = "") -> bytes:
    """Return the content of `runs.json`.

    Args:
        runs: the runs, each once.
        streams: the stream of every run, by fingerprint.
        scale: the networks, regimes and grids of the reproduction.
        command: the command that trained the runs.

    Example:
        >>> from mooring_lab.model.spec import RunSpec
        >>> from mooring_lab.streams import by_class, digits
        >>> from mooring_paper.context.scale import MINIATURE
        >>> stream = by_class(digits(), per_task=10)
        >>> run = Result(RunSpec("digits", stream.fingerprint, "plain", 0), "finished", "", [10.0], [[90.0]])
        >>> content = json.loads(runs_json([run], {stream.fingerprint: stream}, MINIATURE))
        >>> content["usual"]["momentum"], "momentum" in content["runs"][0]
        (0.9, False)
        >>> content["runs"][0]["correct"], content["streams"]["digits"]["test"]
        ([[328]], [364])
    """
    rows = [_run_row(result, streams[result.spec.data]) for result in runs]
    usual = {name: _most_common([row[name] for row in rows]) for name in SHARED_FIELDS} if rows else {}
    header = {
        "about": "the layout is described in src/mooring_paper/run_rows.py",
        "command": command,
        "scale": _scale_header(scale),
        "usual": usual,
        "streams": {result.spec.stream: _stream_header(streams[result.spec.data]) for result in runs},
        "backbones": sorted({result.spec.init for result in runs} - {""}),
        "layers": _layer_names(runs),
        "stability": STABILITY_FIELDS,
    }
    unusual = [{n: v for n, v in row.items() if n not in usual or v != usual[n]} for row in rows]
    lines = [_dump({n: v for n, v in row.items() if v not in (None, "", [])}) for row in unusual]
    opening = ",\n".join(f'"{name}":{_dump(value)}' for name, value in header.items())
    return (f'{{{opening},\n"runs":[\n' + ",\n".join(lines) + "\n]}\n").encode()


def _scale_header(scale: Scale) -> dict[str, Any]:
    """Return every number of a scale; regimes by name, data sets without their options, and nothing on backbones."""
    names = [field.name for field in fields(scale) if field.name not in ("pretraining", "levels")]
    numbers = {name: getattr(scale, name) for name in names}
    regimes = {regime.name: {"epochs": regime.epochs, "batch": regime.batch} for regime in scale.regimes}
    return {**numbers, "regimes": regimes, "streams": list(scale.streams), "stand_ins": list(scale.stand_ins)}


def _stream_header(stream: Stream) -> dict[str, Any]:
    return {
        "data": stream.fingerprint,
        "train": [len(task.train) for task in stream.tasks],
        "test": [len(task.test) for task in stream.tasks],
    }


def _layer_names(runs: Iterable[Result]) -> dict[str, dict[str, list[str]]]:
    """Return the names of layers by network and field; all runs of a network have the same, or none."""
    names: dict[str, dict[str, list[str]]] = {}
    for result in runs:
        for field in LAYER_FIELDS:
            if layers := list(getattr(result, field)):
                names.setdefault(result.spec.network, {})[field] = layers
    return names


def _run_row(result: Result, stream: Stream) -> dict[str, Any]:
    spec = result.spec.to_json()
    del spec["data"]  # in `streams`, by the name of the stream
    searched = result.spec.stream.endswith(", searched")
    layers = {name: [] if searched else _short_floats(getattr(result, name).values()) for name in LAYER_FIELDS}
    return {
        "key": result.spec.key,
        **spec,
        "init": result.spec.init[:FINGERPRINT_DIGITS],
        "status": result.status,
        "reason": result.reason,
        "correct": _correct_counts(result.matrix, [len(task.test) for task in stream.tasks]),
        "stability": [_short_floats(getattr(entry, name) for name in STABILITY_FIELDS) for entry in result.stability],
        **layers,
        "steps": result.steps,
        "seconds": round(result.seconds, 3),
        "versions": result.versions,
    }


def _correct_counts(matrix: Sequence[Sequence[float]], sizes: Sequence[int]) -> list[list[int]]:
    """Return how many test images of the tasks so far are classified correctly, after each task.

    Example:
        >>> _correct_counts([[90.0, 10.0], [70.0, 80.0]], [10, 5])
        [[9], [7, 4]]
    """
    return [
        [round(accuracy * size / 100) for accuracy, size in zip(row[: number + 1], sizes, strict=False)]
        for number, row in enumerate(matrix)
    ]


def _short_floats(values: Iterable[float]) -> list[float | None]:
    """Return numbers with `DIGITS` significant digits; None if they are not finite.

    Example:
        >>> _short_floats([1 / 3, 12, math.inf])
        [0.333333333, 12, None]
    """
    short = (value if isinstance(value, int) else float(f"{value:.{DIGITS}g}") for value in values)
    return [value if math.isfinite(value) else None for value in short]


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _most_common(values: Sequence[Any]) -> Any:
    counts = Counter(json.dumps(value, sort_keys=True) for value in values)
    return json.loads(counts.most_common(1)[0][0])
