"""What fine-tuning learns against what it keeps: Mooring beside other methods, on networks that were trained before.

Each method runs over its dial, and each run is a line of a JSON file, so that an interrupted benchmark continues.
"Kept" is the accuracy on held-out old data, "nats" the divergence from the original model there, "gauge" the one that
Mooring measures, and "new" the accuracy on the new task.

    python benchmarks/real.py --task digits --out digits.jsonl
    python benchmarks/real.py --task cifar100 --data DIR --weights weights.pt --device cuda --out cifar100.jsonl
    python benchmarks/real.py --task cifar100 --out cifar100.jsonl --figure cifar100      # the table and the figure

`--data` has Parquet files in the layout of the Hub: imagenet-sample/data, cifar100/data and flowers102/data. `--folder`
is a new task of your own, with an image folder for each class.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

import mooring

Batch = tuple[Tensor, Tensor]


@dataclass
class Problem:
    """A trained network, data of what it knows, and a new task.

    Attributes:
        network: returns the network of a seed, trained on the old task. Its `forward` gives the old outputs, and its
            method `new` those of the new task.
        reference: old inputs and labels that may be used in training.
        old_test: other old data.
        new_train, new_test: the new task.
        optimizer: makes the optimizer from parameters and a factor of the learning rate.
        epochs: of the new task.
        batch: the batch size of training, and of the reference.
        prepare: makes inputs from stored images.
    """

    network: Callable[[int], Any]
    reference: Batch
    old_test: Batch
    new_train: Batch
    new_test: Batch
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    epochs: int
    batch: int
    reference_batch: int
    prepare: Callable[[Tensor], Tensor] = field(default=lambda x: x)


class TwoHeads(nn.Module):
    """A network with the outputs that it has, and new ones: the same if there is no new head."""

    def __init__(self, body: nn.Module, old: nn.Module, new: nn.Module | None) -> None:
        super().__init__()
        self.body, self.old = body, old
        self.new_head, self.uses_new = new, False

    def forward(self, x: Tensor) -> Tensor:
        """Return the old outputs, or the new ones if `new` calls it."""
        head = self.new_head if self.uses_new and self.new_head is not None else self.old
        outputs: Tensor = head(self.body(x))
        return outputs

    def new(self, x: Tensor) -> Tensor:
        """Return the outputs of the new task, by a call of the model itself, which Mooring observes."""
        self.uses_new = True
        try:
            outputs: Tensor = self(x)
        finally:
            self.uses_new = False
        return outputs


class Features(nn.Module):
    """EfficientNet-Lite0 without its last layer; its batch norm always uses the statistics that it has."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, (n, 1280)."""
        features: Tensor = self.network.features(x)
        return features

    def train(self, mode: bool = True) -> "Features":
        """Stay in eval mode."""
        return super().train(False)


def digits_problem(options: argparse.Namespace) -> Problem:
    """Return the digits: upright ones are known, those on their side are new, with the same outputs.

    The images of other writers, at the end of the data set, are test data and reference, in turn.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)
    x, y, unseen, unseen_labels = images[:1200], labels[:1200], images[1200:], labels[1200:]
    trained: dict[int, nn.Module] = {}

    def optimizer(parameters: Any, factor: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.03 * factor, momentum=0.9)

    def network(seed: int) -> nn.Module:
        if seed not in trained:
            torch.manual_seed(seed)
            body = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
            model = trained[seed] = TwoHeads(body, nn.Linear(100, 10), None)
            steps = optimizer(model.parameters(), 1.0)
            for batch in shuffled(len(x), 20, 10):
                steps.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
                steps.step()
        return copy.deepcopy(trained[seed])

    def turned(images: Tensor) -> Tensor:
        return images.rot90(1, (2, 3))

    reference = unseen[::2], unseen_labels[::2]
    test, test_labels = unseen[1::2], unseen_labels[1::2]
    new = (turned(x), y), (turned(test), test_labels)
    return Problem(network, reference, (test, test_labels), *new, optimizer, options.epochs or 5, 20, 20)


def image_problem(options: argparse.Namespace) -> Problem:
    """Return EfficientNet-Lite0, with ImageNet as what it knows, and a new task with a head of its own."""
    from efficientnet_lite import FEATURES, MEAN, PIXELS, STD, pretrained

    device = torch.device(options.device)
    known = read_images(options.data / "imagenet-sample", "test", PIXELS, 1000, device)
    order = torch.randperm(len(known[0]), generator=torch.Generator().manual_seed(0)).to(device)
    reference, old_test = ((known[0][i], known[1][i]) for i in (order[:300], order[300:]))
    if options.folder:
        new_train, new_test = read_folder(options.folder, PIXELS, options.images, device)
    else:
        new_train = read_images(options.data / options.task, "train", PIXELS, options.images, device)
        new_test = read_images(options.data / options.task, "test", PIXELS, options.test_images, device)
    classes = int(new_train[1].max()) + 1

    def network(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        original: Any = pretrained(options.weights)
        old, original.fc = original.fc, nn.Identity()
        return TwoHeads(Features(original), old, nn.Linear(FEATURES, classes)).to(device)

    def optimizer(parameters: Any, factor: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4 * factor)

    def prepare(images: Tensor) -> Tensor:
        return (images.float() / 255 - MEAN) / STD

    data = reference, old_test, new_train, new_test
    return Problem(network, *data, optimizer, options.epochs or 14, 64, 32, prepare)


def read_images(folder: Path, split: str, pixels: int, count: int, device: torch.device) -> Batch:
    """Return images of Parquet files, resized, as uint8 on the device, and their labels; a seeded choice of them."""
    import pyarrow.parquet as parquet

    tables = [parquet.read_table(file) for file in sorted((folder / "data").glob(f"{split}-*.parquet"))]
    if not tables:
        raise SystemExit(f"no {split}-*.parquet in {folder / 'data'}: give --data the folder of the data sets")
    names = tables[0].column_names
    image = next(name for name in ("image", "img") if name in names)
    label = next(name for name in ("label", "fine_label") if name in names)
    rows = [(table, row) for table in tables for row in range(len(table))]
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[:count].tolist()
    pairs = [(rows[i][0][image][rows[i][1]].as_py()["bytes"], rows[i][0][label][rows[i][1]].as_py()) for i in chosen]
    images = torch.stack([decode(data, pixels) for data, _ in pairs])
    return images.to(device), torch.tensor([value for _, value in pairs], device=device)


def read_folder(folder: Path, pixels: int, count: int, device: torch.device) -> tuple[Batch, Batch]:
    """Return a new task from a folder with one folder of images for each class; every fifth image is for the test."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [(file, number) for number, path in enumerate(classes) for file in sorted(path.iterdir())]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(1)).tolist()
    parts = [[files[i] for k, i in enumerate(order) if bool(k % 5) == train] for train in (True, False)]
    batches = []
    for part in (parts[0][:count], parts[1]):
        images = torch.stack([decode(file.read_bytes(), pixels) for file, _ in part])
        batches.append((images.to(device), torch.tensor([number for _, number in part], device=device)))
    return batches[0], batches[1]


def decode(data: bytes, pixels: int) -> Tensor:
    """Return an image as (3, pixels, pixels), uint8."""
    import io

    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    if image.size != (pixels, pixels):
        image = image.resize((pixels, pixels), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def shuffled(count: int, size: int, epochs: int, device: torch.device | None = None) -> Iterator[Tensor]:
    """Yield the indices of batches, in a new order in each epoch."""
    for _ in range(epochs):
        yield from torch.randperm(count).to(device or torch.device("cpu")).split(size)


class Run:
    """One network that learns the new task; methods change what a step does.

    Args:
        problem: the networks and the data.
        seed: of the network, and of the order of batches.
        rate: a factor of the learning rate.
    """

    def __init__(self, problem: Problem, seed: int, rate: float = 1.0) -> None:
        self.problem, self.model = problem, problem.network(seed)
        self.original = copy.deepcopy(self.model).eval().requires_grad_(False)
        torch.manual_seed(1000 + seed)
        self.trained = [p for name, p in self.model.named_parameters() if not self._is_old_head(name)]
        self.rate, self.optimizer = rate, problem.optimizer(self.trained, rate)
        self.reference = list(zip(*(part.split(problem.reference_batch) for part in problem.reference), strict=True))
        self.penalty: Callable[[int], Tensor] | None = None
        self.after_step: Callable[[], None] = lambda: None
        self.moor: Any = None
        self.gauge = math.nan

    def _is_old_head(self, name: str) -> bool:
        return self.model.new_head is not None and name.startswith("old.")

    def backbone(self) -> dict[str, Tensor]:
        """Return the parameters that old and new outputs share."""
        names = {id(p) for p in self.trained}
        named = self.model.named_parameters()
        return {name: p for name, p in named if id(p) in names and not name.startswith("new_head")}

    def train(self, epochs: int | None = None) -> None:
        """Learn the new task."""
        self.model.train()
        (x, y), device = self.problem.new_train, self.problem.new_train[0].device
        batches = shuffled(len(x), self.problem.batch, epochs or self.problem.epochs, device)
        for step, batch in enumerate(batches):
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model.new(self.problem.prepare(x[batch])), y[batch])
            if self.penalty:
                loss = loss + self.penalty(step)
            loss.backward()
            self.optimizer.step()
            self.after_step()

    def old_batch(self, step: int) -> Batch:
        """Return a batch of the reference, in turn."""
        x, y = self.reference[step % len(self.reference)]
        return self.problem.prepare(x), y

    def divergence(self, x: Tensor) -> Tensor:
        """Return the mean divergence of the original outputs from the present ones."""
        with torch.no_grad():
            target = self.original(x).log_softmax(1)
        return kl_div(self.model(x).log_softmax(1), target, reduction="batchmean", log_target=True)

    @torch.no_grad()
    def results(self) -> dict[str, float]:
        """Return what was kept and what was learned."""
        self.model.eval()
        (old_x, old_y), (new_x, new_y) = self.problem.old_test, self.problem.new_test
        old, before = self._outputs(self.model, old_x), self._outputs(self.original, old_x)
        new = self._outputs(self.model.new, new_x)
        p, q = before.log_softmax(1), old.log_softmax(1)
        each = (p.exp() * (p - q)).sum(1)
        return {
            "before": _accuracy(before, old_y),
            "kept": _accuracy(old, old_y),
            "new": _accuracy(new, new_y),
            "nats": float(each.mean()),
            "rise": float(cross_entropy(old, old_y) - cross_entropy(before, old_y)),
            "gauge": self.gauge,
        }

    def _outputs(self, model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        return torch.cat([model(self.problem.prepare(part)) for part in images.split(100)])


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return 100 * float((outputs.argmax(1) == labels).float().mean())


# The methods: each makes and trains a run at a value of its dial


def plain(problem: Problem, seed: int, dial: float) -> Run:
    """Fine-tune all parameters; the dial is a factor of the learning rate."""
    run = Run(problem, seed, rate=dial)
    run.train()
    return run


def linear_probe(problem: Problem, seed: int, dial: float) -> Run:
    """Train the last layer alone; without a new head that changes old outputs."""
    run = Run(problem, seed)
    run.optimizer = problem.optimizer(_last_layer(run).parameters(), dial)
    run.train()
    return run


def probe_then_finetune(problem: Problem, seed: int, dial: float) -> Run:
    """LP-FT: train the last layer, then all parameters; the dial is the factor of the second learning rate."""
    run = linear_probe(problem, seed, 10.0 if run_has_head(problem) else 1.0)
    run.optimizer = problem.optimizer(run.trained, dial)
    run.train()
    return run


def run_has_head(problem: Problem) -> bool:
    """Return whether the new task has a head of its own."""
    return problem.network(0).new_head is not None


def _last_layer(run: Run) -> nn.Module:
    layer: nn.Module = run.model.new_head or run.model.old
    return layer


def wise_ft(problem: Problem, seed: int, dial: float) -> Run:
    """WiSE-FT: fine-tune, then interpolate the shared parameters; at a dial of 1 they are the fine-tuned ones."""
    run = plain(problem, seed, 1.0)
    with torch.no_grad():
        for name, p in run.backbone().items():
            p.copy_(run.original.get_parameter(name).lerp(p, dial))
    return run


def l2_sp(problem: Problem, seed: int, dial: float) -> Run:
    """L2-SP: a penalty on the squared distance from the original parameters."""
    return _moored(problem, seed, {"importance": "uniform", "pull": mooring.Penalty(dial)})


def ewc(problem: Problem, seed: int, dial: float) -> Run:
    """EWC: the same penalty, weighted by the Fisher information on the reference."""
    return _moored(
        problem, seed, {"importance": mooring.EWC(decay=None, per_sample=True), "pull": mooring.Penalty(dial)}
    )


def distillation(problem: Problem, seed: int, dial: float) -> Run:
    """Add the divergence from the original model on the reference, times the dial."""
    run = Run(problem, seed)
    run.penalty = lambda step: dial * run.divergence(run.old_batch(step)[0])
    run.train()
    return run


def replay(problem: Problem, seed: int, dial: float) -> Run:
    """Add the loss on the reference with its labels, times the dial."""
    run = Run(problem, seed)

    def penalty(step: int) -> Tensor:
        x, y = run.old_batch(step)
        return dial * cross_entropy(run.model(x), y)

    run.penalty = penalty
    run.train()
    return run


def projection(problem: Problem, seed: int, dial: float) -> Run:
    """Project each layer into a ball around the original one after each step, as TPGM and FTP do.

    Its radius is the dial times the norm of the layer. Those methods learn a radius for each layer.
    """
    run = Run(problem, seed)
    anchors = {name: run.original.get_parameter(name) for name in run.backbone()}

    @torch.no_grad()
    def after_step() -> None:
        for name, p in run.backbone().items():
            d = p - anchors[name]
            p.copy_(anchors[name] + d * (dial * anchors[name].norm() / d.norm().clamp(min=1e-12)).clamp(max=1))

    run.after_step = after_step
    run.train()
    return run


class LowRank(nn.Module):
    """A linear layer or 1 x 1 convolution plus a product of rank r: W + B A, with B = 0 at first."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        outs, ins = layer.weight.flatten(1).shape
        self.a = nn.Parameter(torch.randn(rank, ins, device=layer.weight.device) / ins**0.5)
        self.b = nn.Parameter(torch.zeros(outs, rank, device=layer.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus B A x."""
        added = (self.b @ self.a).reshape(self.layer.weight.shape)
        change = nn.functional.linear(x, added) if added.ndim == 2 else nn.functional.conv2d(x, added)
        outputs: Tensor = self.layer(x) + change
        return outputs


def lora(problem: Problem, seed: int, dial: float) -> Run:
    """LoRA on linear layers and 1 x 1 convolutions; the dial is the rank. Other parameters are frozen."""
    run = Run(problem, seed)
    shared = [run.model.body] if run.model.new_head is not None else [run.model.body, run.model]
    for root in shared:
        for parent in list(root.modules()):
            for name, layer in list(parent.named_children()):
                pointwise = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
                if (isinstance(layer, nn.Linear) or pointwise) and not isinstance(parent, LowRank):
                    setattr(parent, name, LowRank(layer, int(dial)))
    factors = [p for module in run.model.modules() if isinstance(module, LowRank) for p in (module.a, module.b)]
    head = list(run.model.new_head.parameters()) if run.model.new_head is not None else []
    run.optimizer = problem.optimizer([*factors, *head], 10.0 if run_has_head(problem) else 1.0)
    run.train()
    return run


def _moored(problem: Problem, seed: int, options: dict[str, Any], *, labels: bool = True) -> Run:
    """Train with a Mooring, and finish a budget that is measured."""
    run = Run(problem, seed)
    prepared = [(problem.prepare(x), y) for x, y in run.reference]
    reference = prepared if labels else [x for x, _ in prepared]
    exclude = ("new_head.*",) if run.model.new_head is not None else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.moor = mooring.attach(
            run.model, run.optimizer, reference=reference, exclude=exclude, progress=False, **options
        )
    run.train()
    if "forgetting=measured" in repr(run.moor):
        run.gauge = run.moor.finish().nats
    run.moor.detach()
    return run


def budget(problem: Problem, seed: int, dial: float) -> Run:
    """Mooring with its default options: a budget that is measured, and distillation."""
    return _moored(problem, seed, {"pull": mooring.Budget(dial)})


def budget_without_distillation(problem: Problem, seed: int, dial: float) -> Run:
    """A measured budget with the pull alone."""
    return _moored(problem, seed, {"pull": mooring.Budget(dial, distil=False)})


def budget_kronecker(problem: Problem, seed: int, dial: float) -> Run:
    """A measured budget with Kronecker factors, and distillation."""
    return _moored(problem, seed, {"pull": mooring.Budget(dial), "importance": mooring.importance.Kronecker()})


def budget_kronecker_without_distillation(problem: Problem, seed: int, dial: float) -> Run:
    """A measured budget with Kronecker factors and the pull alone."""
    pull = mooring.Budget(dial, distil=False)
    return _moored(problem, seed, {"pull": pull, "importance": mooring.importance.Kronecker()})


def budget_estimated(problem: Problem, seed: int, dial: float) -> Run:
    """A budget that is estimated and calibrated, not measured."""
    return _moored(problem, seed, {"pull": mooring.Budget(dial, measured=False)})


def budget_new_inputs(problem: Problem, seed: int, dial: float) -> Run:
    """Mooring without any old data: the inputs of the new task are the reference."""
    new = copy.copy(problem)
    count = len(problem.reference[0])
    new.reference = problem.new_train[0][:count], problem.new_train[1][:count]
    return _moored(new, seed, {"pull": mooring.Budget(dial)}, labels=False)


NATS = [0.03, 0.1, 0.3, 1.0]
METHODS: dict[str, tuple[Callable[[Problem, int, float], Run], list[float]]] = {
    "plain": (plain, [0.1, 0.3, 1.0]),
    "linear-probe": (linear_probe, [10.0]),
    "lp-ft": (probe_then_finetune, [0.1, 0.3, 1.0]),
    "wise-ft": (wise_ft, [0.1, 0.3, 0.5, 0.7]),
    "l2-sp": (l2_sp, [0.01, 0.1, 1.0, 10.0]),
    "ewc": (ewc, [1.0, 10.0, 100.0, 1000.0]),
    "distillation": (distillation, [0.3, 1.0, 3.0, 10.0]),
    "replay": (replay, [0.3, 1.0, 3.0]),
    "projection": (projection, [0.01, 0.03, 0.1]),
    "lora": (lora, [4.0, 16.0]),
    "budget": (budget, NATS),
    "budget-no-distil": (budget_without_distillation, NATS),
    "budget-kronecker": (budget_kronecker, NATS),
    "budget-kronecker-no-distil": (budget_kronecker_without_distillation, NATS),
    "budget-estimated": (budget_estimated, NATS),
    "budget-new-inputs": (budget_new_inputs, NATS),
}
"""The methods with the values of their dials."""


def missing_runs(
    path: Path, methods: list[str], dials: list[float] | None, seeds: int
) -> Iterator[tuple[str, float, int]]:
    """Yield the runs that the file does not have yet, the same seed of all methods first."""
    known = {(row["method"], row["dial"], row["seed"]) for row in read_rows(path)}
    for seed in range(seeds):
        for method in methods:
            for dial in dials or METHODS[method][1]:
                if (method, dial, seed) not in known:
                    yield method, dial, seed


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(problem: Problem, method: str, dial: float, seed: int, device: str) -> dict[str, Any]:
    """Train one run, and return its row, which says so if the run diverged."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    try:
        run = METHODS[method][0](problem, seed, dial)
    except mooring.errors.NonFiniteError:
        return {"method": method, "dial": dial, "seed": seed, "diverged": True}
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan
    row = {"method": method, "dial": dial, "seed": seed, **run.results(), "seconds": seconds, "gib": memory}
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in row.items()}


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean over seeds of each method at each dial, with half-widths of 95 % intervals."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("diverged"):
            continue
        groups.setdefault((row["method"], row["dial"]), []).append(row)
    table = []
    for (method, dial), members in groups.items():
        summary: dict[str, Any] = {"method": method, "dial": dial, "seeds": len(members)}
        for name in ("before", "kept", "new", "nats", "rise", "gauge", "seconds", "gib"):
            values = [row[name] for row in members if row[name] is not None]
            summary[name] = statistics.fmean(values) if values else math.nan
            spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
            summary[f"{name}_error"] = STUDENT.get(len(values), 1.96) * spread
        summary["highest_gauge"] = max((row["gauge"] for row in members if row["gauge"] is not None), default=math.nan)
        table.append(summary)
    return table


STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""The 97.5 % quantile of Student's distribution, by the number of seeds."""


def hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the upper right convex hull of (kept, new).

    Example:
        >>> hull([(0.0, 2.0), (1.0, 1.0), (2.0, 0.0), (0.5, 0.5)])
        [(0.0, 2.0), (2.0, 0.0)]
    """
    border: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while border and y >= border[-1][1]:
            border.pop()
        while len(border) > 1:
            (ax, ay), (bx, by) = border[-2:]
            if (bx - ax) * (y - ay) < (by - ay) * (x - ax):
                break
            border.pop()
        border.append((x, y))
    return border


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the means of all methods."""
    heads = ("dial", "seeds", "before", "kept", "+-", "new", "+-", "nats", "rise", "gauge", "highest", "seconds", "GiB")
    print("method".ljust(28) + "".join(head.rjust(9) for head in heads))
    names = (
        "dial",
        "seeds",
        "before",
        "kept",
        "kept_error",
        "new",
        "new_error",
        "nats",
        "rise",
        "gauge",
        "highest_gauge",
    )
    for row in summarize(rows):
        text = "".join(f"{row[name]:9.3g}" for name in (*names, "seconds", "gib"))
        print(row["method"].ljust(28) + text)
    for row in rows:
        if row.get("diverged"):
            print(f"diverged: {row['method']} at {row['dial']:g}, seed {row['seed']}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw what was learned over what was kept, with the hull of the other methods, as .svg and .png."""
    from matplotlib.figure import Figure

    from mooring.report.style import FAINT, LINES, figure_style

    table = summarize(rows)
    with figure_style():
        figure = Figure(figsize=(7.2, 4.8))
        axes = figure.add_subplot()
        methods = list(dict.fromkeys(row["method"] for row in table))
        for number, method in enumerate(methods):
            own = sorted((row for row in table if row["method"] == method), key=lambda row: row["dial"])
            style = {"color": LINES[number % len(LINES)], "marker": "o" if method.startswith("budget") else "x"}
            axes.plot([row["kept"] for row in own], [row["new"] for row in own], label=method, lw=1, ms=5, **style)
        border = hull([(row["kept"], row["new"]) for row in table if not row["method"].startswith("budget")])
        axes.plot(*zip(*border, strict=True), color=FAINT, lw=0.8, ls=(0, (4, 2)), label="hull of the others")
        axes.set_xlabel("kept, %")
        axes.set_ylabel("new task, %")
        axes.legend(fontsize=7, ncol=2)
        for kind in ("svg", "png"):
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(path.with_suffix(f".{kind}"), format=kind, dpi=150, metadata=metadata)


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["digits", "cifar100", "flowers102", "folder"], default="digits")
    parser.add_argument("--data", type=Path, help="the folder of the data sets")
    parser.add_argument("--folder", type=Path, help="images of a new task, for --task folder")
    parser.add_argument("--weights", type=Path, help="a state_dict of EfficientNet-Lite0; default: that of its package")
    parser.add_argument("--images", type=int, default=4000, help="images of the new task (default: 4000)")
    parser.add_argument("--test-images", type=int, default=2000, help="test images of the new task (default: 2000)")
    parser.add_argument("--methods", help="names with commas between them (default: all)")
    parser.add_argument("--dials", help="values with commas between them, for all methods (default: each its own)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: 5 for digits, 14 for images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("real.jsonl"), help="the file of results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after so many minutes")
    parser.add_argument("--figure", type=Path, help="draw the figure to this path, as .svg and .png")
    options = parser.parse_args(arguments)
    methods = options.methods.split(",") if options.methods else list(METHODS)
    if unknown := [name for name in methods if name not in METHODS]:
        parser.error(f"unknown method {unknown[0]!r}; allowed: {', '.join(METHODS)}")
    if options.task != "digits" and options.data is None:
        parser.error("give --data, the folder of the data sets")
    dials = [float(value) for value in options.dials.split(",")] if options.dials else None
    start, problem = time.monotonic(), None
    for method, dial, seed in missing_runs(options.out, methods, dials, options.seeds):
        if time.monotonic() - start > 60 * options.minutes:
            break
        if problem is None:
            problem = (digits_problem if options.task == "digits" else image_problem)(options)
        row = measure(problem, method, dial, seed, options.device)
        print(json.dumps(row), file=sys.stderr, flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows = read_rows(options.out)
    print_table(rows)
    if options.figure:
        draw(rows, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
