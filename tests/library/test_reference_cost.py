"""Tests of what a reference costs: passes over its batches, copies of parameters, and memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mooring
from library.adapters.low_rank_nets import Adapted
from library.live_memory import peak_bytes
from mooring.curvature import observed_factors
from mooring.errors import MooringError
from mooring.reference import estimation, reference_labels
from mooring.reference.kinds import classes as divergence
from mooring.rules import Kronecker


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class TwoHeads(nn.Module):
    """Linear layers with the same input."""

    def __init__(self, inputs, *outputs):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(inputs, count) for count in outputs)

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)


def reference(count, labels=True):
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randint(3, (8,))) if labels else torch.randn(8, 6) for _ in range(count)]


def counted(model):
    """Count forward passes with and without gradients."""
    passes = {True: 0, False: 0}

    def count(*_):
        passes[torch.is_grad_enabled()] += 1

    model.register_forward_hook(count)
    return passes


def adapted_net():
    torch.manual_seed(0)
    return nn.Sequential(Adapted(nn.Linear(6, 8), 6, 8, rank=2), nn.Tanh(), Adapted(nn.Linear(8, 3), 8, 3, rank=2))


FISHER = mooring.EWC(decay=None, per_sample=True)
CONFIGURATIONS = {
    "diagonal": (net, {"importance": FISHER}),
    "lean": (net, {"importance": FISHER, "memory": mooring.Memory(previous="8bit", current="none")}),
    "kronecker": (net, {"importance": Kronecker()}),
    "product": (adapted_net, {"importance": FISHER}),
}


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_reference_of_an_estimated_budget_is_read_in_one_pass(name, labels):
    make, options = CONFIGURATIONS[name]
    model = make()
    passes = counted(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pull = mooring.Budget(0.1, measured=False)
    mooring.attach(model, optimizer, pull=pull, reference=reference(32, labels), **options)
    assert passes == {True: 32, False: 0}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_reference_of_a_measured_budget_is_read_in_one_pass(name):
    make, options = CONFIGURATIONS[name]
    model = make()
    passes = counted(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pull = mooring.Budget(0.1, distil=False)
    mooring.attach(model, optimizer, pull=pull, reference=reference(32, labels=False), **options)
    # importance; the gauge, two batches of it again to see their noise, and a batch and its half to see what they are
    assert passes == {True: 21, False: 11 + 2 + 2}


@pytest.mark.parametrize(("places", "of_biases"), [((), []), ((5,), [8, 3, 4])])
@pytest.mark.parametrize("measured", [True, False])
def test_each_factor_of_a_reference_is_decomposed_once(measured, places, of_biases, monkeypatch):
    """Layers with the same input have one A; a bias has the G of its weight if samples have a single place."""
    sizes, solve = [], torch.linalg.eigh

    def counted_solver(matrix):
        sizes.append(matrix.shape[-1])
        return solve(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", counted_solver)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), TwoHeads(8, 3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pull = mooring.Budget(0.1, measured=measured, **({"distil": False} if measured else {}))
    data = [torch.randn(8, *places, 6) for _ in range(4)]
    mooring.attach(model, optimizer, importance=Kronecker(), pull=pull, reference=data)
    assert sorted(sizes) == sorted([6, 8, 8, 3, 4, *of_biases])


@pytest.mark.parametrize(("distil", "distilled"), [(True, 21 * (1 + 13)), ("unmixed", 2 * 21), (False, 0)])
def test_reference_of_a_measured_budget_is_read_and_recorded_once(distil, distilled):
    """So are 13 mixtures of each batch, about 2,048 in all; without them, halves of batches are distilled."""
    model = net()
    passes, data = counted(model), reference(32, labels=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, pull=mooring.Budget(0.1, distil=distil), reference=data)
    assert passes[True] == 21
    # the gauge, of which two batches show that outputs are the same; a batch and its half show what they are
    assert passes[False] == 11 + 2 + 2 + distilled


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_reference_that_does_not_fit_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(estimation, "free_bytes", lambda device: 500)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def unread():
        raise AssertionError("read")
        yield

    with pytest.raises(MooringError, match=r"needs 0.0 GB on cpu besides activations, and 0.0 GB are free") as error:
        mooring.attach(model, optimizer, reference=unread())
    assert "\n" not in str(error.value)


def test_memory_estimate_counts_what_is_allocated():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=Kronecker(), pull=mooring.Budget(0.1, distil=False))
    estimated = estimation.estimated_bytes(moor._states)[torch.device("cpu")]
    moor.consolidate(data=reference(4))
    kept = sum(p.numel() * 4 for p in model.parameters())  # gradients
    for state in moor._states.records.values():
        tensors = [state.anchor, *state.factors.slots().values(), *state.factors.basis]
        kept += sum(t.numel() * t.element_size() for t in tensors)
    assert estimated == kept


class LanguageModel(nn.Module):
    """A small stack of linear layers between an embedding and a head."""

    def __init__(self, tokens=5000, width=32, hidden=64, depth=3):
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(depth)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def depthwise_network():
    layers = []
    for _ in range(3):
        layers += [nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, groups=32)]
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


INPUTS = {
    LanguageModel: lambda: torch.randint(5000, (8, 64)),
    depthwise_network: lambda: torch.randn(16, 8, 24, 24),
}


def adapted_language_model():
    """Return a model of which low-rank products beside one layer in six are trained, as usual beside q and v."""
    model = LanguageModel(**DEEP).requires_grad_(False)
    for layer in model.layers[::3]:
        layer[0] = Adapted(layer[0], 64, 192, rank=4)
    return model


DEEP = {"tokens": 200, "width": 64, "hidden": 192, "depth": 6}
"""Sizes with which training takes about nine times the memory of bfloat16 parameters, as Llama 1.1 B with 4 x 1024."""


def trained_and_attached(model, batches, options):
    """Return the peak of live bytes in two training steps with Adam, and in attach after them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def train():
        for batch in batches[:2]:
            optimizer.zero_grad()
            logits = model(batch).flatten(0, -2).float()
            cross_entropy(lambda x: x, (logits, torch.zeros(len(logits), dtype=torch.int64))).backward()
            optimizer.step()

    def existing():
        state = (t for own in optimizer.state.values() for t in own.values())
        return [*model.parameters(), *model.buffers(), *state]

    train()  # Adam's state exists from here on
    of_training = peak_bytes(train, existing())
    optimizer.zero_grad()
    return of_training, peak_bytes(
        lambda: mooring.attach(model, optimizer, reference=batches, **options).detach(), existing()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "measured"), [("lean", True), ("lean", False), ("product", True), ("product", False)])
def test_attach_to_bfloat16_takes_little_more_memory_than_training(name, measured, monkeypatch):
    """Of large models labels are drawn and outputs kept in parts."""
    monkeypatch.setattr(divergence, "MAX_CLASSES", 64)
    monkeypatch.setattr(divergence, "MAX_STORED", 0)
    monkeypatch.setattr(divergence, "TOP_CLASSES", 4)
    monkeypatch.setattr(divergence, "DRAWN_CLASSES", 4)
    monkeypatch.setattr(reference_labels, "MAX_PROBABILITIES", 1 << 12)
    torch.manual_seed(0)
    model = LanguageModel(**DEEP) if name == "lean" else adapted_language_model()
    batches = [torch.randint(200, (2, 128)) for _ in range(4)]
    pull = mooring.Budget(0.1, distil=False) if measured else mooring.Budget(0.1, measured=False)
    options = {**CONFIGURATIONS[name][1], "pull": pull}
    of_training, of_attach = trained_and_attached(model.to(torch.bfloat16), batches, options)
    assert of_attach < 1.1 * of_training


def test_reference_is_read_without_caches_of_keys_and_values():
    class Caching(nn.Linear):
        config = SimpleNamespace(use_cache=True)

        def forward(self, x):
            used.append(self.config.use_cache)
            return super().forward(x)

    used, model = [], Caching(6, 3)
    mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=reference(4, labels=False))
    assert used
    assert not any(used)
    assert model.config.use_cache


def test_rounded_mean_of_few_batches_gives_the_same_energy():
    """The mean of a bfloat16 model that is kept in eight bits is rounded, which sums over weights do not show."""
    energies = []
    for previous in ("8bit", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = mooring.Memory(previous=previous, current="none")
        pull = mooring.Budget(0.1, distil=False)
        batches = [torch.randn(16, 64).to(torch.bfloat16) for _ in range(32)]
        moor = mooring.attach(model, optimizer, importance=FISHER, pull=pull, memory=memory, reference=batches)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))
        energies.append(moor.pull_energy())
    assert energies[0] == pytest.approx(energies[1], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"measured": False}], ids=["measured", "estimated"])
@pytest.mark.parametrize("importance", [mooring.EWC(decay=None, per_sample=True), Kronecker()], ids=repr)
@pytest.mark.parametrize("make", INPUTS)
def test_attach_takes_little_more_memory_than_training(make, importance, options, monkeypatch):
    """Large models take windows of images in parts; so do these miniatures."""
    monkeypatch.setattr(observed_factors, "MAX_WINDOWS", 1 << 17)
    torch.manual_seed(0)
    model, batches = make(), [INPUTS[make]() for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    state, labels = [*model.parameters(), *model.buffers()], batches[0].numel() if make is LanguageModel else 16

    def attach():
        pull = mooring.Budget(0.1, **options)
        mooring.attach(model, optimizer, importance=importance, pull=pull, reference=batches).detach()

    def train():
        for batch in batches[:2]:
            optimizer.zero_grad()
            cross_entropy(lambda x: model(x).flatten(0, -2), (batch, torch.zeros(labels, dtype=torch.int64))).backward()
            optimizer.step()

    of_attach = peak_bytes(attach, state)
    assert of_attach < 1.1 * peak_bytes(train, state)
