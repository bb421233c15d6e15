"""The head of the page: what was trained, how long it took and on what, from which backbones; and what was not."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mooring.lab.model.results import Result
from mooring.lab.networks.initialization import BackboneWeights
from mooring.lab.streams.named_datasets import NAMED_DATASETS
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Table

__all__ = ["head"]


def head(lab: Laboratory, runs: Sequence[Result], command: str) -> str:
    """As Markdown.

    Args:
        lab: where the runs come from.
        runs: those behind the page.
        command: what made it, to be repeated.
    """
    small = "In miniature, on the embedded digits: this shows that everything works, and nothing of the paper."
    parts = [
        "# The paper, reproduced",
        small if "digits" in lab.scale.streams else "",
        _trained(runs),
        f"Repeat with\n\n```\n{command}\n```",
    ]
    only = f" The main table has {', '.join(lab.scale.only)} alone." if lab.scale.only else ""
    parts += [f"Data sets: {', '.join(lab.scale.streams)}; {lab.scale.seeds} seeds.{only}", _absent(lab)]
    parts += [_backbones(lab), "Each run is a row of `runs.json`; everything below is in `findings.json` too."]
    return "\n\n".join(part for part in parts if part)


def _trained(runs: Sequence[Result]) -> str:
    statuses = Counter(result.status for result in runs)
    ended = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    times: dict[str, float] = {}
    for result in runs:
        device = str(result.versions.get("device", "an unknown device"))
        times[device] = times.get(device, 0.0) + result.seconds
    took = " and ".join(f"{_long(seconds)} on {device}" for device, seconds in times.items())
    steps = sum(result.steps for result in runs)
    rejected = " Rejected runs were stopped after the first task: their penalty would have extrapolated."
    return (
        f"{len(runs)} models were trained ({ended or 'none'}), {steps:,} iterations of one model in all. They took "
        f"{took or 'no time'}: the sum over runs of each one's share of the time that its fleet took."
        f"{rejected if statuses['rejected'] else ''}"
    )


def _long(seconds: float) -> str:
    """A time in words.

    Example:
        >>> _long(12.0), _long(1230.0)
        ('12 seconds', '20.5 minutes')
    """
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def _absent(lab: Laboratory) -> str:
    """A line for each data set of the paper that is not here."""
    lines = []
    for name in lab.scale.absent:
        layout = {"folders": "public folder layout", "parquet": "layout on the Hub"}[NAMED_DATASETS[name].layout]
        lines.append(f"- {name}: **not yet run**. Put it at `DIR/{name}` in its {layout} and repeat the command.")
    return "\n".join(lines)


def _backbones(lab: Laboratory) -> str:
    rows: list[dict[str, object]] = []
    for network in dict.fromkeys((lab.scale.network, lab.scale.other)):
        found = [lab.weights[fingerprint] for fingerprint in lab.starts.get(network, [])]
        rows += [_row(network, weights) for weights in found]
        if not found:
            rows.append({"network": network, "backbone": "none: random start"})
    if lab.instead:
        rows.append(_row(f"{lab.scale.network}, another (in reasons)", lab.weights[lab.instead]))
    if not lab.weights:
        return "Every run starts from random weights."
    columns = ["network", "backbone", "fingerprint", "accuracy when pre-trained", "on"]
    table = Table("Backbones", columns, rows).markdown()
    return f"Seed k starts from the k-th backbone of its network, round and round:\n\n{table}"


def _row(network: str, weights: BackboneWeights) -> dict[str, object]:
    accuracy, on = _taught(Path(weights.path))
    told = {"network": network, "backbone": Path(weights.path).name, "fingerprint": weights.fingerprint}
    return {**told, "accuracy when pre-trained": accuracy, "on": on}


def _taught(path: Path) -> tuple[float | None, str | None]:
    """What a file says of its pre-training: the accuracy and the data set, where it does."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
        told = json.loads(metadata.get("mooring", "{}"))
        accuracy = told.get("accuracy", metadata.get("test_accuracy"))
        on = told.get("stream", metadata.get("trained_on", "").split(",")[0] or None)
        return (None if accuracy is None else float(accuracy)), on
    except (OSError, SafetensorError, ValueError, AttributeError):
        return None, None
