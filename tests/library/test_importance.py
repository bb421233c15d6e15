"""Tests that every importance equals a direct computation, at every batch size if its definition says so."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import mooring
from mooring.rules.balanced import balance
from mooring.rules.ewc import fisher_sampled

F64 = torch.float64


def network(inputs=3, classes=4):
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, classes)).to(F64)


def batches(count, size=6, classes=4):
    return [(torch.randn(size, 3, dtype=F64), torch.randint(classes, (size,))) for _ in range(count)]


def train(model, optimizer, data, record=None):
    """Train with a plain loop, and record the gradient and the parameters before and after each step."""
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        named = dict(model.named_parameters())
        seen = {n: (p.grad.clone(), p.detach().clone()) for n, p in named.items()}
        optimizer.step()
        if record is not None:
            record.append({n: (*seen[n], named[n].detach().clone()) for n in named})


def per_sample_gradients(model, function, x):
    """Return the gradient of function(outputs of one sample) for each sample, by parameter name."""
    values = {n: p.detach() for n, p in model.named_parameters()}

    def one(values, sample):
        return function(functional_call(model, values, (sample.unsqueeze(0),)).squeeze(0))

    return vmap(grad(one), in_dims=(None, 0))(values, x)


@pytest.mark.parametrize("decay", [0.2, 0.9, None])
def test_ewc_is_the_average_of_the_squared_batch_gradient(decay):
    model, record = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moor = mooring.attach(model, optimizer, importance=mooring.EWC(decay=decay))
    train(model, optimizer, batches(5), record)
    for name, current in moor.current.items():
        squares = [step[name][0] ** 2 for step in record]
        expected = torch.zeros_like(current)
        for square in squares:
            expected = (decay or 0) * expected + (1 - (decay or 0)) * square
        expected = expected if decay is not None else sum(squares) / len(squares)
        torch.testing.assert_close(current, expected, rtol=1e-12, atol=1e-15)


def test_ewc_per_sample_multiplies_by_the_observed_or_given_batch_size():
    for batch_size in (None, 6):
        importance = mooring.EWC(decay=None, per_sample=True, batch_size=batch_size)
        model, record = network(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moor = mooring.attach(model, optimizer, importance=importance)
        train(model, optimizer, batches(1), record)
        for name, current in moor.current.items():
            torch.testing.assert_close(current, 6 * record[0][name][0] ** 2, rtol=1e-12, atol=1e-15)


def test_sampled_fisher_is_unbiased_at_any_batch_size():
    """The expectation of the batch's estimate over all label draws equals the exact per-sample Fisher diagonal."""
    model, (x, _) = network(classes=3), batches(1, size=3)[0]
    log_p = model(x).log_softmax(-1).detach()
    exact = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    scores = []
    for label in range(3):
        scores.append(per_sample_gradients(model, lambda out, label=label: out.log_softmax(-1)[label], x))
        for name in exact:
            weight = log_p[:, label].exp().reshape(-1, *(1,) * exact[name].ndim)
            exact[name] += (weight * scores[label][name] ** 2).mean(0)
    expected = {name: torch.zeros_like(p) for name, p in exact.items()}
    for draw in product(range(3), repeat=3):
        probability = sum(log_p[i, label] for i, label in enumerate(draw)).exp()
        for name in expected:
            total = sum(scores[label][name][i] for i, label in enumerate(draw))
            expected[name] += probability * fisher_sampled(total, samples=3)
    for name in exact:
        torch.testing.assert_close(expected[name], exact[name], rtol=1e-10, atol=1e-14)


@pytest.mark.faults  # slow
def test_labels_are_sampled_from_the_models_prediction():
    """Over many batches the estimate approaches the exact Fisher diagonal; the labels of the data have no effect."""
    model = network(classes=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, importance=mooring.EWC(decay=None, labels="sampled"))
    x = torch.randn(4, 3, dtype=F64)
    train(model, optimizer, [(x, torch.zeros(4, dtype=torch.long))] * 10000)
    log_p = model(x).log_softmax(-1).detach()
    for name, current in moor.current.items():
        exact = torch.zeros_like(current)
        for label in range(3):
            score = per_sample_gradients(model, lambda out, label=label: out.log_softmax(-1)[label], x)[name]
            exact += (log_p[:, label].exp().reshape(-1, *(1,) * current.ndim) * score**2).mean(0)
        error = (current - exact).norm() / exact.norm()
        assert error < 0.05, f"{name}: {error}"


@pytest.mark.parametrize("size", [1, 4, 9])
def test_mas_is_the_absolute_gradient_of_the_summed_squared_norm(size):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=mooring.MAS(decay=None))
    (x, y) = batches(1, size=size)[0]
    oracle = per_sample_gradients(model, lambda out: out.square().sum(), x)
    train(model, optimizer, [(x, y)])
    for name, current in moor.current.items():
        torch.testing.assert_close(current, oracle[name].sum(0).abs(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("sign", ["rectified", "absolute", "signed"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_si_is_the_path_integral_over_the_squared_displacement(sign, optimizer_class):
    model, record = network(), []
    optimizer = optimizer_class(model.parameters(), lr=0.05)
    moor = mooring.attach(model, optimizer, importance=mooring.SI(damping=0.01, sign=sign))
    train(model, optimizer, batches(6), record)
    for name, current in moor.current.items():
        path = sum(-g * (after - before) for g, before, after in (step[name] for step in record))
        d = record[-1][name][2] - record[0][name][1]
        score = path / (d**2 + 0.01)
        expected = {"rectified": score.clamp(min=0), "absolute": score.abs(), "signed": score}[sign]
        torch.testing.assert_close(current, expected, rtol=1e-10, atol=1e-14)


def test_si_keeps_the_sign_of_the_given_fraction():
    """Momentum from before the mooring carries parameters against their gradients, so that paths turn negative."""
    current = {}
    for sign in ("signed", 0.25):
        torch.manual_seed(3)
        model = nn.Linear(200, 200).to(F64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            if step == 4:
                moor = mooring.attach(model, optimizer, importance=mooring.SI(sign=sign))
            optimizer.zero_grad()
            (model(torch.randn(8, 200, dtype=F64)) * torch.randn(8, 200, dtype=F64)).mean().backward()
            optimizer.step()
        current[sign] = moor.current["weight"]
    negative = {sign: float((score < 0).double().mean()) for sign, score in current.items()}
    assert negative["signed"] > 0.1
    assert negative[0.25] == pytest.approx(0.25 * negative["signed"], rel=0.1)
    torch.testing.assert_close(current[0.25].abs(), current["signed"].abs())


def test_si_flipped_makes_a_thousandth_of_the_scores_negative():
    current = {}
    for sign in ("absolute", "flipped"):
        torch.manual_seed(3)
        model = nn.Linear(300, 300).to(F64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moor = mooring.attach(model, optimizer, importance=mooring.SI(sign=sign, seed=1))
        model(torch.randn(8, 300, dtype=F64)).square().mean().backward()
        optimizer.step()
        current[sign] = moor.current["weight"]
    assert float((current["absolute"] > 0).double().mean()) == 1
    assert int((current["flipped"] < 0).sum()) == pytest.approx(90, abs=30)
    torch.testing.assert_close(current["flipped"].abs(), current["absolute"])


def test_rwalk_is_the_fisher_plus_the_path_score():
    model, record = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    moor = mooring.attach(model, optimizer, importance=mooring.RWalk(decay=0.3, damping=0.02))
    train(model, optimizer, batches(6), record)
    for name, current in moor.current.items():
        fisher = torch.zeros_like(current)
        for g, _, _ in (step[name] for step in record):
            fisher = 0.3 * fisher + 0.7 * g**2
        path = sum(-g * (after - before) for g, before, after in (step[name] for step in record))
        d = record[-1][name][2] - record[0][name][1]
        expected = fisher + path.clamp(min=0) / (fisher * d**2 / 2 + 0.02)
        torch.testing.assert_close(current, expected, rtol=1e-10, atol=1e-14)


def test_importance_is_updated_before_the_pull():
    """With Interpolation, SI uses the displacement after the step and before the pull."""
    model, record = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    moor = mooring.attach(model, optimizer, importance=mooring.SI(damping=0.01))
    data = batches(5)
    train(model, optimizer, data[:3])
    moor.consolidate()
    anchors = {n: a.clone() for n, a in moor.anchor.items()}
    after_pull, path = dict(anchors), {n: torch.zeros_like(a) for n, a in anchors.items()}
    previous = {n: s.clone() for n, s in moor.previous.items()}
    for x, y in data[3:]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            step = -0.05 * p.grad
            path[name] = path[name] - p.grad * step
            stepped = after_pull[name] + step
            current = path[name].clamp(min=0) / ((stepped - anchors[name]) ** 2 + 0.01)
            a, b = previous[name].sqrt(), current.sqrt()
            rate = torch.where(a > 0, a / (a + b), 0.0)
            after_pull[name] = stepped + rate * (anchors[name] - stepped)
            record.append((name, current))
        optimizer.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), after_pull[name], rtol=1e-10, atol=1e-14)
    for name, current in record[-4:]:
        torch.testing.assert_close(moor.current[name], current, rtol=1e-10, atol=1e-14)


def test_uniform_and_random_are_not_merged():
    for importance in (mooring.Uniform(), mooring.Random(seed=2)):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moor = mooring.attach(model, optimizer, importance=importance)
        for _ in range(3):
            train(model, optimizer, batches(1))
            before = {n: s.clone() for n, s in moor.current.items()}
            moor.consolidate()
            for name in before:
                assert torch.equal(moor.previous[name], before[name])
    assert float(moor.previous["0.weight"].std()) > 0.1, "random scores differ"


@pytest.mark.parametrize(
    ("merge", "expected"), [("average", (0.0 + 4 / 2 + 2) / 2), ("sum", 6.0), ("max", 4.0), (lambda p, c: c * 10, 20.0)]
)
def test_merge_combines_tasks_by_its_formula(merge, expected):
    weight = nn.Linear(1, 1, bias=False).to(F64)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    moor = mooring.attach(weight, optimizer, importance=mooring.EWC(decay=0.0), merge=merge)
    for gradient in (2.0, 2.0**0.5):
        optimizer.zero_grad()
        (gradient * weight(torch.ones(1, 1, dtype=F64))).sum().backward()
        optimizer.step()
        moor.consolidate()
    assert float(moor.previous["weight"]) == pytest.approx(expected)


def test_balanced_layers_have_the_same_mean_and_the_total_is_kept():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raw = mooring.attach(model, optimizer, importance="ewc")
    data = batches(3)
    train(model, optimizer, data)
    raw_scores = {n: s.clone() for n, s in raw.current.items()}
    raw.detach()
    torch.manual_seed(0)
    model2 = network()
    optimizer2 = torch.optim.SGD(model2.parameters(), lr=0.1)
    moor = mooring.attach(model2, optimizer2, importance=mooring.Balanced("ewc"))
    train(model2, optimizer2, data)
    first, last = (torch.cat([moor.current[f"{n}.{k}"].flatten() for k in ("weight", "bias")]) for n in (0, 2))
    torch.testing.assert_close(first.mean(), last.mean())
    total = sum(s.sum() for s in raw_scores.values())
    torch.testing.assert_close(sum(s.sum() for s in moor.current.values()), total)
    ratio = moor.current["0.weight"] / raw_scores["0.weight"]
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))
    moor.consolidate()
    torch.testing.assert_close(moor.previous["0.weight"], raw_scores["0.weight"] * ratio.flatten()[0] / 2)


def test_balance_works_per_run_and_ignores_a_layer_without_importance():
    sums = [[8.0, 2.0], [2.0, 8.0], [0.0, 0.0]]
    factors = balance([torch.tensor(layer) for layer in sums], [1, 1, 1])
    for run in range(2):
        alone = balance([torch.tensor(layer[run]) for layer in sums], [1, 1, 1])
        assert [float(factor[run]) for factor in factors] == [float(factor) for factor in alone]
    assert factors[2].tolist() == [1.0, 1.0]
