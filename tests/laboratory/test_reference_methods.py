"""Distillation and measured budgets in fleets: equal to loops by hand, kept at the end of every task, and refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

import mooring
from laboratory.small import class_stream, domain_stream, growing_stream, optimizer_by_hand, spec_for
from mooring.errors import MooringError, UnheldWarning
from mooring.state.chosen_rules import DEFAULT_NATS
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet, Position
from mooring_lab.methods import METHODS, budgets, find_method
from mooring_lab.methods.budgets import ReferenceOptions
from mooring_lab.model.method import Method
from mooring_lab.model.order import task_order
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels

STREAMS = {"classes": class_stream(images=48), "domains": domain_stream(images=48)}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
SMALL = "laboratory.test_reference_methods:small"
NORMALIZED = "laboratory.test_reference_methods:normalized"
MEMORY = 42
"""For each of two past tasks 21 samples: 6 batches of at most 4, the last with one sample."""


def small(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], 12), nn.Tanh())


def normalized(shape: tuple[int, int, int]) -> nn.Module:
    """Right after a linear layer, gradients of rounding errors would remain, which AdamW divides by their size."""
    linear = nn.Linear(shape[1] * shape[2], 8)
    return nn.Sequential(nn.Flatten(), linear, nn.Tanh(), nn.BatchNorm1d(8))


class Moored(nn.Module):
    """A network with an active head, which a gauge remembers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x, self.head)


class Loop:
    """A plain loop over one network with `mooring.attach`, or, without a budget, with distillation by hand.

    The reference of a past task is its share of the memory. `mooring` is attached with it once a task is over, as
    to any model that is already trained; the others are attached before the first task.
    """

    def __init__(self, spec, stream) -> None:
        self.spec, self.stream, self.method = spec, stream, find_method(spec.method)
        self.model = Moored(initial_network(spec.network, stream, spec.seed, dtype=torch.float64))
        self.optimizer = optimizer_by_hand(spec, self.model.parameters())
        self.kept: list[dict] = []
        self.targets: list[torch.Tensor] = []
        self.moor, self.measured, self.before = None, [], []
        self.options = {"exclude": "network.heads" if stream.heads == "per task" else (), "progress": False}
        if self.method.importance is not None and not self.method.plugin.attached:
            rules = {"importance": self.method.importance(0), "pull": self.method.pull(spec.strength), "merge": "sum"}
            self.moor = mooring.attach(self.model, self.optimizer, buffers=spec.buffers, **rules, **self.options)

    def train(self) -> "Loop":
        for number, task in enumerate(self.stream.tasks):
            self.model.head = self.stream.head(number)
            if number and self.stream.heads == "per task":
                self.model.network.inherit(number, number - 1)
            self.optimizer.state.clear()
            steps = 0
            for epoch in range(self.spec.epochs):
                for batch in task_order(self.spec.seed, number, epoch, task.train).split(self.spec.batch):
                    self.step(batch, number, steps)
                    steps += 1
            self.end_task(number)
        return self

    def images(self, batch: torch.Tensor) -> torch.Tensor:
        return normalize_pixels(self.stream.train.images[batch], torch.float64)

    def step(self, batch: torch.Tensor, number: int, step: int) -> None:
        self.optimizer.zero_grad()
        logits, labels = self.model.train()(self.images(batch)), self.stream.train.labels[batch]
        if self.stream.scenario == "class":  # two classes a task
            logits, labels = logits[:, : 2 * (number + 1)], labels + 2 * number
        loss = cross_entropy(logits, labels)
        if self.kept:
            loss = loss + self.spec.strength * self.divergence(step)
        loss.backward()
        self.optimizer.step()

    def predictions(self, number: int) -> torch.Tensor:
        return self.model.network.eval()(**self.kept[number])[:, : self.outputs].log_softmax(-1)

    def divergence(self, step: int) -> torch.Tensor:
        number = step % len(self.kept)
        value = kl_div(self.predictions(number), self.targets[number], reduction="batchmean", log_target=True)
        self.model.train()
        return value

    def end_task(self, number: int) -> None:
        order = task_order(self.spec.seed, number, 0, self.stream.tasks[number].train)
        batches = order[: self.spec.memory // 2].split(self.spec.batch)
        last = number + 1 == len(self.stream.tasks)
        if self.method.importance is None:
            self.outputs = 2 * (number + 1) if self.stream.scenario == "class" else None
            heads = (torch.full((len(batch),), self.stream.head(number)) for batch in batches)
            self.kept += [] if last else [{"x": self.images(b), "head": h} for b, h in zip(batches, heads, strict=True)]
            self.targets = [self.predictions(index).detach() for index in range(len(self.kept))]
            return
        reference = [(self.images(batch), self.stream.train.labels[batch]) for batch in batches]
        if self.moor is None:
            pull = {} if self.spec.strength == DEFAULT_NATS else {"pull": mooring.Budget(self.spec.strength)}
            self.moor = mooring.attach(
                self.model, self.optimizer, reference=reference, batches=None, **pull, **self.options
            )
            return
        if number:
            self.before.append(self.moor.measured().nats)
        forgotten = self.moor.finish() if last else self.moor.consolidate(data=reference, progress=False)
        self.measured += [forgotten.nats] if number else []


def specs_for(method: str, stream, strengths, **settings):
    settings = {"lr": 0.1, "memory": MEMORY, "batch": 4, "epochs": 2, "network": SMALL, **settings}
    return [spec_for(method, stream, seed, strength=value, **settings) for seed in (0, 2) for value in strengths]


def final(fleet: Fleet) -> dict[str, dict[str, torch.Tensor]]:
    specs = [spec for group in fleet.strength_groups.values() for spec in group]
    fleet.run()
    return {spec.key: fleet.stack.network_of(row).state_dict() for row, spec in enumerate(specs)}


@pytest.mark.parametrize("kind", [*STREAMS, "growing"])
def test_distillation_in_a_fleet_equals_a_plain_loop(kind):
    stream = growing_stream(images=48) if kind == "growing" else STREAMS[kind]
    specs = specs_for("distil", stream, (0.3, 3.0), weight_decay=0.01)
    weights = final(Fleet(specs, stream))
    for spec in specs:
        torch.testing.assert_close(weights[spec.key], Loop(spec, stream).train().model.network.state_dict(), **EXACT)


ADAMW = {"optimizer": "adamw", "lr": 0.01}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("settings", [{"lr": 0.03}, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("network", [SMALL, NORMALIZED], ids=["small", "batch-norm"])
@pytest.mark.parametrize("method", ["mooring", "budget-measured", "budget-distil"])
def test_measured_budget_in_a_fleet_equals_a_loop_with_attach(method, network, settings, kind):
    stream, buffers = STREAMS[kind], "follow" if method == "mooring" else "frozen"  # attach(reference=) freezes them
    specs = specs_for(method, stream, (0.003, 0.1), network=network, buffers=buffers, **settings)
    weights, loops = final(Fleet(specs, stream)), [Loop(spec, stream).train() for spec in specs]
    for spec, loop in zip(specs, loops, strict=True):
        torch.testing.assert_close(weights[spec.key], loop.model.network.state_dict(), **EXACT)
    assert any(max(loop.before) > loop.spec.strength for loop in loops)  # something returned at the end of a task


def test_average_at_the_end_of_a_task_equals_that_of_a_loop_with_attach(own_method):
    name = own_method(
        lambda nats: mooring.Budget(nats, average=True),
        importance=lambda seed: mooring.EWC(decay=None, per_sample=True),
        plugin=ReferenceOptions(measures=True),
        memory=MEMORY,
    )
    specs = specs_for(name, STREAMS["domains"], (0.001, 10.0))
    weights, loops = final(Fleet(specs, STREAMS["domains"])), [Loop(s, STREAMS["domains"]).train() for s in specs]
    for spec, loop in zip(specs, loops, strict=True):
        torch.testing.assert_close(weights[spec.key], loop.model.network.state_dict(), **EXACT)
    assert any(max(loop.before) > loop.spec.strength for loop in loops)


def test_every_method_with_a_reference_is_compared_with_a_loop():
    names = {"distil", "budget-measured", "budget-distil", "mooring"}
    assert {method.name for method in budgets.METHODS} == names


@pytest.fixture
def own_method(monkeypatch):
    def add(pull, **settings) -> str:
        method = Method("mine", "a method of my own", pull=pull, merge="sum", strength=0.1, **settings)
        monkeypatch.setitem(METHODS, "mine", method)
        return "mine"

    return add


def test_budget_over_several_past_tasks_equals_a_loop_with_attach(own_method):
    name = own_method(
        lambda nats: mooring.Budget(nats, distil=False),
        importance=lambda seed: mooring.EWC(decay=None, per_sample=True),
        plugin=ReferenceOptions(measures=True),
        memory=MEMORY,
    )
    spec = specs_for(name, STREAMS["domains"], (0.003,))[0]
    loop = Loop(spec, STREAMS["domains"]).train()
    weights = final(Fleet([spec], STREAMS["domains"]))[spec.key]
    torch.testing.assert_close(weights, loop.model.network.state_dict(), **EXACT)
    assert max(loop.before) > 0.003 >= max(loop.measured)


class StopError(Exception):
    pass


class StopAt:
    """Saves a fleet at a position and stops it there."""

    def __init__(self, path, position: Position) -> None:
        self.path, self.position = path, position

    def on_step(self, fleet: Fleet) -> None:
        if fleet.position == self.position:
            checkpoint.save(fleet, self.path)
            raise StopError

    on_task_end = on_step


@pytest.mark.parametrize("method", [method.name for method in budgets.METHODS])
@pytest.mark.parametrize("position", [Position(0, 1, 2), Position(1), Position(2, 1, 5)], ids=str)
def test_interrupted_fleet_with_a_reference_equals_one_that_was_not(method, position, tmp_path):
    stream = STREAMS["classes"]
    specs = specs_for(method, stream, (0.03, 3.0))
    with pytest.raises(StopError):
        Fleet(specs, stream).run(StopAt(tmp_path / "fleet", position))
    expected = final(Fleet(specs, stream))
    for own in (specs, specs[1:3]):  # a checkpoint may have more runs than are continued
        resumed = Fleet(own, stream)
        checkpoint.restore(resumed, tmp_path / "fleet")
        order = [spec for s in resumed.specs for spec in resumed.strength_groups.get(s.key, [s])]
        resumed.run()
        for row, spec in enumerate(order):
            torch.testing.assert_close(resumed.stack.network_of(row).state_dict(), expected[spec.key], rtol=0, atol=0)


def test_diverging_run_leaves_the_others_as_they_are():
    stream = STREAMS["classes"]
    specs = specs_for("budget-distil", stream, (0.03,))
    bad = replace(specs[0], seed=1, lr=1e308)
    results = {result.spec.seed: result for result in Fleet([*specs, bad], stream).run()}
    assert {seed: result.status for seed, result in results.items()} == {0: "finished", 1: "unstable", 2: "finished"}
    for alone in Fleet(specs, stream).run():
        together = results[alone.spec.seed]
        assert together.matrix == alone.matrix
        assert together.losses == [pytest.approx(row, rel=1e-9) for row in alone.losses]


def test_budget_that_moving_statistics_exceed_is_reported():
    stream = STREAMS["classes"]
    specs = specs_for("budget-measured", stream, (0.0,), network="fixtures.tiny_network:tiny")
    with pytest.warns(UnheldWarning, match="cannot be kept: at the anchor itself"):
        Fleet(specs, stream).run()


def test_memory_of_less_than_a_sample_for_each_task_is_refused_in_one_line():
    stream = STREAMS["classes"]
    with pytest.raises(MooringError, match="memory of 1 is less than one sample for each of 2 past tasks") as refused:
        Fleet(specs_for("distil", stream, (1.0,), memory=1), stream)
    assert "\n" not in str(refused.value)


def test_pull_without_a_budget_is_refused_in_one_line(own_method):
    name = own_method(
        mooring.Penalty, importance=lambda seed: mooring.EWC(), plugin=ReferenceOptions(measures=True), memory=MEMORY
    )
    with pytest.raises(MooringError, match="measures on a reference, and Penalty has no budget to keep") as refused:
        Fleet(specs_for(name, STREAMS["classes"], (1.0,)), STREAMS["classes"])
    assert "\n" not in str(refused.value)
