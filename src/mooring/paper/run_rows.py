"""The rows of `runs.json`: one for each run of a reproduction."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mooring.lab.model.results import Result

METRICS_OF_A_RUN = ("accuracy", "forgetting", "learned")
SHARED_FIELDS = ("momentum", "weight_decay", "heads", "dtype", "versions")
FINGERPRINT_DIGITS = 8
"""Digits of a backbone's fingerprint that a row keeps."""


def runs_json(runs: Sequence[Result]) -> bytes:
    """Return an object with `usual`, `streams` and `backbones`, and `runs` with one line for each run.

    A row has the specification of the run and its scores. It leaves out values equal to `usual` and missing values.

    Example:
        >>> from mooring.lab.model.spec import RunSpec
        >>> run = Result(RunSpec("digits", "0", "plain", 0), "finished", "", [10.0], [[90.0]])
        >>> content = json.loads(runs_json([run]))
        >>> content["usual"]["momentum"], "momentum" in content["runs"][0], content["runs"][0]["accuracy"]
        (0.9, False, 90.0)
    """
    rows = [_run_row(result) for result in runs]
    usual = {name: _most_common([row[name] for row in rows]) for name in SHARED_FIELDS} if rows else {}
    header = {
        "about": "a row leaves out missing values and values equal to `usual`; backbones are shortened",
        "usual": usual,
        "streams": {result.spec.stream: result.spec.data for result in runs},
        "backbones": sorted({result.spec.init for result in runs} - {""}),
    }
    unusual = [{n: v for n, v in row.items() if n not in usual or v != usual[n]} for row in rows]
    lines = [json.dumps({n: v for n, v in row.items() if v is not None and v != ""}) for row in unusual]
    opening = json.dumps(header, indent=1).removesuffix("\n}")
    return (f'{opening},\n "runs": [\n' + ",\n".join(lines) + "\n]}\n").encode()


def _run_row(result: Result) -> dict[str, Any]:
    spec = result.spec.to_json()
    del spec["data"]  # in `streams`, by the name of the stream
    finished = result.status == "finished"
    scores = {name: round(result.metrics[name], 4) if finished else None for name in METRICS_OF_A_RUN}
    return {
        "key": result.spec.key,
        **spec,
        "init": result.spec.init[:FINGERPRINT_DIGITS],
        "status": result.status,
        "reason": result.reason,
        **scores,
        "steps": result.steps,
        "seconds": round(result.seconds, 3),
        "versions": result.versions,
    }


def _most_common(values: Sequence[Any]) -> Any:
    counts = Counter(json.dumps(value, sort_keys=True) for value in values)
    return json.loads(counts.most_common(1)[0][0])
