"""Tests that a converted strength gives the gradient of the other library's formula, by autograd."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mooring
from mooring import EWC, MAS, SI, Penalty
from mooring.diagnose.stability import CONVENTIONS, Convention, convert_strength
from mooring.errors import MooringError

pytestmark = pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")  # tests displace parameters by hand

LR = 0.05
STRENGTH = 7.0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batches(count, size):
    generator = torch.Generator().manual_seed(size)
    make = torch.randn(count, size, 3, generator=generator, dtype=torch.float64)
    return [(x, torch.randint(3, (size,), generator=generator)) for x in make]


def squares(model, data, weight=lambda outputs, y: 1.0):
    """Return the mean over batches of the squared gradient of the mean loss, as Avalanche and Mammoth compute it."""
    scores = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in data:
        outputs = model(x)
        for score, g in zip(scores, torch.autograd.grad(cross_entropy(outputs, y), model.parameters()), strict=True):
            score += weight(outputs, y) * g.square() / len(data)
    return scores


def probability(outputs, y):
    """Return Mammoth's weight of a sample's square: p(y | x)."""
    return outputs.detach().softmax(1).gather(1, y[:, None]).squeeze()


def stepped(model, penalty, x, y):
    """Return the parameters after a step of gradient descent on the loss plus a penalty, by autograd."""
    loss = cross_entropy(model(x), y) + penalty
    return [p - LR * g for p, g in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True)]


def check_step(model, moor, scores, formula):
    """Check that a step of a displaced moored model equals a step with the other library's formula."""
    anchors = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
    distances = [p - anchor for p, anchor in zip(model.parameters(), anchors, strict=True)]
    x, y = batches(1, 6)[0]
    wanted = stepped(model, formula(scores, distances), x, y)
    moor.optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    moor.optimizer.step()
    for p, value in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), value.detach(), rtol=1e-10, atol=1e-12)


def whole(scores, distances):
    return STRENGTH * sum((s * d**2).sum() for s, d in zip(scores, distances, strict=True))


def half(scores, distances):
    return STRENGTH / 2 * sum((s * d**2).sum() for s, d in zip(scores, distances, strict=True))


def moored(model, strength, importance, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return mooring.attach(model, optimizer, importance=importance, pull=Penalty(strength), merge="sum", **options)


@pytest.mark.parametrize("per_sample", [False, True])
def test_avalanche_ewc_has_no_half_and_squares_batches(per_sample):
    model, data = network(), batches(5, 8)
    to = "ewc-per-sample" if per_sample else "ewc"
    strength = convert_strength(STRENGTH, "avalanche-ewc", to=to, batch_size=8)
    moor = moored(model, strength, EWC(decay=None, per_sample=per_sample))
    moor.consolidate(data=data)
    check_step(model, moor, squares(model, data), whole)


def test_avalanche_mas_has_no_half_and_takes_the_mean_over_a_batch():
    model, data = network(), batches(5, 8)
    scores = [torch.zeros_like(p) for p in model.parameters()]
    for x, _ in data:
        norm = model(x).norm(dim=1).pow(2).mean()
        for score, g in zip(scores, torch.autograd.grad(norm, model.parameters()), strict=True):
            score += g.abs() / len(data)
    moor = moored(model, convert_strength(STRENGTH, "avalanche-mas", batch_size=8), MAS())
    moor.consolidate(data=data)
    check_step(model, moor, scores, whole)


@pytest.mark.parametrize(("convention", "formula"), [("avalanche-si", half), ("mammoth-si", whole)])
def test_avalanche_si_has_a_half_and_mammoth_si_has_none(convention, formula):
    model, damping = network(), 1e-2
    start, paths = [p.detach().clone() for p in model.parameters()], [torch.zeros_like(p) for p in model.parameters()]
    moor = moored(model, convert_strength(STRENGTH, convention), SI(damping=damping, sign="signed"))
    for x, y in batches(5, 8):
        moor.optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        for path, p in zip(paths, model.parameters(), strict=True):
            path += LR * p.grad**2  # Mammoth's; Avalanche's -g * (new - old) is the same under gradient descent
        moor.optimizer.step()
    distances = [p.detach() - first for p, first in zip(model.parameters(), start, strict=True)]
    moor.consolidate()
    check_step(model, moor, [o / (d**2 + damping) for o, d in zip(paths, distances, strict=True)], formula)


def test_mammoth_ewc_has_no_half_and_squares_samples_weighted_by_their_probability():
    model, data = network(), batches(20, 1)

    def weighted(model, batch):
        outputs = model(batch[0])
        return probability(outputs, batch[1]).sqrt() * cross_entropy(outputs, batch[1])

    moor = moored(model, convert_strength(STRENGTH, "mammoth-ewc", batch_size=1), EWC(decay=None))
    moor.consolidate(data=data, loss=weighted)
    check_step(model, moor, squares(model, data, probability), whole)


def test_own_convention_converts_an_own_penalty():
    model, data = network(), batches(20, 1)
    own = Convention(half=True, score="sample")
    moor = moored(model, convert_strength(STRENGTH, own, to="ewc-per-sample"), EWC(decay=None, per_sample=True))
    moor.consolidate(data=data)
    check_step(model, moor, squares(model, data), half)


def test_conversion_is_invertible():
    for name, other in (("avalanche-ewc", "mammoth-ewc"), ("avalanche-mas", "mas"), ("mammoth-si", "avalanche-si")):
        there = convert_strength(3.0, name, to=other, batch_size=16)
        assert convert_strength(there, other, to=name, batch_size=16) == pytest.approx(3.0)
        assert there != 3.0


def test_batch_and_sample_squares_differ_by_the_batch_size_for_sampled_labels():
    """The rule of thumb between squares of batches and of samples is exact in expectation for sampled labels."""
    model = network()
    x = batches(1, 16)[0][0]
    exact = torch.zeros_like(model[2].weight)
    for sample in x:
        for label, p in enumerate(model(sample[None]).softmax(1)[0]):
            g = torch.autograd.grad(cross_entropy(model(sample[None]), torch.tensor([label])), model[2].weight)[0]
            exact += p.detach() * g.square() / len(x)
    moor = moored(model, 1.0, EWC(decay=None, labels="sampled"))
    moor.estimate([x] * 400)
    drawn = moor.current["2.weight"]
    ratio = convert_strength(1.0, "ewc-per-sample", to="ewc", batch_size=16)
    assert ratio == 16.0
    assert float((drawn / exact).mean()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"convention": "avalanch-ewc"}, "did you mean 'avalanche-ewc'"),
        ({"convention": "mammoth-ewc"}, "batch_size"),
        ({"convention": "avalanche-ewc", "to": "mas"}, "no common scale"),
        ({"convention": "avalanche-ewc", "batch_size": 0}, "batch_size=0"),
        ({"convention": "avalanche-ewc", "strength": -1.0}, "strength=-1.0"),
    ],
)
def test_bad_conversions_are_refused_in_one_line(arguments, named):
    with pytest.raises(MooringError, match=named) as refused:
        convert_strength(**{"strength": 1.0, **arguments})
    assert "\n" not in str(refused.value)


def test_every_convention_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    for name in CONVENTIONS:
        assert f"`{name}`" in page, name
