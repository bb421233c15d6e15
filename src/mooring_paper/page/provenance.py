"""What a reproduction was made from: runs, time, data, backbones, and how it departs from the paper's protocol."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_lab.networks.initialization import BackboneWeights
from mooring_lab.report.narrative import duration
from mooring_lab.streams.named_datasets import NAMED_DATASETS
from mooring_lab.study.pretraining import RECIPES, read_metadata
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import PAPER
from mooring_paper.context.target_result import PAPER_SEEDS, ResultTable, TargetResult

BACKBONE_COLUMNS = ("network", "backbone", "fingerprint", "accuracy", "trained on", "recipe")
PAPER_RECIPE = "that of the authors' code"
RECIPE_FIELDS = ("epochs", "lr", "batch", "momentum", "weight_decay", "flips", "shifts", "schedule")
"""The settings of pre-training that make a recipe."""


def training_summary(runs: Sequence[Result]) -> str:
    """Return how many models were trained, for how long and on what device."""
    statuses = Counter(result.status for result in runs)
    outcome = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    times: dict[str, float] = defaultdict(float)
    for result in runs:
        times[str(result.versions.get("device", "an unknown device"))] += result.seconds
    durations = " and ".join(f"{duration(seconds)} on {device}" for device, seconds in times.items())
    steps = sum(result.steps for result in runs)
    rejected = " Rejected runs were stopped after the first task because their penalty would have extrapolated."
    return (
        f"{len(runs)} models were trained ({outcome or 'none'}), {steps:,} iterations in total. They took "
        f"{durations or 'no time'}; the time of a fleet is divided among its runs."
        f"{rejected if statuses['rejected'] else ''}"
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


def protocol_lines(context: PaperContext, results: Sequence[TargetResult], backbones: ResultTable) -> list[str]:
    """Return what follows the paper's protocol exactly, what does not, and what the paper does not say."""
    scale = context.scale
    names = ", ".join(f"{r.epochs} epoch{'s' if r.epochs > 1 else ''} with batch {r.batch}" for r in scale.regimes)
    facts = {
        f"regimes ({names})": scale.regimes == PAPER.regimes,
        f"grid of {len(scale.lrs)} learning rates and {len(scale.strengths)} strengths": (scale.lrs, scale.strengths)
        == (PAPER.lrs, PAPER.strengths),
        f"search on the first {scale.search_tasks} tasks": scale.search_tasks == PAPER.search_tasks,
        pluralize(scale.seeds, "seed"): scale.seeds == PAPER_SEEDS,
        f"data ({', '.join(scale.streams)})": set(scale.streams) <= set(PAPER.streams),
    }
    same = [fact for fact, holds in facts.items() if holds]
    different = [fact for fact, holds in facts.items() if not holds]
    lines = [f"**As in the paper**: {'; '.join([*same, 'SGD with momentum 0.9', 'one head for each task'])}."]
    if scale.missing_data:
        different.append(f"without {', '.join(scale.missing_data)}")
    dtypes = {run.spec.dtype for result in results if result.name != "reasons" for run in result.results}
    if "bf16" in dtypes:
        different.append("matrix products in bf16 (`reasons` tests the effect)")
    if scale.max_seeds > scale.seeds and any(result.name == "claims" for result in results):
        different.append(f"up to {scale.max_seeds} seeds for claims that {scale.seeds} leave undecided")
    if {row.get("recipe") for row in backbones.rows} != {PAPER_RECIPE}:
        different.append("backbones of another recipe, or of one that is not recorded")
    return [*lines, f"**Different**: {'; '.join(different)}."] if different else lines
