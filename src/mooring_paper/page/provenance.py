"""What a reproduction was made from: runs, time, data and backbones."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mooring_lab.model.results import Result
from mooring_lab.networks.initialization import BackboneWeights
from mooring_lab.report.narrative import duration
from mooring_lab.streams.named_datasets import NAMED_DATASETS
from mooring_lab.study.pretraining import RECIPES, read_metadata
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import PAPER, PUBLISHED_SUFFIX
from mooring_paper.context.target_result import ResultTable

BACKBONE_COLUMNS = ("network", "backbone", "fingerprint", "accuracy", "trained on", "recipe")
PAPER_RECIPE = "that of the authors' code"
RECIPE_FIELDS = ("epochs", "lr", "batch", "momentum", "weight_decay", "flips", "shifts", "schedule")
"""The settings of pre-training that make a recipe."""


def training_summary(runs: Sequence[Result]) -> str:
    """Return how many models were trained, for how long and on what device, and which part is an addition."""
    statuses = Counter(result.status for result in runs)
    outcome = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    times: dict[str, float] = defaultdict(float)
    for result in runs:
        times[str(result.versions.get("device", "an unknown device"))] += result.seconds
    durations = " and ".join(f"{duration(seconds)} on {device}" for device, seconds in times.items())
    steps = sum(result.steps for result in runs)
    of_the_code = [r for r in runs if r.spec.method.endswith(PUBLISHED_SUFFIX) or r.spec.network == PAPER.code_network]
    stand_ins = [r for r in runs if r.spec.stream.partition(",")[0] in PAPER.stand_ins]
    added = {"the authors' code": of_the_code, "data that stand in": stand_ins}
    parts = [f"{name} {duration(sum(r.seconds for r in group))}" for name, group in added.items() if group]
    additions = f" Of this, {', '.join(parts)}." if parts else ""
    rejected = " Rejected runs were stopped after the first task because their penalty would have extrapolated."
    return (
        f"{len(runs)} models were trained ({outcome or 'none'}), {steps:,} iterations in total. They took "
        f"{durations or 'no time'}; the time of a fleet is divided among its runs."
        f"{additions}{rejected if statuses['rejected'] else ''}"
    )


def missing_data_lines(context: PaperContext) -> list[str]:
    """Return a line for each data set of the paper that was not run, and how to run it."""
    layouts = {"folders": "public folder layout", "parquet": "layout on the Hub"}
    return [
        f"{name}: **not yet run**. Put it at `DIR/{name}` in its {layouts[NAMED_DATASETS[name].layout]} and repeat "
        "the command."
        for name in context.scale.missing_data
    ]


def backbones_table(context: PaperContext) -> ResultTable:
    """Return the backbones of each network, with what their files say about their pre-training."""
    if context.backbones_table is not None:
        return context.backbones_table
    rows: list[dict[str, Any]] = []
    for network in dict.fromkeys((context.scale.network, context.scale.second_network)):
        backbones = [context.weights[fingerprint] for fingerprint in context.backbones.get(network, [])]
        rows += [_backbone_row(network, weights) for weights in backbones]
        rows += [] if backbones else [{"network": network, "backbone": "none: random start"}]
    return ResultTable("Backbones", BACKBONE_COLUMNS, rows)


def _backbone_row(network: str, weights: BackboneWeights) -> dict[str, Any]:
    metadata = read_metadata(weights.path)
    recorded = (metadata.get("accuracy"), metadata.get("stream"), _recipe(metadata))
    values = (network, Path(weights.path).name, weights.fingerprint, *recorded)
    return dict(zip(BACKBONE_COLUMNS, values, strict=True))


def _recipe(metadata: Mapping[str, Any]) -> str | None:
    """Return how a recipe of pre-training differs from that of the authors' code; None if it is not recorded.

    Example:
        >>> settings = asdict(RECIPES["paper"])
        >>> _recipe(settings), _recipe({**settings, "epochs": 30, "schedule": "cosine"}), _recipe({})
        ("that of the authors' code", 'epochs 30, schedule cosine', None)
    """
    if not set(RECIPE_FIELDS) <= set(metadata):
        return None
    papers = asdict(RECIPES["paper"])
    changed = [f"{name} {metadata[name]}" for name in RECIPE_FIELDS if metadata[name] != papers[name]]
    return ", ".join(changed).replace("_", " ") or PAPER_RECIPE
