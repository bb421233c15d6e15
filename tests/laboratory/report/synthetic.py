"""Synthetic results: not trained, but plausible, and the same every time."""

import math
import random

from mooring_lab.model.results import Result, Stability
from mooring_lab.model.spec import RunSpec

LAYERS = ("conv1", "conv2", "conv3", "conv4", "fc1", "fc2")
VERSIONS = {"mooring": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "device": "NVIDIA H200"}

IMPORTANCES = ("ewc", "mas", "si", "rwalk", "uniform", "random")
EVERY_METHOD = (
    "plain",
    "frozen",
    "frozen-after-first",
    "joint",
    *IMPORTANCES,
    "si-absolute",
    "si-signed",
    "si-negative",
    *(f"clamped-{name}" for name in IMPORTANCES[:4]),
    *(f"balanced-{name}" for name in (*IMPORTANCES[:4], "si-absolute")),
    *(f"explicit-{name}" for name in IMPORTANCES),
    *("summed-ewc", "clamped-summed-ewc", "laplace-kronecker", "lwf"),
    *("l2-sp", "sfa", "wise-ft", "imm-mean", "imm-mode", "cofima"),
    *(f"proximal-{name}" for name in IMPORTANCES),
    "budget-ewc",
    "budget-kronecker",
    *("gpm", "nscl", "owm", "ftp", "tpgm"),
    "a-gem",
    "er",
    "der++",
)
NO_STRENGTH = ("plain", "frozen", "frozen-after-first", "joint", "a-gem", "er")


def keeping(method: str, strength: float | None) -> tuple[float, float]:
    """How much of a task a method keeps from task to task, and how well it still learns."""
    chance = random.Random(f"{method}")
    kept = {"plain": 0.0, "joint": 1.0, "frozen": 1.0, "frozen-after-first": 0.97, "random": 0.35, "uniform": 0.45}
    base = kept.get(method.split("-")[-1] if "frozen" not in method else method, 0.55 + 0.3 * chance.random())
    base += {"balanced": 0.12, "explicit": 0.08, "proximal": 0.05}.get(method.split("-")[0], 0.0)
    tuned = 1.0 if strength is None else math.exp(-((math.log10(strength) - 2) ** 2) / 6)
    learns = {"frozen": 0.35, "frozen-after-first": 0.6}.get(method, 1.0 - 0.12 * base * (method != "joint"))
    return min(base * tuned, 1.0), learns


def run(
    method: str,
    seed: int,
    *,
    stream: str = "split digits",
    strength: float | None = 100.0,
    tasks: int = 5,
    status: str = "finished",
    reached: int | None = None,
    whole: bool = False,
    **spec,
) -> Result:
    """One result. `reached` rows of the matrix are there where the run did not finish; whole as in older studies."""
    strength = None if method in NO_STRENGTH else strength
    chance = random.Random(f"{stream} {method} {strength} {seed} {spec}")
    kept, learns = keeping(method, strength)
    untrained = [round(10 + chance.gauss(0, 1.5), 2) for _ in range(tasks)]
    matrix = []
    for after in range(tasks):
        row = []
        for task in range(tasks):
            if after < task:
                value = untrained[task] + 6 * kept + chance.gauss(0, 2)
            else:
                peak = 14 + learns * (82 - 2 * task)
                value = 14 + (peak - 14) * (kept + (1 - kept) * 0.62 ** (after - task)) + chance.gauss(0, 1.2)
            row.append(round(min(max(value, 0.0), 100.0), 2))
        matrix.append(row if whole else row[: after + 2])
    rows = tasks if status == "finished" else reached or 0
    stretches = 12
    losses = [
        [
            round(
                (0.04 + 1.9 * (1 - 0.5 * learns) * math.exp(-3.2 * learns * step / stretches))
                * chance.uniform(0.9, 1.1),
                4,
            )
            for step in range(stretches)
        ]
        for _ in range(max(rows, 1))
    ]
    stability, importance = [], {}
    if strength is not None:
        scale = {"ewc": 3e-3, "mas": 2e-2, "si": 1e-2, "rwalk": 0.3}.get(method.split("-")[-1], 1e-1)
        signs = -1 if method == "si-negative" else 1
        importance = {
            layer: signs * scale * 10 ** chance.gauss(-0.4 * number, 0.15) for number, layer in enumerate(LAYERS)
        }
        for task in range(1, max(rows, 1) + 1):
            largest = 0.02 * strength * scale * (1 + 0.4 * task) * chance.uniform(4, 5)
            over = 0 if largest < 1 else int(40 * largest)
            many = 0 if largest < 2 else int(9 * largest)
            stability.append(
                Stability(
                    task, largest, strength / largest, 1200, 100_570 - over - many, over, many, 310 if signs < 0 else 0
                )
            )
    return Result(
        RunSpec(stream=stream, data=f"data of {stream}", method=method, seed=seed, strength=strength, **spec),
        status,
        "" if status == "finished" else f"the loss of task {rows + 1} is not finite in layer fc1: lower the strength",
        untrained,
        matrix[:rows],
        losses,
        stability,
        importance,
        {
            layer: abs(chance.gauss((1 - 0.8 * kept) * (0.2 + 0.15 * number), 0.02))
            for number, layer in enumerate(LAYERS)
        },
        {
            layer: 1 - (1 - kept) * (0.1 + 0.12 * number) * chance.uniform(0.8, 1.0)
            for number, layer in enumerate(LAYERS)
        },
        steps=250 * rows,
        seconds=3.5,
        versions=VERSIONS,
    )


def study() -> list[Result]:
    """Two streams, five tasks, three seeds; one run unstable, one method rejected, several strengths of ewc."""
    results = []
    for seed in range(3):
        for method in ("plain", "joint", "mas", "balanced-ewc", "explicit-si", "er"):
            results.append(run(method, seed))
        for strength in (1.0, 100.0, 10_000.0):
            broken = strength == 10_000.0 and seed == 1
            results.append(run("ewc", seed, strength=strength, status="unstable" if broken else "finished", reached=2))
        results.append(run("si", seed, strength=1e6, status="rejected", reached=1))
        for method in ("plain", "ewc"):
            results.append(run(method, seed, stream="permuted digits", tasks=3))
    return results


def large_study(seeds: int = 5) -> list[Result]:
    """Every method there is, at three strengths, as a whole night of training would leave them."""
    results = []
    for method in EVERY_METHOD:
        for strength in (10.0, 100.0, 1000.0) if method not in NO_STRENGTH else (None,):
            for seed in range(seeds):
                broken = method in ("si-negative", "rwalk", "si-signed") and strength == 1000.0
                lost = method == "si-negative" or (broken and seed % 2)
                status = "rejected" if broken and method == "rwalk" else "unstable" if lost else "finished"
                reached = {"rejected": 1, "unstable": 2 + seed % 2}.get(status)
                results.append(run(method, seed, strength=strength, status=status, reached=reached, network="cnn6"))
    return results
