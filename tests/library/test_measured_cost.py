"""Tests of what a measured budget costs in a step: waits for the device, passes, and memory."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mooring
from mooring.backends import budget_solver
from mooring.curvature import kronecker_factors
from mooring.hold.measure import Gauge
from mooring.reference.batches import placed
from mooring.reference.pass_cost import DISTILLATION, distillation_schedule
from waiting import waiting_refused

SIZE, CLASSES = 6, 4


def data(seed, count=8):
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(SIZE, CLASSES, generator=generator)
    inputs = [torch.randn(16, SIZE, generator=generator) for _ in range(count)]
    return [(x, (x @ rule).argmax(1)) for x in inputs]


def moored(device="cpu", nats=1e-4, reference=None, kind=torch.optim.SGD, importance=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 24), nn.ReLU(), nn.Linear(24, CLASSES)).to(device)
    optimizer = kind(model.parameters(), lr=0.1)
    rules = {"pull": mooring.Budget(nats, **options)} | ({"importance": importance} if importance else {})
    moor = mooring.attach(model, optimizer, reference=reference or data(1), progress=False, **rules)
    return model, optimizer, moor


def step(model, optimizer, batch):
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


class LanguageModel(nn.Module):
    """A model that takes a mapping, and computes a loss if it gets labels, or needs them."""

    def __init__(self, needs_labels):
        super().__init__()
        self.embedding, self.needs_labels = nn.Embedding(8, 8), needs_labels

    def forward(self, input_ids, labels=None):
        logits = self.embedding(input_ids)
        if self.needs_labels:
            logits = logits + self.embedding(labels)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("needs_labels", [False, True])
def test_loss_of_the_model_is_computed_on_the_gauge_only_where_outputs_need_the_labels(needs_labels):
    torch.manual_seed(0)
    model, tokens = LanguageModel(needs_labels), torch.randint(8, (4, 5))
    gauge = Gauge([{"input_ids": tokens, "labels": tokens}] * 3)
    losses = []
    model.register_forward_hook(lambda model, args, returned: losses.append("loss" in returned))
    gauge.record(model)
    assert gauge.measure(model).nats == 0
    assert sum(losses) == (6 if needs_labels else 1)  # one pass finds out


def count_samples(model, optimizer, batches):
    """Return the number of samples in passes of the gauge with a gradient, and in those of training."""
    counts = [0, 0]

    def hook(model, args, returned):
        counts[model.training] += len(returned) if torch.is_grad_enabled() else 0

    handle = model.register_forward_hook(hook)
    for batch in batches:
        step(model, optimizer, batch)
    handle.remove()
    return counts


@pytest.mark.parametrize(("distil", "part"), [(None, DISTILLATION.price), (True, 1.0), (False, 0.0)])
def test_distillation_costs_the_stated_part_of_the_passes_of_training(distil, part):
    model, optimizer, _ = moored(distil=distil)
    distilled, trained = count_samples(model, optimizer, data(2) * 3)
    assert distilled <= part * trained
    assert distilled >= 0.5 * part * trained


def test_batches_that_cannot_be_split_are_distilled_less_often():
    model, whole = nn.Linear(2, 2), [{"x": torch.zeros(4, 2), "shift": torch.zeros(1, 2)}]
    parts, every = distillation_schedule(model, whole)
    assert parts == whole
    assert every >= 1 / DISTILLATION.price
    assert [len(x) for x, _ in distillation_schedule(model, [(torch.zeros(3, 2), torch.zeros(3))])[0]] != [3]
    assert distillation_schedule(model, []) == ([], 1)


def test_every_step_distils_so_many_samples_that_their_gradient_is_no_noise():
    parts, every = distillation_schedule(nn.Linear(2, 2), [torch.zeros(32, 2)] * 2)
    assert ([len(part) for part in parts], every) == ([DISTILLATION.fewest] * 4, 1)
    model, optimizer, _ = moored(kind=torch.optim.AdamW)
    distilled, trained = count_samples(model, optimizer, data(2) * 3)
    assert distilled == DISTILLATION.price * trained


def test_measurement_has_arrived_when_it_is_read():
    model, optimizer, moor = moored()
    for _ in range(3):
        for batch in data(2):
            step(model, optimizer, batch)
    running = moor.running_forgetting
    assert running is not None
    assert running > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("distil", [False, True, None])
def test_on_a_gpu_a_measured_budget_makes_nothing_wait(distil, kind):
    model, optimizer, moor = moored("cuda", kind=kind, distil=distil, average=True)
    batches = [(x.cuda(), y.cuda()) for x, y in data(2)]
    for _ in range(5):
        for batch in batches:
            step(model, optimizer, batch)
    with waiting_refused():
        for batch in batches * 3:
            step(model, optimizer, batch)
    assert moor.running_forgetting is not None


@pytest.mark.gpu
def test_batches_that_are_too_large_for_the_gpu_are_pinned_and_make_nothing_wait(monkeypatch):
    monkeypatch.setattr("mooring.reference.batches.RESIDENT_PART", 0.0)
    (first, *_) = placed(data(1), torch.device("cuda", 0))
    assert all(t.is_pinned() for t in first)
    test_on_a_gpu_a_measured_budget_makes_nothing_wait(True, torch.optim.SGD)


@pytest.mark.gpu
def test_gpu_and_cpu_adjust_the_budget_equally():
    results = []
    for device in ("cpu", "cuda"):
        model, optimizer, moor = moored(device, nats=0.01)
        for x, y in data(2) * 3:
            step(model, optimizer, (x.to(device), y.to(device)))
        results.append(({k: v.cpu() for k, v in model.state_dict().items()}, moor.running_forgetting))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-2)
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, results[1][0][name], rtol=1e-2, atol=1e-4)


@pytest.mark.gpu
def test_distilling_a_large_vocabulary_needs_no_more_memory_than_training():
    torch.manual_seed(0)
    vocabulary, width, tokens = 50_000, 64, torch.randint(50_000, (4, 512), device="cuda")
    body = nn.Sequential(nn.Embedding(vocabulary, width), nn.Linear(width, width), nn.Linear(width, vocabulary))
    model = body.to("cuda", torch.bfloat16)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    plain = copy.deepcopy(model)
    peaks = []
    for trained in (plain, model):
        optimizer = torch.optim.SGD(trained[1].parameters(), lr=0.01)
        if trained is model:
            mooring.attach(
                model, optimizer, pull=mooring.Budget(0.1, distil=True), reference=[(tokens[:, :-1], tokens[:, 1:])] * 4
            )
        for number in range(3):
            if number:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            cross_entropy(trained(tokens).float().flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.05 * peaks[0]


@pytest.mark.parametrize("importance", [mooring.Kronecker(), mooring.EWC(decay=None, per_sample=True)])
def test_pull_that_does_not_act_is_not_computed(importance, monkeypatch):
    """Distillation holds the budget, so no eigenbasis is needed and no step solves for a multiplier."""
    decomposed, decompose = [], kronecker_factors.eigenbases
    monkeypatch.setattr(kronecker_factors, "eigenbases", lambda own: decomposed.extend(own) or decompose(own))
    solutions, solve = [], budget_solver.budget_solved
    monkeypatch.setattr(budget_solver, "budget_solved", lambda *given: solutions.append(solve(*given)) or solutions[-1])
    model, optimizer, moor = moored(nats=1e-9, importance=importance)
    for batch in data(3):
        step(model, optimizer, batch)
    assert not decomposed
    assert not solutions
    assert len(moor.coverage().held) == 4


class Caching(nn.Module):
    """A model with a configuration as those of transformers have it."""

    def __init__(self):
        super().__init__()
        self.layer, self.config = nn.Linear(SIZE, CLASSES), SimpleNamespace(use_cache=True)

    def forward(self, x):
        return self.layer(x)


def test_passes_of_distillation_keep_no_cache():
    torch.manual_seed(0)
    model = Caching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mooring.attach(model, optimizer, pull=mooring.Budget(0.1), reference=data(1), progress=False)
    cached = []
    model.register_forward_pre_hook(lambda model, args: cached.append((model.training, model.config.use_cache)))
    for batch in data(3):
        step(model, optimizer, batch)
    assert {use for training, use in cached if not training} == {False}
    assert {use for training, use in cached if training} == {True}
    assert model.config.use_cache
