"""The runs of a reproduction as JSON: a line for each, and once what most of them share."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mooring.lab.model.results import Result

__all__ = ["written"]

SCORES = ("accuracy", "forgetting", "learned")
SHARED = ("momentum", "weight_decay", "heads", "dtype", "versions")
SHORT = 8
"""Digits of a fingerprint that tell backbones apart."""


def written(runs: Sequence[Result]) -> bytes:
    """An object with `usual`, `streams` and `backbones`, and `runs` with a line for each run.

    A row has what it was and what came of it. It leaves out what is as `usual`, and what it has not got.

    Example:
        >>> from mooring.lab.model.spec import RunSpec
        >>> told = json.loads(written([Result(RunSpec("digits", "0", "plain", 0), "finished", "", [10.0], [[90.0]])]))
        >>> told["usual"]["momentum"], "momentum" in told["runs"][0], told["runs"][0]["accuracy"]
        (0.9, False, 90.0)
    """
    rows = [_row(result) for result in runs]
    usual = {name: _most([row[name] for row in rows]) for name in SHARED} if rows else {}
    streams = {result.spec.stream: result.spec.data for result in runs}
    starts = sorted({result.spec.init for result in runs} - {""})
    head = {
        "about": "a row leaves out what is as usual and what it has not got; backbones are told by their first digits",
        "usual": usual,
        "streams": streams,
        "backbones": starts,
    }
    lines = [json.dumps(_short(row, usual)) for row in rows]
    opening = json.dumps(head, indent=1).removesuffix("\n}")
    return (f'{opening},\n "runs": [\n' + ",\n".join(lines) + "\n]}\n").encode()


def _row(result: Result) -> dict[str, Any]:
    spec = result.spec.to_json()
    del spec["data"]  # in `streams`, by the stream's name
    finished = result.status == "finished"
    scores = {name: round(result.metrics[name], 4) if finished else None for name in SCORES}
    rest = {"steps": result.steps, "seconds": round(result.seconds, 3), "versions": result.versions}
    told = {"key": result.spec.key, **spec, "init": result.spec.init[:SHORT]}
    return {**told, "status": result.status, "reason": result.reason, **scores, **rest}


def _short(row: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in usual or value != usual[name]}
    return {name: value for name, value in kept.items() if value is not None and value != ""}


def _most(values: Sequence[Any]) -> Any:
    """What there is most of."""
    counts = Counter(json.dumps(value, sort_keys=True) for value in values)
    return json.loads(counts.most_common(1)[0][0])
