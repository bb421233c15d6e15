"""Tests of kinds of outputs: divergences against dense computations, and what is inferred or seen in training."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import mooring
from by_hand import F64, one_line
from mooring.errors import MooringError, UnheldWarning
from mooring.reference.kinds import Classes, Embedding, Labels, OutputKind, Own, Values, choose_kind


def two_outputs(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=F64), torch.randn(*shape, generator=generator, dtype=F64)


def softmax_divergence(old, new, dimension):
    p, q = old.softmax(dimension), new.softmax(dimension)
    return (p * (p / q).log()).sum(dimension)


@pytest.mark.parametrize(
    ("shape", "given", "dimension"),
    [((5, 3), None, 1), ((5, 4, 3), None, 2), ((5, 3, 4), 1, 1), ((5, 3, 4, 2), None, 1), ((5, 4, 2, 3), 3, 3)],
)
def test_divergence_of_classes_is_that_of_the_softmax_along_their_dimension(shape, given, dimension):
    old, new = two_outputs(*shape)
    kind = Classes(given)
    expected = softmax_divergence(old, new, dimension).reshape(5, -1)
    torch.testing.assert_close(kind.divergence(kind.store(old), new), expected)


@pytest.mark.parametrize("shape", [(5,), (5, 6), (5, 4, 6)])
def test_divergence_of_labels_is_the_sum_of_those_of_coins(shape):
    old, new = two_outputs(*shape)
    p, q = old.sigmoid(), new.sigmoid()
    coins = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    expected = coins.reshape(5, -1, 6).sum(-1) if len(shape) > 1 else coins[:, None]
    torch.testing.assert_close(Labels().divergence(Labels().store(old), new), expected)


def test_divergence_of_certain_labels_is_finite_and_so_is_its_gradient():
    old, new = torch.tensor([[200.0, -200.0, 200.0]]), torch.tensor([[200.0, -200.0, -200.0]], requires_grad=True)
    value = Labels().divergence(Labels().store(old), new)
    assert value.item() == pytest.approx(200.0)
    (gradient,) = torch.autograd.grad(value.sum(), new)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, -1.0]]))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("targets", [True, False])
def test_divergence_of_values_does_not_depend_on_units(scale, targets):
    old, new = two_outputs(64, 3)
    units = torch.tensor([1.0, 7.0, 0.1], dtype=F64) * scale
    labels = (old + 0.5 * two_outputs(64, 3, 1)[0].squeeze(2)) * units if targets else None
    kind = Values().fitted([old * units], [labels])
    error = (labels / units - old).square().mean(0) if targets else 0.1 * old.var(0, correction=0)
    expected = ((new - old).square() / (2 * error)).mean(1, keepdim=True)
    torch.testing.assert_close(kind.divergence(kind.store(old * units), new * units), expected, rtol=1e-5, atol=0)


def test_a_tenth_of_a_nat_of_values_is_a_squared_error_that_grew_by_a_fifth():
    generator = torch.Generator().manual_seed(0)
    truth, noise, change = (torch.randn(100_000, 4, generator=generator, dtype=F64) for _ in range(3))
    old = truth + 0.3 * noise
    kind = Values().fitted([old], [truth])
    new = old + math.sqrt(0.2) * 0.3 * change
    assert float(kind.divergence(kind.store(old), new).mean()) == pytest.approx(0.1, rel=0.01)
    assert (new - truth).square().mean() / (old - truth).square().mean() == pytest.approx(1.2, rel=0.01)


def test_output_that_is_constant_does_not_make_the_others_count_less():
    outputs = torch.randn(32, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.0])
    kind = Values().fitted([outputs], [None])
    assert kind.variance[0] == pytest.approx(0.1 * float(outputs[:, 0].var(correction=0)))
    assert 0 < kind.variance[1] <= kind.variance[0]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_divergence_of_embeddings_is_that_of_their_neighbours_in_the_old_index(similarity):
    old, new = two_outputs(20, 6)
    kind = Embedding(0.3, similarity).fitted([old[:12], old[12:]], [None, None])
    assert kind.index.shape == (20, 6)

    def similarities(rows):
        index = old
        if similarity == "cosine":
            rows, index = (t / t.norm(dim=1, keepdim=True) for t in (rows, old))
        return rows @ index.T / 0.3

    expected = softmax_divergence(similarities(old), similarities(new), 1)[:, None]
    torch.testing.assert_close(kind.divergence(kind.store(old), new), expected, rtol=1e-5, atol=1e-7)


def test_default_temperature_gives_half_of_the_largest_entropy():
    rows, _ = two_outputs(300, 8)
    kind = Embedding().fitted([rows], [None])
    p = kind.similarities(rows).softmax(1)
    assert len(kind.index) == 256
    assert float(-(p * p.log()).sum(1).mean()) == pytest.approx(0.5 * math.log(256), rel=1e-3)


def test_rotated_embeddings_are_far_although_they_are_near_each_other():
    """Retrieval in the old index is lost, which distances among the new embeddings do not show."""
    rows, _ = two_outputs(64, 8)
    kind = Embedding().fitted([rows], [None])
    rotated = rows.roll(1, 1)
    assert float(kind.divergence(kind.store(rows), rotated).mean()) > 1.0


@pytest.mark.parametrize("kind", [Classes(), Labels(), Values(), Embedding()], ids=lambda kind: kind.name)
def test_drawn_loss_has_the_curvature_of_the_divergence(kind):
    """In expectation the squared gradient of one sample's loss is the second derivative of its divergence."""
    torch.manual_seed(0)
    weight = torch.randn(3, 4, dtype=F64, requires_grad=True)
    inputs = torch.randn(6, 3, dtype=F64)
    kind = kind.fitted([(inputs @ weight).detach()], [None])
    x = inputs[:1]
    stored = kind.store((x @ weight).detach())
    hessian = torch.autograd.functional.hessian(lambda w: kind.divergence(stored, x @ w).sum(), weight.detach())
    expected = torch.stack([hessian[i, j, i, j] for i in range(3) for j in range(4)]).view(3, 4)
    total = torch.zeros_like(weight)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3000):
        (g,) = torch.autograd.grad(kind.drawn_loss(x @ weight, generator), weight)
        total += g.square()
    torch.testing.assert_close(total / 3000, expected, rtol=0.2, atol=0.02 * float(expected.max()))


def test_own_divergence_compares_what_the_model_returns():
    def divergence(old, new):
        return (new["scores"] - old.scores).square().sum(1)

    kind = choose_kind(divergence)
    old = {"scores": torch.zeros(3, 2), "names": ["a", "b", "c"]}
    value = kind.divergence(kind.store(old), {"scores": torch.ones(3, 2), "names": ["a", "b", "c"]})
    torch.testing.assert_close(value, torch.full((3, 1), 2.0))


def test_own_divergence_of_another_form_is_refused():
    kind = Own(lambda old, new: new - old)
    with pytest.raises(MooringError, match=r"shape \(3, 2\).*one number for each sample") as error:
        kind.divergence(kind.store(torch.zeros(3, 2)), torch.ones(3, 2))
    assert one_line(error)


@pytest.mark.parametrize("kind", ["labels", Values(), Classes(1)])
def test_named_kind_is_said_in_what_attach_returns(kind):
    model = nn.Linear(3, 2)
    moor = mooring.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), kind=kind, reference=list(torch.randn(4, 8, 3))
    )
    assert f"outputs={choose_kind(kind).name!r})" in repr(moor)


@pytest.mark.parametrize("kind", ["label", 3, Labels])
def test_unknown_kind_is_refused_in_one_line(kind):
    model = nn.Linear(3, 2)
    with pytest.raises(MooringError, match="kind") as error:
        mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), kind=kind, reference=[torch.randn(8, 3)])
    assert one_line(error)
    assert "labels" in str(error.value)


def batches_of(label):
    generator = torch.Generator().manual_seed(0)
    return [(x, label(x)) for x in torch.randn(4, 16, 3, generator=generator)]


@pytest.mark.parametrize(
    ("outputs", "label", "name"),
    [
        (4, lambda x: x.argmax(1), "classes"),
        (4, lambda x: (torch.cat([x, x[:, :1]], 1) > 0).float(), "labels"),
        (4, lambda x: (torch.cat([x, x[:, :1]], 1) > 0).long(), "labels"),
        (4, lambda x: functional.one_hot(x.argmax(1), 4).float(), "classes"),
        (4, lambda x: torch.cat([x, x[:, :1]], 1).softmax(1), "classes"),
        (4, lambda x: torch.cat([x, x[:, :1]], 1), "values"),
        (1, lambda x: (x[:, 0] > 0).float(), "labels"),
        (1, lambda x: (x[:, :1] > 0).long(), "labels"),
        (1, lambda x: x[:, 0], "values"),
        (1, lambda x: x[:, 0].round().long().abs() * 3, "values"),
    ],
)
def test_kind_is_inferred_from_the_labels(outputs, label, name):
    torch.manual_seed(0)
    model = nn.Linear(3, outputs)
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=batches_of(label))
    assert f"outputs='{name}' (inferred)" in repr(moor)


class Normalized(nn.Linear):
    def forward(self, x):
        return functional.normalize(super().forward(x), dim=-1)


def test_unit_vectors_are_inferred_as_embeddings():
    model = Normalized(3, 5)
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=list(torch.randn(4, 16, 3)))
    assert "outputs='embedding' (inferred)" in repr(moor)


LOSSES = {
    "classes": lambda z, y: functional.cross_entropy(z, y.argmax(1)),
    "labels": lambda z, y: functional.binary_cross_entropy_with_logits(z, (y > 0).to(z), pos_weight=torch.tensor(3.0)),
    "values": lambda z, y: functional.mse_loss(z, y),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_kind_is_inferred_from_a_given_loss(loss):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    moor = mooring.attach(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        reference=[(x, torch.randn(16, 4)) for x in torch.randn(4, 16, 3)],
        loss=lambda model, batch: LOSSES[loss](model(batch[0]), batch[1]),
        pull=mooring.Budget(0.3),
    )
    assert f"outputs='{loss}' (inferred)" in repr(moor)


def first_step(outputs, loss, dtype=torch.float32, autocast=False, **options):
    """Return what the first step of training warns of, after a reference of inputs alone."""
    torch.manual_seed(0)
    model = nn.Linear(6, outputs).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, reference=list(torch.randn(4, 16, 6, dtype=dtype)), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                returned = model(torch.randn(32, 6, dtype=dtype))
                value = loss(returned, torch.randn(32, outputs).to(returned))
            value.backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if warning.category is UnheldWarning]


@pytest.mark.parametrize("outputs", [2, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_first_step_names_the_kind_that_the_loss_looks_like(outputs, dtype):
    (labels,) = first_step(outputs, LOSSES["labels"], dtype)
    assert "measured and distilled as classes" in labels
    assert 'kind="labels"' in labels
    (values,) = first_step(outputs, LOSSES["values"], dtype)
    assert 'kind="values"' in values
    for kind in ("labels", "values"):
        assert not first_step(outputs, LOSSES["classes"], dtype)
        assert not first_step(outputs, LOSSES[kind], dtype, kind="classes")
        assert not first_step(outputs, LOSSES[kind], dtype, kind=kind)


@pytest.mark.parametrize("weight", [1.0, 1e-6, 1e4])
def test_losses_that_do_not_see_a_constant_do_not_warn(weight):
    losses = [
        lambda z, y: functional.cross_entropy(z, y.argmax(1), label_smoothing=0.1, weight=torch.rand(5).to(z)),
        lambda z, y: functional.kl_div(z.log_softmax(1), y.softmax(1), reduction="batchmean"),
        lambda z, y: functional.multi_margin_loss(z.float(), y.argmax(1)),
        lambda z, y: functional.cross_entropy(z[:, 2:], y[:, 2:].argmax(1), reduction="sum"),
        lambda z, y: ((z.softmax(1) - y.softmax(1)) ** 2).mean(),
    ]
    for loss in losses:
        assert not first_step(5, lambda z, y, loss=loss: weight * loss(z, y))
    assert not first_step(5, LOSSES["classes"], autocast=True)


def test_z_loss_of_a_large_vocabulary_does_not_warn():
    def loss(z, y):
        return functional.cross_entropy(z, y.argmax(1)) + 1e-4 * z.logsumexp(1).square().mean()

    assert not first_step(1000, loss)


class Tagger(nn.Module):
    """A convolution over time, whose outputs are (batch, classes, time)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(3, 4, 3, padding=1)

    def forward(self, x):
        return self.layer(x)


def attach_tagger(reference, **options):
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, mooring.attach(model, optimizer, reference=reference, **options)


def test_class_dimension_is_inferred_from_labels():
    x, y = torch.randn(4, 16, 3, 9), torch.randint(4, (4, 16, 9))
    model, optimizer, moor = attach_tagger(list(zip(x, y, strict=True)))
    old = [model(part).detach() for part in x]
    functional.cross_entropy(model(x[0]), y[1]).backward()
    optimizer.step()  # without a warning
    with torch.no_grad():
        expected = torch.stack([softmax_divergence(old[index], model(x[index]), 1) for index in (0, 3)])
    assert moor.measured().nats == pytest.approx(float(expected.mean()), rel=1e-4)


def test_wrong_class_dimension_is_named_at_the_first_step():
    model, optimizer, _ = attach_tagger(list(torch.randn(4, 16, 3, 9)))
    functional.cross_entropy(model(torch.randn(16, 3, 9)), torch.randint(4, (16, 9))).backward()
    with pytest.warns(UnheldWarning, match=r"along dimension 1: give attach kind=mooring.kinds.Classes\(dimension=1\)"):
        optimizer.step()
    attach_tagger(list(torch.randn(4, 16, 3, 9)), kind=Classes(dimension=1))


@pytest.mark.parametrize(
    "kind", [Classes(1), Labels(), Values(), Embedding(similarity="dot")], ids=lambda kind: kind.name
)
def test_saved_state_contains_the_kind(kind):
    def moored(**options):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, mooring.attach(model, optimizer, **options)

    model, moor = moored(kind=kind, reference=list(torch.randn(4, 16, 3)))
    with torch.no_grad():
        model.weight.add_(0.1)
    other, resumed = moored()
    resumed.load_state_dict(moor.state_dict())
    other.load_state_dict(model.state_dict())
    assert moor.measured().nats > 0
    assert resumed.measured() == moor.measured()
    assert type(kind).__name__.lower() in repr(resumed)


def test_kinds_are_made_again_from_their_state():
    rows, _ = two_outputs(8, 4)
    for kind in (Classes(1), Labels(), Values().fitted([rows], [None]), Embedding().fitted([rows], [None])):
        again: OutputKind = type(kind)(**kind.state())
        torch.testing.assert_close(
            again.divergence(kind.store(rows), rows + 1), kind.divergence(kind.store(rows), rows + 1)
        )
