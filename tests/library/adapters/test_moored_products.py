"""Tests of low-rank layers moored through their product, by the public protocol."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mooring
from library.adapters.low_rank_nets import Adapted, QuantizedLinear, adapted_net, batches, train, trainable
from mooring.curvature import LowRank, Product, product_factors
from mooring.errors import MooringError, UnheldWarning
from mooring.reference.estimation import estimated_bytes
from mooring.rules import Kronecker

CURVATURE = mooring.EWC(decay=None, per_sample=True)


def moored(model, *, data=None, lr=0.05, **options):
    optimizer = torch.optim.Adam(trainable(model), lr=lr)
    return optimizer, mooring.attach(model, optimizer, reference=data or batches(), **options)


def captured(model, data):
    """Return the mean input and gradient factors of each adapted layer, from hooks and autograd alone."""
    layers = [module for module in model if isinstance(module, Adapted)]
    factors = {layer: [0.0, 0.0] for layer in layers}
    for x, y in data:
        kept = {}
        for layer in layers:

            def hook(module, args, output, kept=kept):
                output.retain_grad()
                kept[module] = args[0].detach(), output

            handle = layer.register_forward_hook(hook)
            handle_list = kept.setdefault("handles", [])
            handle_list.append(handle)
        nn.functional.cross_entropy(model(x), y).backward()
        for handle in kept.pop("handles"):
            handle.remove()
        for layer, (a, output) in kept.items():
            g = output.grad * len(x)  # the gradient of a single sample
            factors[layer][0] += a.T @ a / len(x) / len(data)
            factors[layer][1] += g.T @ g / len(x) / len(data)
    return factors


def test_spent_energy_equals_the_dense_energy_of_the_products():
    model = adapted_net().double()
    data = batches(dtype=torch.float64)
    factors = captured(model, data)
    for p in model.parameters():
        p.grad = None
    _, moor = moored(model, data=data, adapters=Product(damping=0.3), pull=mooring.Budget(0.01, measured=False))
    with torch.no_grad():
        for p in trainable(model):
            p.add_(0.1 * torch.randn_like(p))
    expected = 0.0
    for layer, (inputs, outputs) in factors.items():
        d = layer.scale * layer.up.detach() @ layer.down.detach()
        outputs = outputs + 0.3 * outputs.diagonal().mean() * torch.eye(len(outputs), dtype=outputs.dtype)
        expected += float(torch.trace(outputs @ d @ inputs @ d.T)) / 2
    assert moor.pull_energy() == pytest.approx(expected, rel=1e-10)


def test_both_factors_are_held_through_their_product():
    _, moor = moored(adapted_net())
    assert {entry.how for entry in moor.coverage().held} == {"product"}
    assert len(moor.coverage().held) == 4
    assert not moor.coverage().unheld


def test_budget_is_kept_and_used_while_both_factors_move():
    model = adapted_net()
    optimizer, moor = moored(model, pull=mooring.Budget(0.01, measured=False))
    before = model[0].down.detach().clone()
    train(model, optimizer, batches(40, seed=5))
    assert 0.0099 <= moor.pull_energy() <= 0.01 * (1 + 1e-5)
    assert (model[0].down - before).abs().max() > 0.01


def test_nothing_is_pulled_within_the_budget():
    models = [adapted_net(), adapted_net()]
    optimizers = [
        torch.optim.Adam(trainable(models[0]), lr=1e-3),
        moored(models[1], lr=1e-3, pull=mooring.Budget(1.0, measured=False))[0],
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(4, seed=6))
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


def test_reference_leaves_the_model_bit_identical():
    model = adapted_net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    moored(model)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"importance": Kronecker(), "memory": mooring.Memory()}])
def test_second_task_keeps_the_product_of_the_first(options):
    model = adapted_net()
    optimizer, moor = moored(model, pull=mooring.Budget(0.02, measured=False), **options)
    train(model, optimizer, batches(30, seed=7))
    moor.consolidate()
    assert moor.tasks == 2
    assert moor.pull_energy() == 0
    train(model, optimizer, batches(60, seed=8))
    assert 0 < moor.pull_energy() <= 0.04 * (1 + 1e-5)


def test_products_that_turned_away_are_moved_back_until_the_budget_is_kept():
    model = adapted_net()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.up.normal_()
    optimizer, moor = moored(model, pull=mooring.Budget(0.05, measured=False))
    with torch.no_grad():  # other directions: no B brings the old product back
        for layer in (model[0], model[2]):
            layer.down.normal_()
    with pytest.warns(UnheldWarning, match="changed between the last task"):
        train(model, optimizer, batches(1, seed=10))
    assert 0 < moor.pull_energy() <= 0.05 * (1 + 1e-5)


def test_wide_sides_have_blocks():
    model = adapted_net()
    _, moor = moored(model, adapters=Product(largest=4))
    shapes = {key: tuple(t.shape) for key, t in moor.state_dict().items() if key.startswith("past_")}
    assert shapes["past_inputs.0.up"] == (4, 4)
    assert shapes["past_outputs.0.up"] == (2, 3, 3)
    assert shapes["past_inputs.2.up"] == (2, 3, 3)
    assert shapes["past_outputs.2.up"] == (3, 3)


def test_blocks_are_parts_of_the_matrices_and_the_widest_sides_have_diagonals():
    matrices = []
    for largest in (100, 8, 1):
        torch.manual_seed(0)
        model = Adapted(nn.Linear(20, 9), 20, 9, 2)
        _, moor = moored(model, data=batches(ins=20, classes=9), adapters=Product(largest=largest))
        matrices.append(moor.state_dict()["past_inputs.up"])
    assert [tuple(t.shape) for t in matrices] == [(20, 20), (3, 7, 7), (20,)]
    torch.testing.assert_close(matrices[1][1], matrices[0][7:14, 7:14])
    torch.testing.assert_close(matrices[1][2, :6, :6], matrices[0][14:, 14:])
    assert not matrices[1][2, 6].any()
    torch.testing.assert_close(matrices[2], matrices[0].diagonal())


@pytest.mark.parametrize("largest", [2048, 4, 1])
def test_budget_is_kept_with_wide_sides(largest):
    model = adapted_net()
    optimizer, moor = moored(model, adapters=Product(largest=largest), pull=mooring.Budget(0.01, measured=False))
    train(model, optimizer, batches(30, seed=5))
    assert 0.0098 <= moor.pull_energy() <= 0.01 * (1 + 1e-5)


def test_factors_can_be_kept_narrower():
    model = adapted_net()
    options = {"adapters": Product(dtype=torch.bfloat16), "pull": mooring.Budget(0.01, measured=False)}
    optimizer, moor = moored(model, **options)
    assert moor.state_dict()["past_inputs.0.up"].dtype == torch.bfloat16
    train(model, optimizer, batches(30, seed=5))
    assert 0.0095 <= moor.pull_energy() <= 0.0105
    other = mooring.attach(model, torch.optim.Adam(trainable(model)))
    other.load_state_dict(moor.state_dict())
    assert other.state_dict()["past_inputs.0.up"].dtype == torch.bfloat16
    assert other.pull_energy() == moor.pull_energy()


def test_state_with_factors_in_eight_bits_is_refused_in_one_line():
    model = adapted_net()
    _, moor = moored(model)
    state = moor.state_dict()
    header = json.loads(bytes(state["mooring"].tolist()))
    header["adapters"]["dtype"] = "8bit"
    state["mooring"] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    other = mooring.attach(model, torch.optim.Adam(trainable(model)))
    with pytest.raises(MooringError, match=r'Product\(dtype="8bit"\), which does not exist any more.*\Z'):
        other.load_state_dict(state)


def test_proximal_pulls_the_product():
    energies = []
    for strength in (0.0, 1e3):
        model = adapted_net()
        options = {"importance": mooring.EWC(decay=None, per_sample=True), "merge": "sum"}
        optimizer, moor = moored(model, pull=mooring.Proximal(strength), **options)
        train(model, optimizer, batches(20, seed=5))
        energies.append(moor.pull_energy())
    assert energies[1] < 0.1 * energies[0]


def dense_pull(b, a, scale, previous, current, damping):
    """Return B pulled by the interpolation of two curvatures in the eigenbases of the previous one, in float64."""
    (c, g), (c_now, g_now) = previous, current
    g, g_now = (m + damping * m.diagonal().mean() * torch.eye(len(m), dtype=m.dtype) for m in (g, g_now))
    values, vectors = torch.linalg.eigh(g)
    m, rows = torch.linalg.eigh(scale**2 * a @ c @ a.T)
    before = values.unsqueeze(1) * m
    now = (vectors.T @ g_now @ vectors).diagonal().unsqueeze(1) * (
        rows.T @ (scale**2 * a @ c_now @ a.T) @ rows
    ).diagonal()
    rate = before.sqrt() / (before.sqrt() + now.sqrt())
    d = vectors.T @ b @ rows
    return vectors @ (d - rate * d) @ rows.T


def test_interpolation_pulls_the_product_by_both_curvatures():
    model, plain = adapted_net().double(), adapted_net().double()
    rules = {"pull": mooring.Interpolation(), "importance": CURVATURE, "merge": "sum"}
    moor = mooring.attach(
        model, torch.optim.SGD(trainable(model), lr=0.1), reference=batches(dtype=torch.float64), **rules
    )
    data = batches(1, seed=5, dtype=torch.float64)
    train(plain, torch.optim.SGD(trainable(plain), lr=0.1), data)
    train(model, moor._states.optimizer, data)
    state = moor.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            layer = plain.get_submodule(name)
            previous, current = (
                [state[f"{prefix}{side}.{name}.up"] for side in ("inputs", "outputs")] for prefix in ("past_", "")
            )
            expected = dense_pull(layer.up.detach(), layer.down.detach(), module.scale, previous, current, damping=0.05)
            torch.testing.assert_close(module.up.detach(), expected, rtol=1e-7, atol=1e-10)
            torch.testing.assert_close(module.down, layer.down)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pull": mooring.Interpolation()}, "EWC is no curvature of a product"),
        ({"pull": mooring.Interpolation(every="task"), "importance": CURVATURE}, "does not act on a product"),
        ({"pull": mooring.Penalty(1.0), "importance": CURVATURE}, "Penalty.* does not act on a product"),
        ({"pull": mooring.Budget(0.1), "importance": "mas"}, "MAS is no curvature of a product"),
        ({"pull": mooring.Budget(0.1), "merge": "max"}, 'give merge="sum"'),
    ],
)
def test_rules_that_cannot_hold_a_product_are_refused_and_otherwise_hold_parameters(options, words):
    model = adapted_net()
    optimizer = torch.optim.Adam(trainable(model))
    with pytest.raises(MooringError, match=words):
        mooring.attach(model, optimizer, adapters="product", **options)
    moor = mooring.attach(model, optimizer, **options)
    budget = isinstance(options["pull"], mooring.Budget)
    with pytest.warns(UnheldWarning, match="has no reference") if budget else nullcontext():
        train(model, optimizer, batches(3))
    moor.consolidate()
    entries = moor.coverage().held
    assert {entry.how for entry in entries} == {"scores"}
    assert all(re.search(words, entry.reason) for entry in entries)


def test_adapters_by_parameters_on_request():
    _, moor = moored(adapted_net(), adapters="parameters")
    by_name = {entry.name: entry for entry in moor.coverage().parameters}
    assert by_name["0.up"].how == "scores"
    assert by_name["0.down"].status == "unheld"  # its gradient is 0 while B is 0


def test_unknown_adapters_option_is_refused():
    model = adapted_net()
    with pytest.raises(MooringError, match="adapters"):
        mooring.attach(model, torch.optim.SGD(trainable(model), lr=0.1), adapters="merged")


def test_excluded_factor_leaves_the_other_to_its_scores():
    _, moor = moored(adapted_net(), exclude="*.down")
    entry = next(entry for entry in moor.coverage().held if entry.name == "0.up")
    assert entry.how == "scores"
    assert "is excluded" in entry.reason


def test_frozen_first_factor_is_no_obstacle():
    model = adapted_net()
    model[0].down.requires_grad_(False)
    model[2].down.requires_grad_(False)
    optimizer, moor = moored(model, pull=mooring.Budget(0.01, measured=False))
    train(model, optimizer, batches(30, seed=5))
    assert 0.0099 <= moor.pull_energy() <= 0.01 * (1 + 1e-5)


def test_reference_that_never_reaches_a_layer_is_warned_of():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = adapted_net()
            self.extra = Adapted(QuantizedLinear(4, 3), 4, 3, 2)
            self.use = False

        def forward(self, x):
            return self.layers(x) + (self.extra(x) if self.use else 0)

    model = Optional()
    optimizer, moor = moored(model)
    assert {entry.name for entry in moor.coverage().unheld} == {"extra.down", "extra.up"}
    model.use = True
    with pytest.warns(UnheldWarning, match="extra.down' and 1 other"):
        train(model, optimizer, batches(1))


def test_rank_zero_is_left_alone():
    model = adapted_net(rank=0)
    model.append(nn.Linear(3, 3))
    optimizer, moor = moored(model, pull=mooring.Budget(0.01, distil=False), memory=mooring.Memory())
    train(model, optimizer, batches(5, seed=5))
    assert moor.pull_energy() <= 0.01 * (1 + 1e-5)
    assert "0.down, 0.up, 2.down, 2.up: is empty: its product has rank 0 and adds nothing" in str(moor.coverage())
    moor.consolidate()
    train(model, optimizer, batches(5, seed=6))


def test_only_empty_adapters_are_refused():
    with pytest.raises(MooringError, match="give adapters a rank above 0"):
        moored(adapted_net(rank=0))


def test_class_that_is_given_the_method_has_products():
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.down, self.up = nn.Linear(4, 3), nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
            self.base.requires_grad_(False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    Theirs.mooring_low_rank = lambda m: [LowRank(m.down.weight, m.up.weight, 1.0, m.base)]
    _, moor = moored(Theirs())
    assert {entry.how for entry in moor.coverage().held} == {"product"}


def test_factors_that_do_not_fit_are_refused_in_one_line():
    model = adapted_net()
    model[0].up = nn.Parameter(torch.zeros(6, 5))
    with pytest.raises(MooringError, match=r"\(2, 4\) and \(6, 5\)"):
        moored(model)


def test_state_resumes_bit_for_bit():
    def run(interrupted):
        model = adapted_net()
        optimizer, moor = moored(model, pull=mooring.Budget(0.01), memory=mooring.Memory())
        train(model, optimizer, batches(20, seed=5))
        moor.consolidate()
        train(model, optimizer, batches(5, seed=6))
        if interrupted:
            saved = [{k: t.clone() for k, t in moor.state_dict().items()}, model.state_dict(), optimizer.state_dict()]
            model = adapted_net(seed=1)
            model.load_state_dict(saved[1])
            optimizer = torch.optim.Adam(trainable(model), lr=0.05)
            optimizer.load_state_dict(saved[2])
            moor = mooring.attach(model, optimizer)
            moor.load_state_dict(saved[0])
        train(model, optimizer, batches(10, seed=7))
        moor.consolidate()
        return model, moor

    (one, first), (other, second) = run(False), run(True)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    states = first.state_dict(), second.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(t, states[1][key]) for key, t in states[0].items() if key != "mooring")


def test_state_of_another_rank_is_refused():
    _, moor = moored(adapted_net(rank=2))
    state = moor.state_dict()
    model = adapted_net(rank=2)
    for layer in (model[0], model[2]):
        layer.down, layer.up = nn.Parameter(layer.down[:1].detach()), nn.Parameter(layer.up[:, :1].detach())
    other = mooring.attach(model, torch.optim.Adam(trainable(model)))
    with pytest.raises(MooringError, match="shape"):
        other.load_state_dict(state)


def test_state_of_another_base_is_refused():
    _, moor = moored(adapted_net(seed=0))
    model = adapted_net(seed=1)
    other = mooring.attach(model, torch.optim.Adam(trainable(model)))
    with pytest.raises(MooringError, match="another base"):
        other.load_state_dict(moor.state_dict())


def test_state_of_another_scale_is_refused():
    _, moor = moored(adapted_net(seed=0))
    model = adapted_net(seed=0)
    model[0].scale = 1.0
    other = mooring.attach(model, torch.optim.Adam(trainable(model)))
    with pytest.raises(MooringError, match=r"scale 0\.5 and has 1"):
        other.load_state_dict(moor.state_dict())


def test_state_by_parameters_continues_by_parameters():
    model = adapted_net()
    _, moor = moored(model, adapters="parameters")
    state = moor.state_dict()
    moor.detach()
    _, other = moored(adapted_net())
    other.load_state_dict(state)
    assert {entry.how for entry in other.coverage().held} == {"scores"}
    _, named = moored(adapted_net(), adapters="product")
    with pytest.raises(MooringError, match='give attach adapters="parameters"'):
        named.load_state_dict(state)


def test_default_budget_is_smaller_for_adapters():
    assert moored(adapted_net())[1].pull == mooring.Budget(0.03)
    assert moored(adapted_net(), adapters="parameters")[1].pull == mooring.Budget(0.1)


def test_training_observes_few_iterations():
    model = adapted_net()
    optimizer, moor = moored(model, memory=mooring.Memory())
    seen = [batches(130, seed=5)[index] for index in (0, 1, 2, 4, 8, 16, 32, 64, 128)]
    train(model, optimizer, batches(130, seed=5))
    inputs = sum(x.T @ x / len(x) for x, _ in seen)
    torch.testing.assert_close(moor.state_dict()["inputs.0.up"], inputs)


def test_nothing_is_observed_in_training_if_nothing_is_kept_of_it():
    model = adapted_net()
    optimizer, moor = moored(model, memory=mooring.Memory(current="none"))
    train(model, optimizer, batches(3, seed=5))
    assert not moor.state_dict()["inputs.0.up"].any()
    with pytest.raises(MooringError, match="this task has no importance"):
        moor.consolidate()
    moor.consolidate(data=[x for x, _ in batches(seed=5)])  # labels from the model, whose loss rises on either side
    assert moor.tasks == 2


def test_estimated_memory_of_a_reference_counts_the_factors_of_products():
    model = adapted_net()
    moor = mooring.attach(model, torch.optim.Adam(trainable(model)), pull=mooring.Budget(0.01))
    parameters = sum(p.numel() for p in trainable(model))
    of_task_and_past, vectors = 2 * (4**2 + 6**2 + 6**2 + 3**2), 6**2 + 3**2
    gradients_and_anchors = 2 * parameters
    numbers = gradients_and_anchors + of_task_and_past + vectors
    assert estimated_bytes(moor._states) == {torch.device("cpu"): 4 * numbers}


class ReadsLayer(nn.Module):
    """A network that computes its last layer without a call of it, which nobody can observe."""

    def __init__(self):
        super().__init__()
        self.layers = adapted_net()

    def forward(self, x):
        first, activation, last = self.layers
        return last.forward(activation(first(x)))


@pytest.mark.filterwarnings("ignore:training moves parameters that nothing holds")
def test_product_whose_layer_is_not_called_is_unheld_and_others_are_held():
    _, moor = moored(ReadsLayer(), data=[x for x, _ in batches()])
    assert {entry.name for entry in moor.coverage().held} == {"layers.0.down", "layers.0.up"}
    assert {entry.name for entry in moor.coverage().unheld} == {"layers.2.down", "layers.2.up"}


def test_model_compiled_as_one_graph_is_held_by_parameters():
    model = torch.compile(adapted_net(), fullgraph=True, backend="eager")
    optimizer = torch.optim.Adam(trainable(model), lr=0.01)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.01))
    with pytest.warns(UnheldWarning, match="has no reference"):
        train(model, optimizer, batches(2))
    moor.consolidate()
    assert all("fullgraph" in entry.reason for entry in moor.coverage().held)


def test_new_anchor_at_the_address_of_a_freed_one_is_read_again(monkeypatch):
    _, moor = moored(adapted_net())
    factors = next(state.factors for state in moor._states.records.values() if state.factors)
    monkeypatch.setattr(product_factors, "id", lambda tensor: 0, raising=False)  # which address is used again is chance
    shape = factors.low_rank.b.shape
    assert not factors.is_anchored(torch.zeros(shape))
    assert factors.is_anchored(torch.ones(shape))
