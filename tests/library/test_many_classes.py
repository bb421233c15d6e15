"""Tests of predictions of many classes, of which a part is stored."""

import pytest
import torch

from mooring.reference.kinds import Classes, classes
from mooring.reference.kinds.classes import DRAWN_CLASSES, TOP_CLASSES, LikeliestClasses


def dense(old, new):
    p, q = old.double().softmax(-1), new.double().softmax(-1)
    return (p * (p / q).log()).sum(-1)


def by_formula(stored, logits):
    """Return the estimate as it is written, with autograd's gradient."""
    log_q = logits.log_softmax(-1)
    others = log_q.scatter(-1, stored.classes.long(), -torch.inf).logsumexp(-1, keepdim=True)
    coarse = torch.cat([log_q.gather(-1, stored.classes.long()), others], -1)
    log_r = log_q.gather(-1, stored.drawn.long()) - others - stored.log_tail
    within = (log_r.exp() - 1 - log_r).mean(-1)
    return (stored.log_p.exp() * (stored.log_p - coarse)).sum(-1) + stored.log_p[:, -1].exp() * within


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
def test_divergence_in_chunks_and_its_gradient_equal_the_formula(monkeypatch, chunk):
    monkeypatch.setattr(classes, "CHUNK", chunk)
    torch.manual_seed(0)
    original = torch.randn(7, 30, dtype=torch.float64)
    logits = torch.randn(7, 30, dtype=torch.float64, requires_grad=True)
    stored = LikeliestClasses.of(original, k=5, draws=6)
    assert torch.equal(stored.classes.long(), original.topk(5).indices)
    torch.testing.assert_close(stored.log_p.exp().sum(-1), torch.ones(7, dtype=torch.float64))
    assert not bool((stored.drawn[:, :, None] == stored.classes[:, None]).any())
    value, expected = stored.divergence(logits), by_formula(stored, logits)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    weights = torch.rand(7, dtype=torch.float64)
    gradients = [torch.autograd.grad((part * weights).sum(), logits)[0] for part in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_divergence_of_certain_predictions_has_a_finite_gradient():
    stored = LikeliestClasses.of(torch.tensor([[0.0, -torch.inf, 200.0, 0.0]]), k=2, draws=3)
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0]], requires_grad=True)
    value = stored.divergence(logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("entropy", [0.3, 1.0, 4.0])
def test_value_of_4000_classes_is_within_five_percent(monkeypatch, entropy):
    """The likeliest 64 of 4,000 with nearly equal probabilities showed less than a quarter of the divergence."""
    monkeypatch.setattr(classes, "MAX_STORED", 0)
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(200, 4000, generator=generator) * entropy
    new = old + 0.6 * torch.randn(200, 4000, generator=generator)
    stored = Classes().store(old)
    assert [part.shape[1] for part in stored] == [TOP_CLASSES + 1, TOP_CLASSES, DRAWN_CLASSES, DRAWN_CLASSES]
    measured, expected = float(Classes().divergence(stored, new).mean()), float(dense(old, new).mean())
    assert measured == pytest.approx(expected, rel=0.05)
    if entropy < 1:
        likeliest = LikeliestClasses(*stored)._replace(log_tail=torch.full_like(stored[3], torch.nan))
        assert float(likeliest.divergence(new).mean()) < 0.25 * expected


def test_small_batch_of_many_classes_is_stored_as_a_whole():
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 8, 4000, generator=generator)
    measured = Classes().divergence(Classes().store(old), new)[:, 0].double()
    torch.testing.assert_close(measured, dense(old, new), rtol=1e-5, atol=1e-6)


def test_original_model_has_no_divergence_and_no_gradient(monkeypatch):
    monkeypatch.setattr(classes, "MAX_STORED", 0)
    logits = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    value = Classes().divergence(Classes().store(logits.detach()), logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert float(value.detach().abs().max()) < 1e-5
    assert float(gradient.abs().max()) < 1e-6
