"""A cell of the gauntlet, run with one method: what was learned, what was kept, and how far the outputs moved."""

import copy
import math
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from gauntlet_problems.problem_definition import Examples, GauntletProblem, Part
from gauntlet_problems.problem_set import PROBLEMS
from gauntlet_problems.small_networks import HeadedNetwork, adapt
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

import mooring
from gauntlet_runs.covering_design import GauntletCell
from gauntlet_runs.extra_optimizers import OPTIMIZERS, rates_to_try, trained
from gauntlet_runs.schedules import factor
from mooring.errors import MooringError

Row = dict[str, Any]

METHODS = ("plain", "mooring", "kl 0.3", "kl 1", "kl 3", "kl 10", "replay", "l2-sp")
"""The methods of a cell; a number is the weight of the Kullback-Leibler divergence."""

L2_STRENGTH = 0.1
"""The penalty of L2-SP is this times half of the squared distance from the original parameters."""

BATCH, SAMPLES, TESTED = 32, 1024, 512
"""The samples of a batch, those of a task to train on, and those to test on."""

TRIAL_STEPS = 200
"""The steps of plain training with which a learning rate is chosen."""

BEFORE_STEPS = 400
"""The steps that taught the network the old task, with Adam and a rate that falls to 0."""


MOST_NATS = 99.0
"""What stands for a divergence that is larger or not finite, such as after training that diverged."""


@dataclass(frozen=True)
class Prepared:
    """A problem of one seed: the network that knows the old task, and the examples of all tasks.

    Attributes:
        weights: of the network.
        train: examples of each task; task 0 is the old one, whose examples were trained on.
        test: held-out examples of each task.
        fresh: inputs of the old task that were not trained on.
    """

    weights: dict[str, Tensor]
    train: list[Examples]
    test: list[Examples]
    fresh: Tensor


@lru_cache(maxsize=64)
def prepared(name: str, seed: int) -> Prepared:
    """Return a problem of one seed; the old task is trained before."""
    problem = PROBLEMS[name]
    world = problem.world(_generator(seed, name, "world"))

    def draw(task: int, part: Part, count: int) -> Examples:
        return world(task, part, count, _generator(seed, name, part, task))

    train = [draw(task, "new" if task else "old", SAMPLES) for task in range(problem.tasks + 1)]
    test = [draw(task, "test", TESTED) for task in range(problem.tasks + 1)]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = problem.build()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step, index in enumerate(batches_of(SAMPLES, BEFORE_STEPS, _generator(seed, name, "before"))):
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / BEFORE_STEPS)
            optimizer.zero_grad()
            loss_of(model(train[0][0][index]), train[0][1][index], "mean").backward()
            optimizer.step()
    return Prepared(copy.deepcopy(model.state_dict()), train, test, draw(0, "fresh", SAMPLES)[0])


def network(problem: GauntletProblem, weights: dict[str, Tensor], *, adapters: bool, seed: int) -> HeadedNetwork:
    """Return the network that knows the old task, whose random numbers begin at a seed."""
    torch.manual_seed(seed)
    model = problem.build()
    model.load_state_dict(weights)
    if adapters:
        adapt(model)
    return model


def batches_of(samples: int, count: int, generator: Generator) -> Iterator[Tensor]:
    """Yield the indices of so many batches; every sample comes once before one comes again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(count):
        if len(order) < BATCH:
            order = torch.randperm(samples, generator=generator)
        yield order[:BATCH]
        order = order[BATCH:]


def loss_of(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the cross entropy of all predictions."""
    return cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction=reduction)


def divergence(original: Tensor, outputs: Tensor, reduction: str) -> Tensor:
    """Return KL(original || outputs), the mean or the sum over all predictions."""
    log_p, log_q = (logits.flatten(0, -2).log_softmax(-1) for logits in (original, outputs))
    total = kl_div(log_q, log_p, reduction="sum", log_target=True)
    return total / len(log_p) if reduction == "mean" else total


@torch.no_grad()
def outputs_of(model: HeadedNetwork, x: Tensor, head: int) -> Tensor:
    """Return the outputs in eval mode; the model's mode and head do not change."""
    training, used = model.training, model.head
    model.eval().use_head(head)
    outputs: Tensor = model(x)
    model.train(training).head = used
    return outputs


def accuracy(model: HeadedNetwork, examples: Examples, head: int) -> float:
    """Return which part of predictions is right."""
    return float((outputs_of(model, examples[0], head).argmax(-1) == examples[1]).float().mean())


def mean_divergence(model: HeadedNetwork, original: Sequence[Tensor], test: Sequence[Examples]) -> float:
    """Return the mean over tasks of the divergence from the original outputs on held-out inputs."""
    now = (outputs_of(model, x, task) for task, (x, _) in enumerate(test))
    values = [float(divergence(before, after, "mean")) for before, after in zip(original, now, strict=True)]
    return min(_mean(values), MOST_NATS) if math.isfinite(sum(values)) else MOST_NATS


Addition = Callable[[], Tensor]
"""What a method adds to the loss of a step."""


class CellRun:
    """A cell with one method.

    Args:
        cell: the cell.
        method: one of `METHODS`.
        seed: of the problem and of the order of batches.
        lr: the learning rate.
    """

    def __init__(self, cell: GauntletCell, method: str, seed: int, lr: float) -> None:
        self.cell, self.method, self.seed, self.lr = cell, method, seed, lr
        self.problem = PROBLEMS[cell.problem]
        self.data = prepared(cell.problem, seed)
        self.model = network(self.problem, self.data.weights, adapters=cell.adapters, seed=seed)
        self.reduction = "sum" if cell.summed else "mean"
        old = self.data.train[0][0] if cell.known else self.data.fresh
        self.stored = [old[: cell.reference]]
        self.moor: Any = None
        self.texts: dict[str, list[str]] = {"training": [], "end": []}
        self.seconds = self.seconds_at_end = 0.0
        self.tasks: list[Row] = []

    def row(self) -> Row:
        """Train all tasks, and return what was measured."""
        failed = None
        try:
            for task in range(1, self.cell.tasks + 1):
                self.tasks.append(self.learn(task))
        except MooringError as error:  # such as a loss that is not finite
            failed = str(error)
        scores = [accuracy(self.model, examples, task) for task, examples in enumerate(self.seen)]
        return {
            "cell": self.cell.text,
            "method": self.method,
            "seed": self.seed,
            "lr": self.lr,
            "learned": 0.0 if failed else _mean([task["learned"] for task in self.tasks]),
            "kept": _mean(scores[:-1]),
            "final": _mean(scores),
            "known_before": accuracy_before(self.cell.problem, self.seed),
            "held_out": MOST_NATS if failed else _mean([task["held_out"] for task in self.tasks]),
            "gauge": max((task["gauge"] for task in self.tasks if task["gauge"] is not None), default=None),
            "budget": self.budget,
            "seconds": round(self.seconds, 3),
            "seconds_at_end": round(self.seconds_at_end, 3),
            "warnings": self.texts["training"],
            "warnings_at_end": self.texts["end"],
            "failed": failed,
            "by_task": self.tasks,
        }

    @property
    def seen(self) -> list[Examples]:
        """The held-out examples of the old task and of all new tasks of the cell."""
        return self.data.test[: self.cell.tasks + 1]

    @property
    def budget(self) -> float | None:
        """What may be forgotten, in nats; None without Mooring."""
        return float(self.moor.pull.nats) if self.moor is not None else None

    def learn(self, task: int) -> Row:
        """Train a task, and return what was measured at its end."""
        cell, model = self.cell, self.model
        before = [outputs_of(model, x, number) for number, (x, _) in enumerate(self.data.test[:task])]
        started = time.process_time()
        x, y = self.data.train[task]
        with self.noted("training"):
            optimizer = OPTIMIZERS[cell.optimizer](model, self.lr)
            rates = [group["lr"] for group in optimizer.param_groups]
            self.attach(optimizer)
            addition = self.addition(task)
            model.train().use_head(task)
            for step, index in enumerate(batches_of(len(x), cell.length, _generator(self.seed, "batches", task))):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor(cell.schedule, step, cell.length)
                optimizer.zero_grad()
                loss = loss_of(model(x[index]), y[index], self.reduction)
                if addition is not None:
                    loss = loss + addition()
                loss.backward()
                if cell.clipped:
                    nn.utils.clip_grad_norm_(trained(model), 1.0)
                optimizer.step()
        self.seconds += time.process_time() - started
        row: Row = {"gauge": None}
        if self.moor is not None:
            row["before_end"] = self.measured(task, before)
            row["gauge_before_end"] = self.moor.measured().nats
            started = time.process_time()
            row["gauge"] = self.finish(task)
            self.seconds_at_end += time.process_time() - started
        self.store(task)
        return {**row, **self.measured(task, before)}

    def measured(self, task: int, before: Sequence[Tensor]) -> Row:
        """Return what is learned of a task, what is kept of those before, and how far their outputs moved."""
        test = self.data.test
        return {
            "learned": accuracy(self.model, test[task], task),
            "kept": _mean([accuracy(self.model, test[number], number) for number in range(task)]),
            "held_out": mean_divergence(self.model, before, test[:task]),
        }

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach Mooring with its default options before the first task; later tasks have an optimizer of their own."""
        if self.method != "mooring":
            return
        if self.moor is None:
            self.model.use_head(0)
            reference = self.stored[0].split(BATCH)
            self.moor = mooring.attach(self.model, optimizer, reference=reference, progress=False)
        else:
            self.moor.rebind(optimizer)

    def finish(self, task: int) -> float:
        """End a task, and return what is measured then; all but the last one are consolidated."""
        with self.noted("end"):
            if task == self.cell.tasks:
                return float(self.moor.finish().nats)
            data = self.data.train[task][0][: self.cell.reference].split(BATCH)
            return float(self.moor.consolidate(data=data, progress=False).nats)

    def store(self, task: int) -> None:
        """Keep inputs of a task for the tasks that follow."""
        self.stored.append(self.data.train[task][0][: self.cell.reference])

    def addition(self, task: int) -> Addition | None:
        """Return what the method adds to the loss; past tasks come in turn."""
        kind, _, number = self.method.partition(" ")
        if kind == "l2-sp":
            anchors = [(p, p.detach().clone()) for p in trained(self.model)]
            return lambda: L2_STRENGTH / 2 * sum((p - a).square().sum() for p, a in anchors)  # type: ignore[return-value]
        if kind not in ("kl", "replay"):
            return None
        original = [outputs_of(self.model, x, head) for head, x in enumerate(self.stored)]
        orders = [batches_of(len(x), 10**9, _generator(self.seed, "old", task, p)) for p, x in enumerate(self.stored)]
        turn = 0

        def add() -> Tensor:
            nonlocal turn
            number_of_task = turn % task
            index, turn = next(orders[number_of_task]), turn + 1
            self.model.use_head(number_of_task)
            now, before = self.model(self.stored[number_of_task][index]), original[number_of_task][index]
            self.model.use_head(task)
            if kind == "replay":
                return loss_of(now, before.argmax(-1), self.reduction)
            return float(number) * divergence(before, now, self.reduction)

        return add

    @contextmanager
    def noted(self, when: str) -> Iterator[None]:
        """Note each warning once."""
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            yield
        texts = [str(warning.message).split("\n")[0] for warning in raised]
        self.texts[when] += [text for text in dict.fromkeys(texts) if text not in self.texts[when]]


def accuracy_before(name: str, seed: int) -> float:
    """Return which part of the old task the network knows before it learns anything new."""
    data = prepared(name, seed)
    model = network(PROBLEMS[name], data.weights, adapters=False, seed=seed)
    return accuracy(model, data.test[0], 0)


def rate_key(cell: GauntletCell) -> str:
    """Return what a learning rate is chosen for: the problem, the optimizer, and what changes the length of a step."""
    flags = (name for name in ("clipped", "summed", "adapters") if getattr(cell, name))
    return "/".join((cell.problem, cell.optimizer.replace(" ", "-"), *flags))


def best_rate(cell: GauntletCell) -> Row:
    """Return the learning rate with the lowest loss on the training set after 200 steps of plain training of seed 0.

    The schedule is constant. Nothing of what is kept is looked at.
    """
    data = prepared(cell.problem, 0)
    x, y = data.train[1]
    flags = {"adapters": cell.adapters, "summed": cell.summed, "clipped": cell.clipped}
    losses = {}
    for lr in rates_to_try(cell.optimizer, batch=BATCH, **flags):
        trial = GauntletCell(**{**vars(cell), "schedule": "constant", "length": TRIAL_STEPS, "tasks": 1})
        run = CellRun(trial, "plain", 0, lr)
        run.learn(1)
        loss = float(loss_of(outputs_of(run.model, x, 1), y, "mean"))
        losses[lr] = loss if math.isfinite(loss) else MOST_NATS
    return {"key": rate_key(cell), "lr": min(losses, key=losses.__getitem__), "losses": [*losses.items()]}


def _generator(seed: int, *names: Any) -> Generator:
    """Return a generator of random numbers for a seed and a purpose."""
    return torch.Generator().manual_seed(seed * 2**32 + zlib.crc32("/".join(map(str, names)).encode()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
