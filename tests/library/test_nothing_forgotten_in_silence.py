"""Ordinary situations in which a budget was reported as kept while the model had forgotten: each warns, or is right.

Nothing is named but the reference. What is true is computed on old inputs that nothing was measured or trained on.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import mooring
from mooring.errors import UnheldWarning

SIZE = 8


@dataclass
class Ending:
    """What is known after a model was trained on.

    Attributes:
        warned: the warnings about what nothing holds.
        model: the model.
        original: what it was.
        reported: what `finish()` measured.
        moor: its Mooring.
    """

    warned: list[str]
    model: nn.Module
    original: nn.Module
    reported: float
    moor: mooring.Mooring


def learn(model: nn.Module, batches: Any, loss: Callable[..., Tensor], optimizer: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def fine_tune(
    model: nn.Module,
    old: Callable[[int], Any],
    new: Callable[[int], Any],
    criterion: Callable[..., Tensor],
    reference: Any,
    steps: int = 150,
    **options: Any,
) -> Ending:
    """Train a model on the old task, then on the new one with a reference, and end the task."""
    learn(model, (old(seed) for seed in range(300)), criterion, torch.optim.Adam(model.parameters(), lr=3e-3))
    original = copy.deepcopy(model).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moor = mooring.attach(model, optimizer, reference=reference, progress=False, **options)
        learn(model, (new(seed) for seed in range(steps)), criterion, optimizer)
        reported = moor.finish().nats
    warned = [str(warning.message) for warning in caught if warning.category is UnheldWarning]
    return Ending(warned, model.eval(), original, reported, moor)


def mlp(outputs: int, inputs: int = SIZE) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


def inputs_of(seed: int, rows: int = 32) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))


def rule(outputs: int, seed: int) -> Tensor:
    return torch.randn(SIZE, outputs, generator=torch.Generator().manual_seed(seed))


FRESH = 10_000
"""The seed of inputs that nothing else has seen."""


def coins(old: Tensor, new: Tensor) -> float:
    p = old.sigmoid()
    value = functional.binary_cross_entropy_with_logits(new, p) - functional.binary_cross_entropy_with_logits(old, p)
    return float(value) * old.shape[1]


def softmax_divergence(old: Tensor, new: Tensor, dimension: int = 1) -> Tensor:
    p = old.softmax(dimension)
    return (p * (old.log_softmax(dimension) - new.log_softmax(dimension))).sum(dimension)


@pytest.mark.parametrize("labels", ["float", "int", "none"])
def test_six_tags(labels):
    def task(seed_of_rule):
        def batch(seed):
            x = inputs_of(seed)
            return x, (x @ rule(6, seed_of_rule) > 0).float()

        return batch

    old, new = task(1), task(2)
    data = [old(1000 + seed) for seed in range(8)]
    forms = {"float": data, "int": [(x, y.long()) for x, y in data], "none": [x for x, _ in data]}
    loss = functional.binary_cross_entropy_with_logits
    end = fine_tune(mlp(6), old, new, loss, forms[labels])
    x = inputs_of(FRESH, 500)
    if labels == "none":
        assert any('kind="labels"' in line for line in end.warned)
        return
    assert not end.warned
    with torch.no_grad():
        true = coins(end.original(x), end.model(x))
    assert end.reported <= 0.1 * (1 + 1e-4)
    assert true <= 0.15


@pytest.mark.parametrize("labels", [True, False])
def test_regression_with_two_outputs(labels):
    """Its old squared error rose from .01 to 24.9 while .0015 nats were reported."""

    def task(seed_of_rule):
        return lambda seed: (inputs_of(seed), torch.sin(inputs_of(seed) @ rule(2, seed_of_rule)))

    old, new = task(1), task(2)
    data = [old(1000 + seed) for seed in range(8)]
    end = fine_tune(mlp(2), old, new, functional.mse_loss, data if labels else [x for x, _ in data])
    if not labels:
        assert any('kind="values"' in line for line in end.warned)
        return
    assert not end.warned
    x, y = old(FRESH)
    with torch.no_grad():
        errors = [float(functional.mse_loss(model(x), y)) for model in (end.original, end.model)]
    assert errors[1] <= 1.5 * errors[0]  # a fifth is allowed on the gauge


@pytest.mark.parametrize("shape", [(64,), (1, 8, 8)])
def test_autoencoder_whose_loader_gives_digits(shape):
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64))

        def forward(self, x):
            return self.net(x).view_as(x)

    basis = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))

    def task(number):
        def batch(seed):
            generator = torch.Generator().manual_seed(seed)
            x = (torch.randn(32, 4, generator=generator) @ basis[number]).view(32, *shape)
            return x, torch.randint(10, (32,), generator=generator)

        return batch

    torch.manual_seed(0)
    data = [task(0)(1000 + seed) for seed in range(8)]
    model = Autoencoder()

    def loss(outputs, targets):
        return functional.mse_loss(outputs, targets)

    def same(batches):
        return lambda seed: (batches(seed)[0],) * 2

    end = fine_tune(model, same(task(0)), same(task(1)), loss, data)
    if len(shape) == 1:
        assert any('kind="values"' in line for line in end.warned)
        return
    assert not end.warned
    x = task(0)(FRESH)[0]
    with torch.no_grad():
        drift = (end.model(x) - end.original(x)).square().mean() / end.original(x).var()
    assert drift <= 1.5 * 0.02  # 0.1 nats of a tenth of the variance


def test_denoiser_with_float_pairs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 1, 3, padding=1))

    def task(blur):
        def batch(seed):
            clean = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
            return clean + 0.1 * clean.roll(1, 0), clean.roll(blur, 3)

        return batch

    end = fine_tune(model, task(0), task(1), functional.mse_loss, [task(0)(1000 + seed) for seed in range(8)])
    assert not end.warned
    x, y = task(0)(FRESH)
    with torch.no_grad():
        errors = [float(functional.mse_loss(model(x), y)) for model in (end.original, end.model)]
    assert errors[1] <= 1.5 * errors[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(8)

    def forward(self, x):
        return functional.normalize(self.net(x), dim=1)


def test_unit_norm_embedding_still_finds_its_neighbours_in_the_old_index():
    """Retrieval in the old index fell from 1.00 to .45 while .009 nats were reported."""

    def contrast(outputs, other):
        return functional.cross_entropy(outputs @ outputs.detach().roll(1, 0).T / 0.2, other)

    def task(shift):
        return lambda seed: (inputs_of(seed), (torch.arange(32) + shift) % 32)

    data = [inputs_of(1000 + seed) for seed in range(8)]
    end = fine_tune(Encoder(), task(1), task(9), contrast, data)
    x = inputs_of(FRESH, 200)
    with torch.no_grad():
        index, queries = end.original(x), end.model(x + 0.05 * inputs_of(FRESH + 1, 200))
        before = end.original(x + 0.05 * inputs_of(FRESH + 1, 200))
    own = torch.arange(200)
    recalls = [float(((rows @ index.T).argmax(1) == own).float().mean()) for rows in (before, queries)]
    assert not end.warned
    assert recalls[1] >= recalls[0] - 0.1


@pytest.mark.parametrize("labels", [True, False])
def test_tagger_with_classes_before_time(labels):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv1d(16, 4, 3, padding=1))
    weights = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))

    def task(number):
        def batch(seed):
            x = torch.randn(16, 3, 9, generator=torch.Generator().manual_seed(seed))
            return x, torch.einsum("ck,bkt->bct", weights[number], x).argmax(1)

        return batch

    data = [task(0)(1000 + seed) for seed in range(8)]
    end = fine_tune(model, task(0), task(1), functional.cross_entropy, data if labels else [x for x, _ in data])
    if not labels:
        assert any("Classes(dimension=1)" in line for line in end.warned)
        return
    assert not end.warned
    x = task(0)(FRESH)[0]
    with torch.no_grad():
        true = float(softmax_divergence(end.original(x), end.model(x)).mean())
    assert end.reported <= 0.1 * (1 + 1e-4)
    assert true <= 0.15


def classes_task(seed_of_rule, outputs=4):
    return lambda seed: (inputs_of(seed), (inputs_of(seed) @ rule(outputs, seed_of_rule)).argmax(1))


def test_restored_best_checkpoint_is_not_replaced_by_the_average():
    """The best weights became the average of the last steps: new accuracy .966 to .408."""
    model, old, new = mlp(4), classes_task(1), classes_task(2)
    learn(model, (old(seed) for seed in range(100)), functional.cross_entropy, torch.optim.Adam(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    budget = mooring.Budget(100.0, average=True)
    moor = mooring.attach(model, optimizer, reference=[old(1000 + seed)[0] for seed in range(8)], pull=budget)
    best = {name: t.clone() for name, t in model.state_dict().items()}
    learn(model, (new(seed) for seed in range(150)), functional.cross_entropy, optimizer)
    model.load_state_dict(best)
    end = moor.finish()
    assert end.ending == ""
    assert all(torch.equal(t, best[name]) for name, t in model.state_dict().items())
    learn(model, (new(seed) for seed in range(150)), functional.cross_entropy, optimizer)
    assert moor.finish().ending == "the average of the last steps"


def test_loader_sorted_by_class_is_read_as_a_whole():
    """The first 32 batches had a class or two, and the others were forgotten: KL 2.85."""
    old, new = classes_task(1), classes_task(2)
    x = inputs_of(1000, 2000)
    y = (x @ rule(4, 1)).argmax(1)
    order = y.argsort()
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=16)
    end = fine_tune(mlp(4), old, new, functional.cross_entropy, loader)
    assert not end.warned
    fresh = inputs_of(FRESH, 1000)
    with torch.no_grad():
        true = float(softmax_divergence(end.original(fresh), end.model(fresh)).mean())
    assert true <= 0.15


@pytest.mark.parametrize("ordered", [True, False])
def test_stream_sorted_by_class_warns(ordered):
    x = inputs_of(1000, 2000)
    y = (x @ rule(4, 1)).argmax(1)
    order = y.argsort() if ordered else torch.arange(2000)

    def stream():
        for start in range(0, 2000, 16):
            yield x[order[start : start + 16]], y[order[start : start + 16]]

    model = mlp(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=stream())
    assert [("first 32 batches" in str(warning.message)) for warning in caught] == [True] * ordered


class TokenTagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 16, padding_idx=0), nn.Linear(16, 3)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def test_padding_of_a_tagger_does_not_count():
    def batch(seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 20, (16, 24), generator=generator)
        ids[:, 4:] = 0  # five sixths are padding
        return ids, (ids % 3).masked_fill(ids == 0, -1)

    def new_batch(seed):
        ids, _ = batch(seed)
        return ids, ((ids + 1) % 3).masked_fill(ids == 0, -1)

    def loss(outputs, labels):
        return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-1)

    data = [batch(1000 + seed)[0] for seed in range(8)]
    end = fine_tune(TokenTagger(), batch, new_batch, loss, data)
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        true = float(softmax_divergence(end.original(ids), end.model(ids), 2).mean())
    assert true <= 0.15
    labelled = TokenTagger()
    data = [batch(1000 + seed) for seed in range(8)]
    data = [(ids, labels.clamp(min=0)) for ids, labels in data]  # of padding, class 0
    moor = mooring.attach(labelled, torch.optim.SGD(labelled.parameters(), lr=0.1), reference=data)
    ids = data[0][0][:, :4]
    with torch.no_grad():
        old = labelled(ids)
        labelled.embedding.weight[1:] += torch.randn(19, 16, generator=torch.Generator().manual_seed(0))
        expected = softmax_divergence(old, labelled(ids), 2).mean()
    assert moor.measured().nats == pytest.approx(float(expected), rel=0.3)  # 6 times as much as with padding


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_loss_in_units_of_its_own_warns_of_a_default_budget(scale):
    def task(seed_of_rule):
        return lambda seed: (inputs_of(seed), scale * torch.sin(inputs_of(seed) @ rule(2, seed_of_rule)))

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(2)

        def forward(self, x):
            return scale * self.net(x)

    def given(model, batch):
        return functional.mse_loss(model(batch[0]), batch[1])

    data = [task(1)(1000 + seed) for seed in range(8)]
    end = fine_tune(Scaled(), task(1), task(2), functional.mse_loss, data, steps=10, loss=given)
    assert any("units: name one in its unit, such as pull=mooring.Budget(" in line for line in end.warned)
    fitting = mooring.Budget(1e-3 * scale**2)
    end = fine_tune(Scaled(), task(1), task(2), functional.mse_loss, data, steps=10, loss=given, pull=fitting)
    assert not end.warned
    end = fine_tune(Scaled(), task(1), task(2), functional.mse_loss, data)
    x, y = task(1)(FRESH)
    with torch.no_grad():
        errors = [float(functional.mse_loss(model(x), y)) for model in (end.original, end.model)]
    assert not end.warned
    assert errors[1] <= 1.5 * errors[0]


def test_four_thousand_classes_of_nearly_equal_probability():
    """.043 nats were reported where .190 are true, because all but 64 classes counted as one."""
    model, generator = mlp(4000), torch.Generator().manual_seed(0)
    reference = [inputs_of(1000 + seed) for seed in range(9)]
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=reference)
    held_out = torch.cat(reference[::3])
    with torch.no_grad():
        old = model(held_out)
        model[2].weight += 0.2 * torch.randn(model[2].weight.shape, generator=generator)
        expected = float(softmax_divergence(old, model(held_out)).mean())
    assert moor.measured().nats == pytest.approx(expected, rel=0.05)


class Queue(nn.Module):
    """A model that keeps its last inputs in a buffer, counts its passes, and draws numbers."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4)
        self.register_buffer("queue", torch.zeros(64, SIZE))
        self.passes = 0
        self.names = []

    def forward(self, x):
        self.queue = torch.cat([self.queue, x.detach()])[-64:]
        self.passes += 1
        self.names.append(len(x))
        return self.net(x) + 0 * torch.rand(())


def test_buffers_that_a_pass_updates_see_only_training():
    model, new = Queue(), classes_task(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, reference=[inputs_of(1000 + seed) for seed in range(8)])
    assert model.passes == 0
    torch.manual_seed(5)
    learn(model, (new(seed) for seed in range(20)), functional.cross_entropy, optimizer)
    drawn = torch.rand(())
    assert torch.equal(model.queue, torch.cat([new(18)[0], new(19)[0]]))
    assert (model.passes, model.names) == (20, [32] * 20)
    torch.manual_seed(5)
    for _ in range(20):
        torch.rand(())
    assert torch.equal(drawn, torch.rand(()))


def test_generator_with_one_preallocated_tensor():
    memory = torch.empty(32, SIZE)

    def stream():
        for seed in range(9):
            memory.copy_(inputs_of(1000 + seed))
            yield memory

    values = []
    for reference in (stream(), [inputs_of(1000 + seed) for seed in range(9)]):
        model = mlp(4)
        moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=reference)
        with torch.no_grad():
            model[2].weight.mul_(2)
        values.append(moor.measured())
    assert values[0] == values[1]


def test_transformers_multi_label_classification():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(
        **size, vocab_size=12, num_labels=6, problem_type="multi_label_classification", hidden_dropout_prob=0.0
    )
    model = transformers.BertForSequenceClassification(config)

    def task(shift):
        def batch(seed):
            ids = torch.randint(1, 12, (16, 6), generator=torch.Generator().manual_seed(seed))
            present = torch.stack([(ids == tag + shift).any(1) for tag in range(1, 7)], 1).float()
            return {"input_ids": ids, "labels": present}

        return batch

    def train(batches, optimizer):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

    train((task(0)(seed) for seed in range(200)), torch.optim.Adam(model.parameters(), lr=3e-3))
    fresh = task(0)(FRESH)
    with torch.no_grad():
        old = model.eval()(**fresh).logits
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-3)
    moor = mooring.attach(model, optimizer, reference=[task(0)(1000 + seed) for seed in range(12)])
    assert "outputs='labels'" in repr(moor)
    train((task(3)(seed) for seed in range(100)), optimizer)
    assert moor.finish().nats <= 0.1 * (1 + 1e-4)
    with torch.no_grad():
        assert coins(old, model.eval()(**fresh).logits) <= 0.25  # of 16 fresh texts
