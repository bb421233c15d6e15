"""LwF and DER++ in fleets: equal to plain loops over one network, alone or together, and continued to the bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, mse_loss

from laboratory.small import (
    class_stream,
    domain_stream,
    growing_stream,
    optimizer_by_hand,
    scheduler_by_hand,
    spec_for,
)
from laboratory.test_replay import ListMemory
from mooring.errors import MooringError
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.grouping import strength_groups
from mooring_lab.fleet.replay_memory import Reservoir
from mooring_lab.methods import find_method
from mooring_lab.methods.der.dark_experience import LABEL_WEIGHT, SlotReservoir, der_loss
from mooring_lab.model.method import Method, ReplayOptions
from mooring_lab.model.order import seeded_generator, task_order
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels

STREAMS = {"classes": class_stream(), "domains": domain_stream()}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
HERE = "laboratory.test_functional"
NETWORKS = ["mlp", f"{HERE}:normalised", f"{HERE}:doubling"]


def normalised(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())


class Double(nn.Module):
    """A layer that fleets do not know, so that they run by vmap."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def doubling(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), Double(), nn.Tanh())


class Loop:
    """A plain PyTorch loop over one network."""

    def __init__(self, spec, stream) -> None:
        self.spec, self.stream = spec, stream
        self.model = initial_network(spec.network, stream, spec.seed, dtype=torch.float64)

    def train(self) -> "Loop":
        spec, stream = self.spec, self.stream
        for number, task in enumerate(stream.tasks):
            self.begin_task()
            if number and stream.heads == "per task":
                self.model.inherit(number, number - 1)
            optimizer = optimizer_by_hand(spec, self.model.parameters())
            scheduler = scheduler_by_hand(spec, optimizer, len(task.train.split(spec.batch)))
            for epoch in range(spec.epochs):
                for batch in task_order(spec.seed, number, epoch, task.train).split(spec.batch):
                    optimizer.zero_grad()
                    self.loss(batch, number).backward()
                    optimizer.step()
                    scheduler.step()
                    self.after_step(batch)
        return self

    def begin_task(self) -> None:
        pass

    def after_step(self, batch: torch.Tensor) -> None:
        pass

    def images(self, indices) -> torch.Tensor:
        return normalize_pixels(self.stream.train.images[indices], torch.float64)


class LwFLoop(Loop):
    """The task's loss plus T = 2 distillation from a frozen copy of the model, for every old head."""

    def begin_task(self) -> None:
        self.teacher = copy.deepcopy(self.model).eval()

    def loss(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        features = self.model.train().backbone(self.images(batch))
        loss = cross_entropy(self.model.heads[self.stream.head(number)](features), self.stream.train.labels[batch])
        for head in {self.stream.head(task) for task in range(number)}:
            old = (self.teacher(self.images(batch), head) / 2).log_softmax(-1).detach()
            new = (self.model.heads[head](features) / 2).log_softmax(-1)
            loss = loss + self.spec.strength * kl_div(new, old, reduction="batchmean", log_target=True)
        return loss


class DerLoop(Loop):
    """A list of samples, each with the outputs that the model had when it was stored."""

    def __init__(self, spec, stream) -> None:
        super().__init__(spec, stream)
        self.memory = ListMemory(spec.seed, spec.memory)
        self.owner = {int(i): number for number, task in enumerate(stream.tasks) for i in task.train}

    def loss(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        logits = self.model.train()(self.images(batch), self.stream.head(number))
        self.latest = logits.detach()
        loss = cross_entropy(logits, self.stream.train.labels[batch])
        if self.memory.kept:
            first, second = (self.draw(len(batch)) for _ in range(2))
            loss = loss + self.spec.strength * mse_loss(self.replayed(first), torch.stack([z for _, z in first]))
            labels = self.stream.train.labels[[index for index, _ in second]]
            loss = loss + LABEL_WEIGHT * cross_entropy(self.replayed(second), labels)
        return loss

    def draw(self, count: int) -> list[tuple[int, torch.Tensor]]:
        self.memory.samples += 1
        random = seeded_generator(self.spec.seed, "replay", self.memory.samples)
        return [self.memory.kept[i] for i in torch.randperm(len(self.memory.kept), generator=random)[:count]]

    def replayed(self, drawn: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        indices = [index for index, _ in drawn]
        heads = torch.tensor([self.stream.head(self.owner[index]) for index in indices])
        return self.model(self.images(indices), heads)

    def after_step(self, batch: torch.Tensor) -> None:
        self.memory.offer(list(zip(batch.tolist(), self.latest, strict=True)))


LOOPS = {"lwf": LwFLoop, "der++": DerLoop}


def trained(specs, stream) -> dict[str, dict[str, torch.Tensor]]:
    fleet = Fleet(specs, stream)
    order = [spec for group in fleet.strength_groups.values() for spec in group]
    fleet.run()
    return {spec.key: fleet.stack.network_of(row).state_dict() for row, spec in enumerate(order)}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", LOOPS)
def test_fleet_equals_a_plain_loop(method, kind, network):
    stream = STREAMS[kind]
    settings = {"network": network, "memory": 25 if method == "der++" else None, "weight_decay": 0.01}
    specs = [
        spec_for(method, stream, seed, lr=0.02 * (seed + 1), strength=strength, **settings)
        for seed in (0, 2)
        for strength in (0.1, 2.0)
    ]
    weights = trained(specs, stream)
    for spec in specs:
        torch.testing.assert_close(weights[spec.key], LOOPS[method](spec, stream).train().model.state_dict(), **EXACT)


@pytest.mark.parametrize("memory", [5, 500], ids=["less than a batch", "more than everything"])
def test_der_with_any_memory_equals_a_plain_loop(memory):
    spec = spec_for("der++", STREAMS["classes"], 1, strength=0.5, memory=memory)
    expected = DerLoop(spec, STREAMS["classes"]).train().model.state_dict()
    torch.testing.assert_close(trained([spec], STREAMS["classes"])[spec.key], expected, **EXACT)


@pytest.mark.parametrize("method", LOOPS)
def test_strength_0_of_lwf_is_plain_and_of_der_is_not(method):
    stream = STREAMS["classes"]
    spec, plain = spec_for(method, stream, 1, strength=0.0), spec_for("plain", stream, 1)
    ours, theirs = trained([spec], stream)[spec.key], trained([plain], stream)[plain.key]
    same = [torch.allclose(ours[name], theirs[name], **EXACT) for name in ours]
    assert all(same) == (method == "lwf")  # DER++ replays labels too


def test_strength_of_der_acts_in_the_first_task_and_that_of_lwf_does_not():
    groups = {name: [spec_for(name, STREAMS["classes"], 0, strength=s) for s in (0.1, 1.0)] for name in LOOPS}
    assert {name: len(strength_groups(specs)) for name, specs in groups.items()} == {"lwf": 1, "der++": 2}


def test_diverging_run_leaves_the_others_as_they_are():
    for method in LOOPS:
        stream = STREAMS["classes"]
        good, bad = spec_for(method, stream, 0), spec_for(method, stream, 1, lr=1e200)
        statuses = {result.spec.seed: result.status for result in Fleet([bad, good], stream).run()}
        assert statuses == {0: "finished", 1: "unstable"}
        matrix = {r.spec.seed: r.matrix for r in Fleet([bad, good], stream).run()}[0]
        assert matrix == Fleet([good], stream).run()[0].matrix


def test_slots_say_where_each_sample_is_kept():
    ours, plain = SlotReservoir([3, 5], 4), Reservoir([3, 5], 4)
    order = torch.stack([torch.arange(40), torch.arange(100, 140)])
    where = torch.full((2, 4 + 5), -1)
    for batch, step in zip(order.split(5, 1), ours.plan_slots(order, [5] * 8), strict=True):
        drawn = (step.shape[1] - 5) // 3
        first, second, slots, places = step.split([drawn, drawn, drawn, 5], 1)
        assert torch.equal(where.gather(1, slots), first)  # as the device finds them
        assert set(second.flatten().tolist()) <= set(where[:, :4].flatten().tolist())
        assert all(len(set(row)) == 5 for row in places.tolist())  # no slot is written twice in a step
        where.scatter_(1, places, batch)
        plain.offer(batch)
        assert torch.equal(where[:, : len(plain)], plain.kept[:, : len(plain)])


def test_outputs_that_a_head_did_not_have_when_they_were_stored_do_not_count():
    random = torch.Generator().manual_seed(0)
    now, early, late = (torch.randn(1, 2, 5, generator=random, dtype=torch.float64) for _ in range(3))
    stream = growing_stream()
    dark = Fleet([spec_for("der++", stream, strength=0.5, memory=4, batch=2)], stream).learner
    dark.store(torch.tensor([[2, 0]]), early[..., :3])
    dark.store(torch.tensor([[1, 4]]), late)
    logits = now.clone().requires_grad_()
    loss = der_loss(logits, dark.stored(torch.tensor([[0, 1]])), torch.zeros(1).double(), dark.alpha)
    errors = torch.cat([now[0, 0, :3] - early[0, 1, :3], now[0, 1] - late[0, 0]])
    torch.testing.assert_close(loss, 0.5 * errors.square().mean()[None], **EXACT)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient[0, 0, 3:].tolist() == [0.0, 0.0]


def test_lwf_keeps_no_data_and_der_does():
    assert find_method("lwf").memory is None
    assert find_method("lwf").plugin.temperature == 2.0
    assert find_method("der++").memory == 500


def test_strength_without_outputs_to_hold_is_refused_in_one_line():
    with pytest.raises(MooringError, match="it would pull nothing") as refused:
        Method("mine", "a method of my own", strength=1.0, plugin=ReplayOptions(), memory=5)
    assert "\n" not in str(refused.value)
