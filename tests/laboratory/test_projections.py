"""Projections of gradients and of weights in fleets: equal to loops by hand, resumed to the bit, and refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, unfold

from laboratory.small import class_stream, domain_stream, optimizer_by_hand, scheduler_by_hand, spec_for
from laboratory.test_reference_methods import StopAt, StopError
from mooring.errors import MooringError
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet, Position
from mooring_lab.fleet.replay_memory import Reservoir
from mooring_lab.methods import find_method, projections
from mooring_lab.model.order import task_order
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.study.comparison import comparison

STREAMS = {"classes": class_stream(images=40), "domains": domain_stream(images=40)}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
SMALL, CONVOLVING = "laboratory.test_projections:small", "laboratory.test_projections:convolving"
STRENGTHS = {"gpm": (0.01, 0.2), "nscl": (30.0, 1e4), "owm": (0.01, 1.0), "ftp": (0.003, 0.05), "tpgm": (0.003, 0.05)}
GRADIENTS = ("gpm", "nscl", "owm")


def small(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], 12), nn.Tanh())


def convolving(shape: tuple[int, int, int]) -> nn.Module:
    """A network with every kind of layer that a projection treats differently."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
    )


class HandGPM:
    """The algorithm of the paper: a basis for each layer, from singular value decompositions."""

    samples = 300

    def __init__(self, share: float) -> None:
        self.threshold, self.basis = 1 - share, None

    def end_task(self, inputs: torch.Tensor) -> None:
        rows = inputs.T
        basis = rows.new_zeros(len(rows), 0) if self.basis is None else self.basis
        total, residual = rows.square().sum(), rows - basis @ (basis.T @ rows)
        left, singular, _ = torch.linalg.svd(residual, full_matrices=False)
        kept, added = total - residual.square().sum(), 0
        while kept < self.threshold * total:
            kept, added = kept + singular[added].square(), added + 1
        self.basis = torch.cat([basis, left[:, :added]], 1)

    def project(self, g: torch.Tensor) -> torch.Tensor:
        return g if self.basis is None else g - g @ self.basis @ self.basis.T


class HandNSCL:
    """The running covariance of features, and its null space from a singular value decomposition."""

    samples = None

    def __init__(self, ratio: float) -> None:
        self.ratio, self.covariance, self.seen, self.null = ratio, 0.0, 0, None

    def end_task(self, inputs: torch.Tensor) -> None:
        own, count = inputs.T @ inputs / len(inputs), len(inputs)
        self.covariance = (self.seen * self.covariance + count * own) / (self.seen + count)
        self.seen += count
        left, singular, _ = torch.linalg.svd(self.covariance)
        smallest = singular[singular > 1e-13 * singular[0]].min()
        self.null = left[:, singular <= max(self.ratio, 1e-9) * smallest]

    def project(self, g: torch.Tensor) -> torch.Tensor:
        return g if self.null is None else g @ self.null @ self.null.T


class HandOWM:
    """The recursion of the paper, one input after the other."""

    samples = None

    def __init__(self, alpha: float) -> None:
        self.alpha, self.matrix = alpha, None

    def end_task(self, inputs: torch.Tensor, samples: int) -> None:
        p = torch.eye(inputs.shape[1], dtype=inputs.dtype) if self.matrix is None else self.matrix
        for x in inputs:
            k = p @ x / (self.alpha * samples + x @ p @ x)
            p = p - torch.outer(k, x @ p)
        self.matrix = p

    def project(self, g: torch.Tensor) -> torch.Tensor:
        return g if self.matrix is None else g @ self.matrix


HANDS = {"gpm": HandGPM, "nscl": HandNSCL, "owm": HandOWM}


class Loop:
    """A plain loop over one network, as the papers describe it."""

    def __init__(self, spec, stream) -> None:
        self.spec, self.stream = spec, stream
        self.model = initial_network(spec.network, stream, spec.seed, dtype=torch.float64)
        self.optimizer = optimizer_by_hand(spec, self.model.parameters())
        self.ended = False

    def protected(self) -> dict[str, nn.Parameter]:
        one_head = self.stream.heads == "one"
        return {n: p for n, p in self.model.named_parameters() if one_head or not n.startswith("heads")}

    def train(self) -> nn.Module:
        for number, task in enumerate(self.stream.tasks):
            if number and self.stream.heads == "per task":
                self.model.inherit(number, number - 1)
            self.optimizer.state.clear()
            scheduler = scheduler_by_hand(self.spec, self.optimizer, len(task.train.split(self.spec.batch)))
            for epoch in range(self.spec.epochs):
                order = task_order(self.spec.seed, number, epoch, task.train)
                for batch, replayed in self.batches(order):
                    self.optimizer.zero_grad()
                    loss = cross_entropy(self.outputs(batch, number), self.stream.train.labels[batch])
                    loss.backward()
                    self.step(batch, replayed)
                    scheduler.step()
            self.end_task(number, task_order(self.spec.seed, number, 0, task.train))
            self.ended = True
        return self.model

    def batches(self, order):
        return [(batch, None) for batch in order.split(self.spec.batch)]

    def outputs(self, batch, number):
        x = normalize_pixels(self.stream.train.images[batch], torch.float64)
        return self.model.train()(x, self.stream.head(number))


class GradientLoop(Loop):
    """Every layer's weight and bias as one matrix, whose gradient is projected."""

    def __init__(self, spec, stream) -> None:
        super().__init__(spec, stream)
        self.hands, self.inputs = {}, {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d) and f"{name}.weight" in self.protected():
                groups = getattr(layer, "groups", 1)
                self.hands[name] = [HANDS[spec.method](spec.strength) for _ in range(groups)]
                layer.register_forward_pre_hook(lambda layer, args, name=name: self.inputs.update({name: args[0]}))

    def step(self, batch, replayed) -> None:
        layers = dict(self.model.named_modules())
        covered = [p for name in self.hands for p in layers[name].parameters()]
        for p in self.protected().values():
            if self.ended and not any(p is other for other in covered):
                p.grad.zero_()
        for name, hands in self.hands.items():
            layer = layers[name]
            gradients = [p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None] for p in layer.parameters()]
            parts = torch.cat(gradients, 1).chunk(len(hands))
            projected = torch.cat([hand.project(g) for hand, g in zip(hands, parts, strict=True)])
            for p, g in zip(layer.parameters(), projected.split([own.shape[1] for own in gradients], 1), strict=True):
                p.grad = g.reshape(p.shape)
        self.optimizer.step()

    def end_task(self, number: int, order: torch.Tensor) -> None:
        layers = dict(self.model.named_modules())
        samples = next(iter(self.hands.values()))[0].samples
        x = normalize_pixels(self.stream.train.images[order[:samples]], torch.float64)
        with torch.no_grad():
            self.model.eval()(x, self.stream.head(number))
        for name, hands in self.hands.items():
            layer, a = layers[name], self.inputs[name]
            if isinstance(layer, nn.Conv2d):
                a = unfold(a, layer.kernel_size, stride=layer.stride).mT
            for hand, rows in zip(hands, a.flatten(0, -2).chunk(len(hands), 1), strict=True):
                if layer.bias is not None:
                    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
                extra = (len(x),) if isinstance(hand, HandOWM) else ()
                hand.end_task(rows.double(), *extra)


class RadiusLoop(Loop):
    """A radius for each parameter, learned by torch's Adam from autograd through the projection."""

    def __init__(self, spec, stream) -> None:
        super().__init__(spec, stream)
        self.memory = Reservoir([spec.seed], spec.memory or 1)
        self.anchors, self.moved, self.radii, self.adam = {}, {}, {}, None

    def batches(self, order):
        batches = order.split(self.spec.batch)
        if not self.spec.memory or not self.ended:
            return [(batch, None) for batch in batches]
        return [(batch, self.memory.sample(len(batch))[0]) for batch in batches]

    def projected(self, name: str) -> torch.Tensor:
        """The projection of the moved parameter, as a function of the radius."""
        anchor, moved = self.anchors[name], self.moved[name]
        distance = moved - anchor
        rows = distance.abs().flatten(1).sum(1).view(-1, *[1] * (distance.ndim - 1)) if distance.ndim > 1 else None
        norms = distance.abs() if rows is None else rows
        ratio = torch.where(norms > self.radii[name], self.radii[name] / norms.clamp(min=1e-300), 1.0)
        return anchor + ratio * distance

    def learn(self, gradients: dict[str, torch.Tensor]) -> None:
        """Step on the radii: the product of the gradient at the projected weights with the projection's derivative."""
        for name, radius in self.radii.items():
            if name in gradients:
                (radius.grad,) = torch.autograd.grad(
                    (gradients[name] * self.projected(name)).sum(), radius, allow_unused=True, materialize_grads=True
                )
        self.adam.step()
        with torch.no_grad():
            for radius in self.radii.values():
                radius.clamp_(min=1e-8)

    def place(self) -> None:
        with torch.no_grad():
            for name, p in self.protected().items():
                p.copy_(self.projected(name))

    def step(self, batch, replayed) -> None:
        if self.ended and self.spec.method == "ftp":
            self.learn({name: p.grad.clone() for name, p in self.protected().items()})
        self.optimizer.step()
        if not self.ended:
            return
        self.moved = {name: p.detach().clone() for name, p in self.protected().items()}
        self.place()
        if self.spec.method == "tpgm":
            seen = torch.cat([batch, replayed])
            x = normalize_pixels(self.stream.train.images[seen], torch.float64)
            heads = torch.tensor([self.stream.head(self.task_of(int(index))) for index in seen])
            loss = cross_entropy(self.model.eval()(x, heads), self.stream.train.labels[seen])
            named = self.protected()
            self.learn(dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)))
            self.place()

    def task_of(self, index: int) -> int:
        return next(n for n, task in enumerate(self.stream.tasks) if index in task.train.tolist())

    def end_task(self, number: int, order: torch.Tensor) -> None:
        self.memory.offer(order[None])
        self.anchors = {name: p.detach().clone() for name, p in self.protected().items()}
        self.moved = dict(self.anchors)
        self.radii = {name: nn.Parameter(torch.tensor(1e-8, dtype=torch.float64)) for name in self.anchors}
        self.adam = torch.optim.Adam(self.radii.values(), lr=self.spec.strength)


def by_hand(spec, stream) -> dict[str, torch.Tensor]:
    loop = GradientLoop if spec.method in GRADIENTS else RadiusLoop
    return loop(spec, stream).train().state_dict()


def specs_for(method: str, stream, **settings):
    settings = {"lr": 0.05, "batch": 8, "epochs": 2, "network": SMALL, **settings}
    return [spec_for(method, stream, seed, strength=s, **settings) for seed in (0, 2) for s in STRENGTHS[method]]


def final(fleet: Fleet) -> dict[str, dict[str, torch.Tensor]]:
    order = [spec for s in fleet.specs for spec in fleet.strength_groups.get(s.key, [s])]
    fleet.run()
    return {spec.key: fleet.stack.network_of(row).state_dict() for row, spec in enumerate(order)}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", STRENGTHS)
def test_projection_in_a_fleet_equals_a_loop_by_hand(method, kind):
    stream = STREAMS[kind]
    specs = specs_for(method, stream)
    weights = final(Fleet(specs, stream))
    plain = final(Fleet([replace(specs[0], method="plain", strength=None, memory=None)], stream))
    for spec in specs:
        torch.testing.assert_close(weights[spec.key], by_hand(spec, stream), **EXACT)
    (unprotected,), name = plain.values(), "backbone.1.weight"
    distances = [float((weights[spec.key][name] - unprotected[name]).norm()) for spec in specs[:2]]
    assert min(distances) > 1e-3
    assert abs(distances[0] - distances[1]) > 1e-3  # the strength matters


@pytest.mark.parametrize("method", STRENGTHS)
def test_projection_of_groups_strides_and_normalizations_equals_a_loop_by_hand(method):
    stream = STREAMS["classes"]
    specs = specs_for(method, stream, network=CONVOLVING)
    weights = final(Fleet(specs, stream))
    torch.testing.assert_close(weights[specs[1].key], by_hand(specs[1], stream), **EXACT)


def test_every_method_that_projects_is_compared_with_a_loop():
    assert {method.name for method in projections.METHODS} == set(STRENGTHS) == set(GOLDEN)


@pytest.mark.parametrize("method", STRENGTHS)
@pytest.mark.parametrize("position", [Position(0, 1, 2), Position(1), Position(2, 1, 3)], ids=str)
def test_interrupted_fleet_that_projects_equals_one_that_was_not(method, position, tmp_path):
    stream = STREAMS["domains"]
    specs = specs_for(method, stream)
    with pytest.raises(StopError):
        Fleet(specs, stream).run(StopAt(tmp_path / "fleet", position))
    expected = final(Fleet(specs, stream))
    # a checkpoint may have more runs than are continued; a matrix elsewhere in memory is multiplied in another order
    for own, tolerance in ((specs, {"rtol": 0, "atol": 0}), (specs[1:3], EXACT)):
        resumed = Fleet(own, stream)
        checkpoint.restore(resumed, tmp_path / "fleet")
        continued = final(resumed)
        assert set(continued) == {spec.key for spec in own}
        for key, weights in continued.items():
            torch.testing.assert_close(weights, expected[key], **tolerance)


@pytest.mark.parametrize("method", STRENGTHS)
def test_diverging_run_leaves_the_others_as_they_are(method):
    stream = STREAMS["classes"]
    specs = specs_for(method, stream)[::2]
    bad = replace(specs[0], seed=1, lr=1e308)
    results = {result.spec.seed: result for result in Fleet([*specs, bad], stream).run()}
    assert {seed: result.status for seed, result in results.items()} == {0: "finished", 1: "unstable", 2: "finished"}
    for alone in Fleet(specs, stream).run():
        assert results[alone.spec.seed].matrix == alone.matrix


@pytest.mark.parametrize("method", GRADIENTS)
def test_outputs_of_past_tasks_do_not_change_without_any_free_energy(method):
    stream = STREAMS["classes"]
    strength = {"gpm": 0.0, "nscl": 0.0, "owm": 1e-9}[method]
    spec = replace(specs_for(method, stream)[0], strength=strength)
    first = Fleet([spec], replace(stream, tasks=stream.tasks[:1]))
    first.run()
    last = Fleet([spec], stream)
    last.run()
    x = normalize_pixels(stream.train.images[stream.tasks[0].train], torch.float64)
    before, after = first.stack.network_of(0).eval()(x, 0), last.stack.network_of(0).eval()(x, 0)
    torch.testing.assert_close(before, after, rtol=0, atol=1e-5)
    assert not torch.equal(first.stack.parameters["backbone.1.weight"], last.stack.parameters["backbone.1.weight"])


def test_layers_that_cannot_be_seen_are_refused_in_one_line():
    stream = STREAMS["classes"]
    spec = spec_for("gpm", stream, 0, network="laboratory.test_fleet_equals:dropping")
    with pytest.raises(MooringError, match="gpm needs layers that can be batched over runs") as refused:
        Fleet([spec], stream)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "strength", "message"),
    [
        ("gpm", 1.5, "strength=1.5 of gpm is not allowed: give a number from 0 to 1"),
        ("nscl", -1.0, "strength=-1.0 of nscl is not allowed"),
        ("owm", 0.0, "strength=0.0 of owm is not allowed: give a number above 0"),
        ("ftp", 0.0, "strength=0.0 of ftp is not allowed: give a number above 0"),
        ("tpgm", 0.0, "strength=0.0 of tpgm is not allowed: give a number above 0"),
    ],
)
def test_strength_outside_its_range_is_refused_before_training(method, strength, message):
    with pytest.raises(MooringError, match=message):
        comparison("digits", method, strength=strength)


@pytest.mark.parametrize("method", STRENGTHS)
def test_one_strength_for_each_run_is_accepted(method):
    plugin = find_method(method).plugin.make(torch.tensor([0.1, 0.5]))
    assert any(isinstance(value, torch.Tensor) and value.shape == (2,) for value in vars(plugin).values())


GOLDEN: dict[str, tuple[float, tuple[float, float], tuple[float, float]]] = {
    "gpm": (0.03, (79.8, 81.1), (2.3, 3.1)),
    "nscl": (1000, (78.6, 82.2), (0.0, 0.6)),
    "owm": (0.01, (79.4, 82.9), (0.0, 0.9)),
    "ftp": (0.01, (54.7, 69.7), (0.2, 3.8)),
    "tpgm": (0.01, (53.8, 69.0), (0.1, 3.3)),
}
"""Strength, and the 95 % intervals of accuracy and forgetting over five seeds on two permutations of the digits."""


@pytest.mark.parametrize("method", GOLDEN)
def test_accuracy_and_forgetting_stay_within_their_golden_intervals(method):
    strength, *intervals = GOLDEN[method]
    stream = domain_stream(tasks=2, images=300)
    settings = {"strength": strength, "epochs": 3, "batch": 20, "lr": 0.03, "network": "mlp"}
    memory = {"memory": 100} if find_method(method).memory else {}
    results = Fleet([spec_for(method, stream, seed, **settings, **memory) for seed in range(5)], stream).run()
    for metric, (low, high) in zip(("accuracy", "forgetting"), intervals, strict=True):
        mean = sum(result.metrics[metric] for result in results) / len(results)
        assert low <= mean <= high, f"{metric} {mean:.2f}"
