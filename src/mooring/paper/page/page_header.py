"""The header of the page: what was trained, for how long, on what device and from which backbones."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mooring.lab.model.results import Result
from mooring.lab.networks.initialization import BackboneWeights
from mooring.lab.streams.named_datasets import NAMED_DATASETS
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.target_result import ResultTable

__all__ = ["page_header"]


def page_header(context: PaperContext, runs: Sequence[Result], command: str) -> str:
    """Return the header as Markdown.

    Args:
        context: the source of the runs.
        runs: the runs behind the page.
        command: the command that repeats the reproduction.
    """
    scale = context.scale
    miniature = "A miniature on the embedded digits: it shows that every target works, and nothing about the paper."
    regimes = f" The main table has only {', '.join(scale.selected_regimes)}." if scale.selected_regimes else ""
    parts = [
        "# The paper, reproduced",
        miniature if "digits" in scale.streams else "",
        _training_summary(runs),
        f"Repeat with\n\n```\n{command}\n```",
        f"Data sets: {', '.join(scale.streams)}; {scale.seeds} seeds.{regimes}",
        _missing_data(context),
        _backbones(context),
        "`runs.json` has a row for each run; `findings.json` has everything below.",
    ]
    return "\n\n".join(part for part in parts if part)


def _training_summary(runs: Sequence[Result]) -> str:
    statuses = Counter(result.status for result in runs)
    outcome = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    times: dict[str, float] = {}
    for result in runs:
        device = str(result.versions.get("device", "an unknown device"))
        times[device] = times.get(device, 0.0) + result.seconds
    duration = " and ".join(f"{_format_duration(seconds)} on {device}" for device, seconds in times.items())
    steps = sum(result.steps for result in runs)
    rejected = " Rejected runs were stopped after the first task because their penalty would have extrapolated."
    return (
        f"{len(runs)} models were trained ({outcome or 'none'}), {steps:,} iterations in total. They took "
        f"{duration or 'no time'}; the time of a fleet is divided among its runs."
        f"{rejected if statuses['rejected'] else ''}"
    )


def _format_duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> _format_duration(12.0), _format_duration(1230.0)
        ('12 seconds', '20.5 minutes')
    """
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def _missing_data(context: PaperContext) -> str:
    """Return a line for each data set of the paper that was not used."""
    lines = []
    for name in context.scale.missing_data:
        layout = {"folders": "public folder layout", "parquet": "layout on the Hub"}[NAMED_DATASETS[name].layout]
        lines.append(f"- {name}: **not yet run**. Put it at `DIR/{name}` in its {layout} and repeat the command.")
    return "\n".join(lines)


def _backbones(context: PaperContext) -> str:
    if not context.weights:
        return "Every run starts from random weights."
    rows: list[dict[str, object]] = []
    for network in dict.fromkeys((context.scale.network, context.scale.second_network)):
        backbones = [context.weights[fingerprint] for fingerprint in context.backbones.get(network, [])]
        rows += [_backbone_row(network, weights) for weights in backbones]
        if not backbones:
            rows.append({"network": network, "backbone": "none: random start"})
    if context.other_backbone:
        name = f"{context.scale.network}, another (in reasons)"
        rows.append(_backbone_row(name, context.weights[context.other_backbone]))
    columns = ["network", "backbone", "fingerprint", "accuracy when pre-trained", "on"]
    table = ResultTable("Backbones", columns, rows).markdown()
    return f"Seed k starts from backbone k of its network, modulo their number:\n\n{table}"


def _backbone_row(network: str, weights: BackboneWeights) -> dict[str, object]:
    accuracy, data = _pretraining(Path(weights.path))
    return {
        "network": network,
        "backbone": Path(weights.path).name,
        "fingerprint": weights.fingerprint,
        "accuracy when pre-trained": accuracy,
        "on": data,
    }


def _pretraining(path: Path) -> tuple[float | None, str | None]:
    """Return accuracy and data set of the pre-training, from the metadata of the file; None where not given."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        ours = json.loads(metadata.get("mooring", "{}"))
        accuracy = ours.get("accuracy", metadata.get("test_accuracy"))
        data = ours.get("stream", metadata.get("trained_on", "").split(",")[0] or None)
        return (None if accuracy is None else float(accuracy)), data
    except (OSError, SafetensorError, ValueError, AttributeError):
        return None, None
