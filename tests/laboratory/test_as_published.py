"""Methods as the paper's public code defines them equal a plain PyTorch loop, written from DESIGN section 17."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import mooring
from laboratory.small import class_stream, growing_stream, spec_for
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.methods import METHODS, find_method
from mooring_lab.model.order import seeded_generator, task_order
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks import backbone_factory
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels

EXACT = {"rtol": 1e-9, "atol": 1e-9}
NAMES = ("ewc", "mas", "si", "rwalk")
STRENGTHS = {"ewc": 300.0, "mas": 1e-3, "si": 1e-7, "rwalk": 1e-7}
"""Mild ones: the importances of SI and RWalk are large with their damping."""

PENALTIES = [f"{name}-as-published" for name in NAMES]
EXPLICIT = [f"explicit-{name}" for name in PENALTIES]
STREAM = class_stream(tasks=4, images=70)
"""Four tasks of two epochs of 7 steps: 56 steps."""


def run_spec(method: str, seed: int = 3, **options) -> RunSpec:
    options = {"network": "laboratory.test_as_published:convolutional", "memory": None, **options}
    if method.startswith(("er", "a-gem")):
        options["memory"] = 25
    elif find_method(method).has_strength:
        options["strength"] = STRENGTHS[method.partition("-")[0]]
    return spec_for(method, STREAM, seed, **options)


def convolutional(shape: tuple[int, int, int]) -> torch.nn.Module:
    """Units that stay at 0 have weights that never mattered; normalization makes a second pass visible in buffers."""
    nn = torch.nn
    first, norm = nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4)
    nn.init.constant_(norm.bias, -1.0)
    norm.bias.data[0] = -50.0
    return nn.Sequential(first, norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 12), nn.ReLU())


class RegularizedByHand:
    """The authors' `online_reg_train` and `online_explicit_train`."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.explicit = spec.method.startswith("explicit-")
        self.kind = spec.method.removeprefix("explicit-").partition("-")[0]
        self.model = initial_network(spec.network, STREAM, spec.seed, dtype=torch.float64)
        self.named = {name: p for name, p in self.model.named_parameters() if name.startswith("backbone.")}
        self.path, self.fisher, self.saliency = self.zeros(), self.zeros(), self.zeros()
        self.previous = self.values()
        self.returned = 0

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) for name, p in self.named.items()}

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named.items()}

    def train(self) -> "RegularizedByHand":
        for number, task in enumerate(STREAM.tasks):
            if number:
                self.model.inherit(number, number - 1)
            optimizer = torch.optim.SGD(self.model.parameters(), lr=self.spec.lr, momentum=self.spec.momentum)
            for epoch in range(self.spec.epochs):
                self.start = self.values()
                for batch in task_order(self.spec.seed, number, epoch, task.train).split(self.spec.batch):
                    self.step(batch, number, optimizer)
            self.saliency = {name: (self.saliency[name] + self.score(name)) / 2 for name in self.named}
            self.path, self.previous = self.zeros(), self.values()
        return self

    def step(self, batch: Tensor, number: int, optimizer: torch.optim.Optimizer) -> None:
        x = normalize_pixels(STREAM.train.images[batch], torch.float64)
        optimizer.zero_grad()
        loss = cross_entropy(self.model(x, number), STREAM.train.labels[batch])
        if number and not self.explicit:
            for name, p in self.named.items():
                loss = loss + self.spec.strength * (self.saliency[name] * (p - self.previous[name]) ** 2).sum()
        loss.backward()
        optimizer.step()
        if self.kind == "mas":  # on top of the gradient that is there
            self.model(x, number).norm().pow(2).backward()
        with torch.no_grad():
            self.update()
            if number and self.explicit:
                self.interpolate()

    def update(self) -> None:
        for name, p in self.named.items():
            score = {
                "ewc": lambda p=p: p.grad**2,
                "mas": lambda p=p: p.grad.abs(),
                "si": lambda p=p, name=name: torch.relu(p.grad * (p - self.start[name])),
                "rwalk": lambda p=p, name=name: torch.relu(p.grad * (p - self.start[name])),
            }[self.kind]()
            self.path[name] = 0.8 * score + 0.2 * self.path[name]
            self.fisher[name] = 0.8 * (p.grad * p) ** 2 + 0.2 * self.fisher[name]

    def score(self, name: str) -> Tensor:
        squared = (self.named[name].detach() - self.previous[name]) ** 2
        if self.kind == "si":
            return self.path[name] / (squared + 1e-10)
        if self.kind == "rwalk":
            return self.fisher[name] + self.path[name] / (self.fisher[name] * squared + 1e-10)
        return self.path[name]

    def interpolate(self) -> None:
        for name, p in self.named.items():
            current, previous = self.score(name).sqrt(), self.saliency[name].sqrt()
            kept = current / (current + previous + 1e-20)
            self.returned += int(((current == 0) & (previous == 0) & (p != self.previous[name])).sum())
            p.copy_(kept * p + (1 - kept) * self.previous[name])


def trained(spec: RunSpec, **options) -> dict[str, Tensor]:
    fleet = Fleet([spec], STREAM, **options)
    (result,) = fleet.run()
    assert result.status == "finished"
    return fleet.stack.network_of(0).state_dict()


@pytest.mark.parametrize("method", [*PENALTIES, *EXPLICIT])
def test_regularizers_as_published_equal_the_authors_loop(method: str) -> None:
    hand = RegularizedByHand(run_spec(method)).train()
    torch.testing.assert_close(trained(run_spec(method)), hand.model.state_dict(), **EXACT)


@pytest.mark.parametrize("method", [*PENALTIES, *EXPLICIT])
def test_definitions_as_published_differ_from_the_textbooks_but_for_the_explicit_step_with_ewc(method: str) -> None:
    """Without weight decay, a weight moves only after a gradient, and then EWC's score is not 0."""
    spec = run_spec(method)
    textbook = trained(run_spec(method.removesuffix("-as-published"), strength=spec.strength))
    same = all(torch.allclose(textbook[name], p, **EXACT) for name, p in trained(spec).items())
    assert same == (method == "explicit-ewc-as-published")


def replay_order(seed: int, offered: list[list[int]], capacity: int) -> list[int | None]:
    """The slots after these tasks."""
    slots: list[int | None] = [None] * capacity
    for number, samples in enumerate(offered, 1):
        order = torch.randperm(capacity, generator=seeded_generator(seed, "slots", number)).tolist()
        for slot, sample in zip(order[: capacity // number], samples, strict=False):
            slots[slot] = sample
    return slots


def slices(seed: int, slots: list[int | None], batch: int, first: int) -> Iterator[Tensor]:
    """Slices of neighbouring filled slots, one for each step."""
    filled = torch.tensor([sample for sample in slots if sample is not None])
    for number in range(first, 10**6):
        start = torch.randint(max(1, len(filled) - batch), (), generator=seeded_generator(seed, "slice", number))
        yield filled[(start + torch.arange(batch)) % len(filled)]


class ReplayedByHand:
    """The authors' `er_reservoir_train` and `agem_train`, with every slot filled and A-GEM's biases in their place."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.agem = spec, spec.method.startswith("a-gem")
        self.model = initial_network(spec.network, STREAM, spec.seed, dtype=torch.float64)
        self.owner = {int(i): number for number, task in enumerate(STREAM.tasks) for i in task.train}
        self.steps = self.projected = 0

    def train(self) -> "ReplayedByHand":
        spec, offered, drawn = self.spec, list[list[int]](), 0
        for number, task in enumerate(STREAM.tasks):
            optimizer = torch.optim.SGD(self.model.parameters(), lr=spec.lr, momentum=spec.momentum)
            drawing = slices(spec.seed, replay_order(spec.seed, offered, spec.memory or 0), spec.batch, drawn + 1)
            for epoch in range(spec.epochs):
                for batch in task_order(spec.seed, number, epoch, task.train).split(spec.batch):
                    old = next(drawing) if number else None
                    drawn += old is not None
                    if self.agem:
                        self.agem_step(batch, old, optimizer)
                    else:
                        for part in (batch,) if old is None else (old, batch):
                            optimizer.zero_grad()
                            self.loss(part).backward()
                            self.step(optimizer)
            offered.append(task_order(spec.seed, number, 0, task.train).tolist())
        return self

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self.steps += 1

    def loss(self, indices: Tensor) -> Tensor:
        heads = torch.tensor([self.owner[int(i)] for i in indices])
        x = normalize_pixels(STREAM.train.images[indices], torch.float64)
        return cross_entropy(self.model(x, heads), STREAM.train.labels[indices])

    def agem_step(self, batch: Tensor, old: Tensor | None, optimizer: torch.optim.Optimizer) -> None:
        reference = {}
        optimizer.zero_grad()
        self.loss(batch).backward()  # the fleet's order; the passes change running statistics alone
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        if old is not None:
            optimizer.zero_grad()
            self.loss(old).backward()
            reference = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        product = sum(float((g * reference[name]).sum()) for name, g in gradients.items() if name in reference)
        norm = sum(float(r.square().sum()) for r in reference.values())
        for name, p in self.model.named_parameters():
            p.grad = gradients.get(name)
            if product < 0 and name.startswith("backbone."):
                p.grad = gradients[name] - product / norm * reference[name]
        self.projected += product < 0
        self.step(optimizer)


@pytest.mark.parametrize("method", ["er-as-published", "a-gem-as-published"])
def test_replay_as_published_equals_the_authors_loop(method: str) -> None:
    spec = run_spec(method)
    hand = ReplayedByHand(spec).train()
    assert hand.steps >= 50
    assert hand.projected > 0 or not hand.agem
    torch.testing.assert_close(trained(spec), hand.model.state_dict(), **EXACT)


def test_weights_that_never_mattered_are_among_those_that_the_loop_returns() -> None:
    assert RegularizedByHand(run_spec("explicit-si-as-published")).train().returned > 0


@pytest.mark.parametrize("methods", [PENALTIES, EXPLICIT, ["er-as-published"], ["a-gem-as-published"]])
def test_a_run_as_published_alone_equals_the_run_in_a_fleet(methods: list[str]) -> None:
    late = [method for method in methods if method.removeprefix("explicit-").startswith("mas")]
    for group in filter(None, (late, [method for method in methods if method not in late])):
        specs = [run_spec(method, seed) for method in group for seed in (0, 1)]
        fleet = Fleet(specs, STREAM)
        order = list(fleet.specs)
        fleet.run()
        for row, spec in enumerate(order):
            torch.testing.assert_close(fleet.stack.network_of(row).state_dict(), trained(spec), **EXACT)


class _SavedAt:
    """Saves a fleet after a number of steps."""

    def __init__(self, path, step: int) -> None:
        self.path, self.step = path, step

    def on_step(self, fleet: Fleet) -> None:
        if fleet.steps == self.step:
            checkpoint.save(fleet, self.path)

    def on_task_end(self, fleet: Fleet) -> None:
        pass


@pytest.mark.parametrize("step", [24, 28, 31])  # within the first epoch of the second task, at its end, in the next one
@pytest.mark.parametrize("method", ["rwalk-as-published", "explicit-mas-as-published", "er-as-published"])
def test_a_run_as_published_continues_from_a_checkpoint_bit_for_bit(method: str, step: int, tmp_path) -> None:
    spec, path = run_spec(method), tmp_path / "fleet"
    whole = Fleet([spec], STREAM)
    whole.run(_SavedAt(path, step))
    resumed = Fleet([spec], STREAM)
    checkpoint.restore(resumed, path)
    resumed.run()
    ours, theirs = (fleet.stack.network_of(0).state_dict() for fleet in (resumed, whole))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


# Single facts of the code


def test_weights_decay_in_the_first_task_alone() -> None:
    """Together with runs that never decay and that always do, whose first task is the same or another."""
    own = run_spec("explicit-ewc-decays-first", lr=0.03)
    others = [run_spec("explicit-ewc", lr=0.03), run_spec("plain", lr=0.03, weight_decay=1e-4)]
    fleet = Fleet([own, *others], STREAM)
    order = list(fleet.specs)
    fleet.run()
    model = initial_network(own.network, STREAM, own.seed, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=own.lr, momentum=own.momentum)
    moor = mooring.attach(model, optimizer, exclude="heads")
    for number, task in enumerate(STREAM.tasks):
        if number:
            model.inherit(number, number - 1)
        optimizer.state.clear()
        optimizer.param_groups[0]["weight_decay"] = 0.0 if number else 1e-4
        for epoch in range(own.epochs):
            for batch in task_order(own.seed, number, epoch, task.train).split(own.batch):
                optimizer.zero_grad()
                x = normalize_pixels(STREAM.train.images[batch], torch.float64)
                cross_entropy(model(x, number), STREAM.train.labels[batch]).backward()
                optimizer.step()
        moor.consolidate()
    state = fleet.stack.network_of(order.index(own)).state_dict()
    torch.testing.assert_close(state, model.state_dict(), **EXACT)
    for spec in others:
        alone = fleet.stack.network_of(order.index(spec)).state_dict()
        torch.testing.assert_close(alone, trained(spec), **EXACT)
        assert any(not torch.allclose(alone[name], state[name], **EXACT) for name in state)


def test_unrestored_biases_change_what_is_scored_and_nothing_else() -> None:
    spec, textbook = (run_spec(name, memory=25) for name in ("er-unrestored", "er"))
    fleet = Fleet([spec], STREAM)
    (result,), (other,) = fleet.run(), Fleet([textbook], STREAM).run()
    network, last = fleet.stack.network_of(0), len(STREAM.tasks) - 1
    torch.testing.assert_close(network.state_dict(), trained(textbook), rtol=0, atol=0)
    bias = network.backbone[0].bias
    random = torch.rand(4, generator=seeded_generator(spec.seed, "bias backbone.0.bias", last))
    bias.data = (2 * random.double() - 1) / 9**0.5  # torch's, with 9 inputs
    network.eval()
    for number, task in enumerate(STREAM.tasks):
        logits = network(normalize_pixels(STREAM.test.images[task.test], torch.float64), number)
        correct = (logits.argmax(-1) == STREAM.test.labels[task.test]).double().mean()
        assert result.matrix[last][number] == pytest.approx(100 * float(correct))
    assert result.matrix != other.matrix


@pytest.mark.parametrize("name", ["si", "explicit-si", "rwalk", "explicit-rwalk"])
def test_damping_of_the_code_is_the_only_change(name: str) -> None:
    textbook, damped = (find_method(f"{name}{suffix}") for suffix in ("", "-damping-1e-10"))
    assert damped.importance(0) == replace(textbook.importance(0), damping=1e-10)
    assert damped.pull(3.0) == textbook.pull(3.0)


def test_resnet_of_the_code_has_its_widths() -> None:
    widths = [block.conv1.out_channels for block in backbone_factory("resnet18-quarter")((3, 32, 32)).blocks[::2]]
    assert widths == [16, 32, 64, 128]


def test_variants_are_named_but_not_listed() -> None:
    assert not [name for name in METHODS if "as-published" in name]
    assert all(find_method(name).group == "variants" for name in (*PENALTIES, *EXPLICIT, "er-as-published"))


def test_replay_as_published_runs_with_a_growing_head() -> None:
    stream = growing_stream()
    spec = spec_for("er-as-published", stream, memory=20, epochs=1)
    (result,) = Fleet([spec], stream).run()
    assert result.status == "finished"
