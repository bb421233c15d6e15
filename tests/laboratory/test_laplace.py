"""The online Laplace penalty with Kronecker factors, and the penalties that match a proximal step: equal to loops."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from laboratory.small import (
    class_stream,
    domain_stream,
    optimizer_by_hand,
    scheduler_by_hand,
    spec_for,
    trained_by_hand,
)
from mooring.curvature.kronecker_factors import KroneckerFactors
from mooring.rules import Penalty
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.methods import find_method
from mooring_lab.methods.laplace.layer_penalty import LayerPenalty
from mooring_lab.model.order import task_order
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels

STREAMS = {"classes": class_stream(), "domains": domain_stream()}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
EVERY = 4
NETWORK = "laboratory.test_laplace:two_layers"


def two_layers(shape: tuple[int, int, int]) -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh())


class Loop:
    """One network, the factors from hooks, and the penalty as a term of the loss, whose gradient autograd takes."""

    def __init__(self, spec, stream) -> None:
        self.spec, self.stream = spec, stream
        self.model = initial_network(spec.network, stream, spec.seed, dtype=torch.float64)
        held = {n: p for n, p in self.model.named_parameters() if stream.heads == "one" or "heads" not in n}
        modules = dict(self.model.named_modules())
        self.layers = {n: m for n, m in modules.items() if isinstance(m, torch.nn.Linear) and f"{n}.weight" in held}
        self.others = {n: p for n, p in held.items() if n.rpartition(".")[0] not in self.layers}
        self.sums = {name: [] for name in (*self.layers, *self.others)}
        self.previous = {name: [] for name in (*self.layers, *self.others)}
        self.anchors: dict[str, torch.Tensor] = {}

    def penalty(self) -> torch.Tensor:
        """strength / 2 * (tr(G D A D') of every weight, b' G b of every bias, sum(F d^2) of the others)."""
        total = torch.zeros((), dtype=torch.float64)
        for name, layer in self.layers.items():
            tasks = self.previous[name]
            a, g, s = (torch.stack(factor).mean(0) for factor in zip(*tasks, strict=True))
            d, b = layer.weight - self.anchors[f"{name}.weight"], layer.bias - self.anchors[f"{name}.bias"]
            total = total + len(tasks) * (torch.trace(g @ d @ a @ d.T) + b @ s @ b)
        for name, p in self.others.items():
            total = total + (sum(self.previous[name]) * (p - self.anchors[name]).square()).sum()
        return self.spec.strength / 2 * total

    def train(self) -> "Loop":
        spec = self.spec
        for number, task in enumerate(self.stream.tasks):
            if number and self.stream.heads == "per task":
                self.model.inherit(number, number - 1)
            optimizer = optimizer_by_hand(spec, self.model.parameters())
            scheduler = scheduler_by_hand(spec, optimizer, len(task.train.split(spec.batch)))
            step = 0
            for epoch in range(spec.epochs):
                for batch in task_order(spec.seed, number, epoch, task.train).split(spec.batch):
                    self.step(batch, number, optimizer, step)
                    scheduler.step()
                    step += 1
            for name, seen in self.sums.items():
                mean = [torch.stack(parts).mean(0) for parts in zip(*seen, strict=True)]
                self.previous[name].append(mean if name in self.layers else mean[0])
                seen.clear()
            self.anchors = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return self

    def step(self, batch, number: int, optimizer, step: int) -> None:
        seen, x = {}, normalize_pixels(self.stream.train.images[batch], torch.float64)
        hooks = [
            layer.register_forward_hook(lambda m, i, out, name=name: seen.__setitem__(name, (i[0].detach(), out)))
            for name, layer in self.layers.items()
        ]
        loss = cross_entropy(self.model(x, self.stream.head(number)), self.stream.train.labels[batch])
        for hook in hooks:
            hook.remove()
        n = len(batch)
        task = torch.autograd.grad(loss, [out for _, out in seen.values()], retain_graph=True)
        for (name, (inputs, _)), g in zip(seen.items(), task, strict=True):
            if step % EVERY == 0:
                rows = n * g  # the gradient of each sample's own loss
                self.sums[name].append((inputs.T @ inputs / n, rows.T @ rows / n, rows.T @ rows / n))
        diagonal = torch.autograd.grad(loss, list(self.others.values()), retain_graph=True) if self.others else ()
        for name, g in zip(self.others, diagonal, strict=True):
            self.sums[name].append((n * g.square(),))
        optimizer.zero_grad()
        (loss + self.penalty() if number else loss).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", STREAMS)
def test_laplace_in_a_fleet_equals_a_loop_with_the_penalty_in_its_loss(kind):
    stream = STREAMS[kind]
    settings = {"network": NETWORK, "weight_decay": 0.01, "lr": 0.02}
    specs = [spec_for("laplace-kronecker", stream, seed, strength=s, **settings) for seed in (0, 2) for s in (0.3, 3.0)]
    fleet = Fleet([*specs, spec_for("budget-kronecker", stream, 0, **settings)], stream)  # another method beside it
    order = [spec for group in fleet.strength_groups.values() for spec in group]
    fleet.run()
    free = Loop(spec_for("laplace-kronecker", stream, 0, strength=0.0, **settings), stream).train().model.state_dict()
    for row, spec in enumerate(order):
        if spec.method == "laplace-kronecker":
            expected = Loop(spec, stream).train().model.state_dict()
            torch.testing.assert_close(fleet.stack.network_of(row).state_dict(), expected, **EXACT)
            assert not torch.allclose(expected["backbone.1.weight"], free["backbone.1.weight"], rtol=1e-3)


def factors_of(a: torch.Tensor, g: torch.Tensor, tasks: int) -> KroneckerFactors:
    factors = KroneckerFactors.zeros(torch.zeros(len(a), g.shape[-1], a.shape[-1]), torch.float64, runs=True)
    factors.past_inputs, factors.past_outputs, factors.tasks = a, g, tasks
    factors.update_eigenbasis()
    return factors


def test_force_is_the_gradient_of_the_quadratic_form():
    random = torch.Generator().manual_seed(0)
    a, g, d = (torch.randn(3, *shape, generator=random, dtype=torch.float64) for shape in ((5, 5), (4, 4), (4, 5)))
    a, g, strength = a @ a.mT, g @ g.mT, torch.tensor([0.5, 2.0, 0.0]).double()
    d.requires_grad_()
    cost = sum(s / 2 * 6 * torch.trace(G @ D @ A @ D.T) for s, G, D, A in zip(strength, g, d, a, strict=True))
    (expected,) = torch.autograd.grad(cost, d)
    force = LayerPenalty(strength).layer_force(factors_of(a, g, tasks=6), d.detach(), 0.1)
    torch.testing.assert_close(force, expected, rtol=1e-10, atol=1e-10)


def test_clamped_force_never_moves_a_displacement_beyond_its_anchor():
    random = torch.Generator().manual_seed(1)
    a, g, d = (torch.randn(2, *shape, generator=random, dtype=torch.float64) for shape in ((5, 5), (4, 4), (4, 5)))
    factors = factors_of(a @ a.mT, g @ g.mT, tasks=2)
    lr = torch.tensor([0.1, 0.01]).double()
    force = LayerPenalty(torch.tensor([100.0, 1e6]).double(), clamp=True).layer_force(factors, d, lr)
    left = factors.to_basis(d - lr[:, None, None] * force) / factors.to_basis(d)
    assert left.min() > -1e-9
    assert left.max() < 1


def test_stability_of_a_run_has_the_largest_eigenvalue_of_its_curvature():
    stream = STREAMS["domains"]
    spec = spec_for("laplace-kronecker", stream, 1, strength=2.0, network=NETWORK, epochs=1)
    fleet = Fleet([spec], stream)
    loop = Loop(spec, stream).train()
    (result,) = fleet.run()
    largest = []
    for name in loop.layers:
        a, g, s = (torch.stack(factor).mean(0) for factor in zip(*loop.previous[name], strict=True))
        eigenvalues = [torch.linalg.eigvalsh(matrix)[-1] for matrix in (a, g, s)]
        largest += [3 * eigenvalues[0] * eigenvalues[1], 3 * eigenvalues[2]]
    largest += [sum(loop.previous[name]).max() for name in loop.others]
    assert result.stability[-1].largest == pytest.approx(spec.lr * 2.0 * float(max(largest)), rel=1e-9)


@pytest.mark.parametrize("kind", STREAMS)
def test_summed_penalty_equals_a_loop_with_attach_and_keeps_what_the_proximal_step_keeps(kind):
    stream, proximal = STREAMS[kind], find_method("proximal-ewc")
    for name in ("summed-ewc", "clamped-summed-ewc"):
        method = find_method(name)
        assert (method.importance(0), method.merge) == (proximal.importance(0), proximal.merge)
        assert method.pull(3.0) == Penalty(3.0, clamp=name.startswith("clamped"))
        spec = spec_for(name, stream, 3, strength=3.0)
        fleet = Fleet([spec], stream)
        fleet.run()
        expected = trained_by_hand(spec, stream).state_dict()
        torch.testing.assert_close(fleet.stack.network_of(0).state_dict(), expected, **EXACT)


def test_laplace_keeps_what_the_budget_with_factors_keeps():
    for name in ("laplace-kronecker", "clamped-laplace-kronecker"):
        method, budget = find_method(name), find_method("budget-kronecker")
        assert (method.importance(0), method.merge) == (budget.importance(0), budget.merge)
