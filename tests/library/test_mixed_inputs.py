"""Tests of distillation on mixtures of reference inputs: what is mixed, what is added, what is saved and resumed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mooring
from mooring.reference.mixtures import MixedBatches
from mooring.testing.cases import check_equal

BATCHES, SIZE, CLASSES = 6, 6, 4
"""Of six batches the first and the fourth are the gauge, and four are distilled."""


def batches_of(seed, count=BATCHES):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, SIZE, generator=generator), torch.arange(8) % CLASSES) for _ in range(count)]


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 12), nn.Tanh(), nn.Linear(12, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def test_mixture_lies_between_an_input_of_the_batch_and_one_of_any_batch():
    batches = [torch.zeros(5, 2), torch.ones(3, 2)]
    mixed = MixedBatches(batches, rounds=20)
    assert len(mixed) == 42
    assert mixed[0] is batches[0]
    assert [len(mixed[index]) for index in range(2, 42)] == [5, 3] * 20
    values = torch.cat([mixed[index] for index in range(2, 42, 2)])
    assert torch.equal(values[:, 0], values[:, 1])  # one weight for each sample
    assert 0 <= values.min() < 0.1
    assert 0.8 < values.max() <= 1
    assert len(values.unique()) > 40
    again = MixedBatches(batches, rounds=20)
    assert all(torch.equal(mixed[index], again[index]) for index in range(42))
    with pytest.raises(IndexError):
        mixed[42]


@pytest.mark.parametrize(
    "batches",
    [
        [torch.ones(2, 3, dtype=torch.int64)],
        [{"input_ids": torch.ones(2, 3, dtype=torch.int64), "values": torch.ones(2, 3)}],
        [torch.ones(2, 3), torch.ones(2, 4)],
    ],
    ids=["tokens", "partly tokens", "unequal"],
)
def test_inputs_that_cannot_be_mixed_are_left_as_they_are(batches):
    assert len(MixedBatches(batches, rounds=3)) == len(batches)


def test_keyword_arguments_are_mixed_together_without_their_labels():
    batch = {"a": torch.randn(4, 3), "labels": torch.zeros(4, dtype=torch.int64)}
    batch["b"] = 2 * batch["a"]
    mixture = MixedBatches([batch], rounds=1)[1]
    assert set(mixture) == {"a", "b"}
    torch.testing.assert_close(mixture["b"], 2 * mixture["a"])


@pytest.mark.parametrize("distil", [None, "unmixed"])
def test_mixtures_are_distilled_after_the_inputs_themselves(distil):
    model, optimizer = make_model()
    original, reference = copy.deepcopy(model), batches_of(1)
    pull = mooring.Budget(1e6, distil=distil)
    mooring.attach(model, optimizer, pull=pull, reference=reference)
    train(model, optimizer, batches_of(2, 5))
    current, (x, y) = copy.deepcopy(model), batches_of(3, 1)[0]
    train(model, optimizer, [(x, y)])
    distilled = [half for index, (x, _) in enumerate(reference) if index % 3 for half in x.split(4)]
    old = MixedBatches(distilled, rounds=16)[5] if distil is None else distilled[5]
    p = original(old).softmax(1).detach()
    value = (p * (p.log() - current(old).log_softmax(1))).sum(1).mean()
    loss = cross_entropy(current(x), y)
    parameters = list(current.parameters())
    gradients = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(value, parameters), strict=True)
    for parameter, start, (task, added) in zip(model.parameters(), parameters, gradients, strict=True):
        torch.testing.assert_close(parameter, start - 0.05 * (task + added), rtol=1e-5, atol=1e-7)


def run(interrupt=None):
    """Train after a reference; save and load everything at step `interrupt`, when mixtures are distilled."""
    model, optimizer = make_model()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.01), reference=batches_of(1), memory=mooring.Memory())
    for step, (x, y) in enumerate(batches_of(2, 20)):
        if step == interrupt:
            saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, moor)]
            model, optimizer = make_model()
            moor = mooring.attach(model, optimizer)
            for part, state in zip((model, optimizer, moor), saved, strict=True):
                part.load_state_dict(state)
        train(model, optimizer, [(x, y)])
    moor.consolidate()
    train(model, optimizer, batches_of(3, 9))
    return {**model.state_dict(), **{f"moor.{name}": t for name, t in moor.state_dict().items()}}


@pytest.mark.parametrize("interrupt", [3, 9])
def test_killed_and_resumed_among_mixtures_equals_never_interrupted(interrupt):
    check_equal("resumed", run(interrupt), run())


def test_saved_state_has_predictions_for_mixtures_but_not_the_mixtures():
    sizes = {}
    for distil in (None, "unmixed"):
        model, optimizer = make_model()
        moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1, distil=distil), reference=batches_of(1))
        sizes[distil] = sum(t.numel() for name, t in moor.state_dict().items() if name.startswith("gauge."))
    assert sizes[None] - sizes["unmixed"] == 16 * 4 * 8 * CLASSES  # rounds, batches, samples, classes


def test_dense_predictions_are_not_stored_for_mixtures():
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = [(torch.randn(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)) for _ in range(6)]
    pull = mooring.Budget(0.1, distil=True)
    state = mooring.attach(model, optimizer, pull=pull, reference=reference).state_dict()
    assert len([name for name in state if name.startswith("gauge.distilled.") and "target" in name]) == 4
