"""Tests of what `Kronecker` observes: every layer has factors or scores, of the gradients that the steps used."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import mooring
from mooring.errors import MooringError
from mooring.observe.factor_accumulation import NOT_EXPLAINED
from mooring.rules import EWC, Balanced, Kronecker
from mooring.state.mooring_state import NOT_OBSERVED

F64 = torch.float64
INPUTS = 5


def small(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias))


def moored(model: nn.Module, lr: float = 0.0, nats: float = 1.0, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    moor = mooring.attach(model, optimizer, importance=Kronecker(**options), pull=mooring.Budget(nats))
    return optimizer, moor


def batch(seed: int, samples: int = 8, dtype: torch.dtype = torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(samples, INPUTS, generator=random, dtype=dtype), torch.randint(3, (samples,), generator=random)


def loss_of(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, y = batch(seed, dtype=dtype)
    return functional.cross_entropy(model(x), y)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    optimizer.zero_grad()
    loss_of(model, seed, dtype).backward()
    optimizer.step()


def curvature(moor, name: str) -> torch.Tensor:
    """Return the mean curvature of this task of one parameter, G (x) A or its scores."""
    (state,) = (m for m in moor._states.records.values() if m.name == name)
    if state.has_scores:
        return state.importance_state["current"]
    return torch.kron(state.factors.outputs, state.factors.inputs) / state.factors.count**2


def with_factors(moor) -> set[str]:
    return {m.name for m in moor._states.records.values() if not m.has_scores}


def nothing_moves(model: nn.Module, optimizer: torch.optim.Optimizer, moor, move) -> None:
    """Consolidate, train on something else within almost no budget, and compare every parameter with its anchor."""
    moor.consolidate()
    moor.pull = moor._step.pull = moor._step.budget.budget = mooring.Budget(1e-16)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for seed in (1, 2):
        optimizer.zero_grad()
        move(seed).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        if p.grad is not None and bool(p.grad.any()):
            torch.testing.assert_close(p.detach(), moor.anchor[name], rtol=0, atol=1e-5, msg=f"{name} moved")


# Layers that are not called


class Functional(nn.Module):
    """A network that reads the weight of one layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(INPUTS, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(functional.linear(x, self.hidden.weight, self.hidden.bias).tanh())


class Keyword(Functional):
    def forward(self, x):
        return self.head(input=self.hidden(input=x).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(INPUTS - 1, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(INPUTS - 1, 3)

    def forward(self, x):
        return self.head(self.encoder(x[:, 1:].unsqueeze(1) * torch.ones(1, 3, 1)).mean(1))


@pytest.mark.parametrize(
    ("make", "scored"),
    [
        (Functional, {"hidden.weight", "hidden.bias"}),
        (Keyword, set()),
        (
            Attention,
            {f"encoder.self_attn.{name}" for name in ("in_proj_weight", "in_proj_bias")}
            | {f"encoder.self_attn.out_proj.{name}" for name in ("weight", "bias")}
            | {f"encoder.norm{i}.{name}" for i in (1, 2) for name in ("weight", "bias")},
        ),
    ],
)
def test_layers_that_are_not_observed_have_scores_and_are_held(make, scored):
    torch.manual_seed(0)
    model = make()
    optimizer, moor = moored(model)
    for seed in range(3):
        step(model, optimizer, seed)
    assert {name for name, _ in model.named_parameters()} - with_factors(moor) == scored
    nothing_moves(model, optimizer, moor, lambda seed: 10 * loss_of(model, seed))
    assert moor.pull_energy() < 1e-10


def test_scores_of_an_unobserved_layer_equal_those_of_ewc():
    results = []
    for importance in (Kronecker(), EWC(decay=None, per_sample=True)):
        torch.manual_seed(0)
        model = Functional()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moor = mooring.attach(model, optimizer, importance=importance, pull=mooring.Budget(1.0))
        for seed in range(3):
            step(model, optimizer, seed)
        moor.consolidate()
        results.append(moor.previous["hidden.weight"])
    assert torch.equal(*results)
    assert bool(results[0].any())


def test_layer_added_after_attach_gets_factors():
    torch.manual_seed(0)
    model = small()
    optimizer, moor = moored(model)
    step(model, optimizer)
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": model[3].parameters()})
    step(model, optimizer, 1)
    assert "3.weight" not in with_factors(moor)  # its first step made it known
    step(model, optimizer, 2)
    assert {"3.weight", "3.bias"} <= with_factors(moor)
    nothing_moves(model, optimizer, moor, lambda seed: 10 * loss_of(model, seed))
    moor.detach()
    assert not any(module._forward_hooks for module in model.modules())


def test_layer_added_before_rebind_has_factors_from_its_first_step():
    torch.manual_seed(0)
    model = small()
    optimizer, moor = moored(model)
    step(model, optimizer)
    model.append(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor.rebind(optimizer)
    step(model, optimizer, 1)
    assert {"3.weight", "3.bias"} <= with_factors(moor)


def test_layer_replaced_by_another_with_the_same_weight_is_observed_again():
    torch.manual_seed(0)
    model = small()
    optimizer, moor = moored(model)
    other = nn.Linear(6, 3)
    other.weight, other.bias = model[2].weight, model[2].bias
    model[2] = other
    for seed in range(2):
        step(model, optimizer, seed)
    assert "2.weight" in with_factors(moor)


def test_model_compiled_and_run_before_attach_is_held_by_scores():
    torch.manual_seed(0)
    model = small()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(compiled, optimizer)
    optimizer, moor = moored(model, batch_size=8)
    for seed in range(2):
        step(compiled, optimizer, seed)
    nothing_moves(model, optimizer, moor, lambda seed: 10 * loss_of(compiled, seed))


def test_weight_that_is_also_read_elsewhere_has_scores():
    class Both(Functional):
        def forward(self, x):
            return self.head((self.hidden(x) + functional.linear(x.roll(1, 1), self.hidden.weight)).tanh())

    torch.manual_seed(0)
    model = Both()
    optimizer, moor = moored(model)
    step(model, optimizer)
    assert with_factors(moor) == {"hidden.bias", "head.weight", "head.bias"}
    assert moor._states.diagonal_reasons[model.hidden.weight] == NOT_EXPLAINED
    nothing_moves(model, optimizer, moor, lambda seed: 10 * loss_of(model, seed))


def test_state_saved_before_and_after_a_fallback_resumes_bit_for_bit():
    def start():
        torch.manual_seed(0)
        model = Functional()
        return model, *moored(model, lr=0.1, nats=1e-4)

    for stop in (1, 3, 5):  # scores of the first task, right after it, and in the second task
        model, optimizer, moor = start()
        saved = None
        for seed in range(7):
            if seed == stop:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), moor.state_dict()))
            step(model, optimizer, seed)
            if seed == 2:
                moor.consolidate()
        resumed, resumed_optimizer, resumed_moor = start()
        resumed.load_state_dict(saved[0])
        resumed_optimizer.load_state_dict(saved[1])
        resumed_moor.load_state_dict(saved[2])
        for seed in range(stop, 7):
            step(resumed, resumed_optimizer, seed)
            if seed == 2:
                resumed_moor.consolidate()
        for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(p, q)


def test_reference_estimates_scores_of_unobserved_layers():
    torch.manual_seed(0)
    model = Functional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"importance": Kronecker(), "pull": mooring.Budget(0.0, distil=False)}
    moor = mooring.attach(model, optimizer, reference=[batch(seed) for seed in range(3)], **options)
    assert moor._states.diagonal_reasons[model.hidden.weight] == NOT_OBSERVED
    step(model, optimizer, 9)
    torch.testing.assert_close(model.hidden.weight.detach(), moor.anchor["hidden.weight"], rtol=0, atol=1e-5)
    step(model, optimizer, 10)
    moor.estimate([batch(4)])  # replaces scores of a parameter that has none of its factors left
    moor.consolidate()
    assert moor.tasks == 2


# Passes whose gradient no step used


def poisoned_nan(model, optimizer):
    optimizer.zero_grad()
    (loss_of(model, 7) * torch.nan).backward()


def poisoned_spike(model, optimizer):
    optimizer.zero_grad()
    (loss_of(model, 7) * 1e4).backward()


def poisoned_in_place(model, optimizer):
    (loss_of(model, 7) * 1e4).backward()
    optimizer.zero_grad(set_to_none=False)


def attack_by_grad(model, optimizer):
    x, y = batch(7)
    x.requires_grad_()
    torch.autograd.grad(100 * functional.cross_entropy(model(x), y), x)


def attack_by_backward_to_inputs(model, optimizer):
    x, y = batch(7)
    x.requires_grad_()
    (100 * functional.cross_entropy(model(x), y)).backward(inputs=[x])


def attack_by_backward(model, optimizer):
    x, y = batch(7)
    (100 * functional.cross_entropy(model(x.requires_grad_()), y)).backward()
    model.zero_grad()


def saliency_maps(model, optimizer):
    for seed in range(20):
        model(batch(seed)[0].requires_grad_())[0, 0].backward()


def gradient_by_hand(model, optimizer):
    torch.autograd.grad(100 * loss_of(model, 7), list(model.parameters()))


def another_reference(model, optimizer):
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, other, pull=mooring.Proximal(1.0), reference=[batch(8)]).detach()


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize(
    "disturb",
    [
        poisoned_nan,
        poisoned_spike,
        poisoned_in_place,
        attack_by_grad,
        attack_by_backward_to_inputs,
        attack_by_backward,
        saliency_maps,
        gradient_by_hand,
        another_reference,
    ],
)
def test_passes_whose_gradient_no_step_uses_change_nothing(disturb, batch_size):
    results = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = small()
        optimizer, moor = moored(model, batch_size=batch_size)
        for seed in range(3):
            if disturbed:
                disturb(model, optimizer)
            step(model, optimizer, seed)
        moor.consolidate()
        results.append({m.name: (m.factors.past_inputs, m.factors.past_outputs) for m in moor._states.records.values()})
    for name, factors in results[0].items():
        assert all(map(torch.equal, factors, results[1][name])), name


def test_reference_of_another_mooring_between_a_pass_and_its_step_changes_nothing():
    results = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = small()
        optimizer, moor = moored(model)
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            if disturbed:
                other = torch.optim.SGD(model.parameters(), lr=0.1)
                reference = [batch(8, samples=20), batch(9, samples=20)]
                mooring.attach(model, other, pull=mooring.Proximal(1.0), reference=reference).detach()
            optimizer.step()
        results.append({m.name: curvature(moor, m.name) for m in moor._states.records.values()})
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_pass_before_the_loop_zeroes_in_place_is_not_counted():
    results = []
    for spike in (False, True):
        torch.manual_seed(0)
        model = small()
        optimizer, moor = moored(model, batch_size=8)
        step(model, optimizer, 0)
        if spike:
            optimizer.zero_grad(set_to_none=False)
            (loss_of(model, 7) * 1e4).backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, 1).backward()
        optimizer.step()
        results.append(curvature(moor, "0.weight"))
    assert torch.equal(*results)


def test_memory_of_discarded_passes_does_not_grow():
    model = small()
    _, moor = moored(model)
    observer = moor._step.layers
    for seed in range(5):
        loss_of(model, seed).backward()
    tensors = [t for factors in observer._passes.values() for t in vars(factors).values() if torch.is_tensor(t)]
    assert len(observer._passes) == 4
    assert len(tensors) == 4 * 4
    assert not observer._open


def failing_merge(previous, current):
    if current.numel() == 3:  # the last bias
        raise ValueError("no")
    return previous + current


def broken_eigenvectors(monkeypatch):
    solve = torch.linalg.eigh

    def stubborn(matrix):
        if matrix.shape[-1] == 3:
            raise torch.linalg.LinAlgError("failed to converge")
        return solve(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", stubborn)


@pytest.mark.parametrize("kind", ["kronecker", "merge"])
def test_consolidation_that_fails_changes_nothing(kind, monkeypatch):
    torch.manual_seed(0)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"importance": Kronecker(), "pull": mooring.Budget(1.0)}
    if kind == "merge":
        pull = mooring.Interpolation(every="task")
        options = {"importance": EWC(), "pull": pull, "merge": lambda p, c: merge(p, c)}
    merge = torch.add
    moor = mooring.attach(model, optimizer, **options)
    step(model, optimizer, 0)
    moor.consolidate()
    step(model, optimizer, 1)
    before = copy.deepcopy((moor.state_dict(), [*model.parameters()]))
    merge = failing_merge
    if kind == "kronecker":
        broken_eigenvectors(monkeypatch)
    with pytest.raises(MooringError if kind == "kronecker" else ValueError) as error:
        moor.consolidate()
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    after = (moor.state_dict(), [*model.parameters()])
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    assert all(map(torch.equal, before[1], after[1]))
    merge = torch.add
    moor.consolidate()
    assert moor.tasks == 2


def test_factors_that_are_not_finite_are_named_in_one_line():
    model = small()
    optimizer, moor = moored(model)
    moor._step.check = False
    optimizer.zero_grad()
    (loss_of(model, 0) * torch.nan).backward()
    optimizer.step()
    with pytest.raises(MooringError, match="have no eigenvectors, and nothing was changed"):
        moor.consolidate()
    assert moor.tasks == 0


# The scale of the gradients


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_factors_of_scaled_gradients_are_those_of_the_loss(dtype):
    results = []
    for scale in (1.0, 2.0**12):
        torch.manual_seed(0)
        model = small()
        optimizer, moor = moored(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for seed in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = loss_of(model, seed)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([curvature(moor, name) for name, _ in model.named_parameters()])
        assert len(with_factors(moor)) == 4
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=float(one.abs().max()) * 0.05)
        assert float(other.diagonal().sum() / one.diagonal().sum()) == pytest.approx(1, rel=0.05)


def test_step_that_a_scaler_skips_is_not_counted():
    model = small()
    optimizer, moor = moored(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for seed in range(3):
        optimizer.zero_grad()
        scaler.scale(1e4 * loss_of(model, seed)).backward()
        scaler.step(optimizer)
        scaler.update(1.0 if seed == 1 else None)
    moor.consolidate()
    assert all(bool(m.factors.past_outputs.isfinite().all()) for m in moor._states.records.values())
    assert {m.factors.tasks for m in moor._states.records.values()} == {1}


@pytest.mark.parametrize("clip", ["norm", "layer"])
def test_factors_and_scores_have_the_scale_of_the_clipped_gradient(clip):
    """A layer's factors and a norm's scores change by the same factor, the square of what clipping multiplies by."""
    results = []
    for limit in (None, 1e-3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(INPUTS, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(F64)
        optimizer, moor = moored(model)
        optimizer.zero_grad()
        loss_of(model, 0, F64).backward()
        unclipped = [p.grad.clone() for p in model.parameters()]
        for parameters in ([*model.parameters()],) if clip == "norm" else [[*m.parameters()] for m in model]:
            nn.utils.clip_grad_norm_(parameters, limit or torch.inf)
        by = [float((p.grad / g).mean() ** 2) for p, g in zip(model.parameters(), unclipped, strict=True)]
        optimizer.step()
        results.append([curvature(moor, name) for name, _ in model.named_parameters()])
    for one, other, squared in zip(*results, by, strict=True):
        torch.testing.assert_close(one * squared, other, rtol=1e-5, atol=0)


def test_bias_before_a_batch_norm_keeps_the_factors_of_its_samples():
    """Its gradient is 0 up to rounding, from which no scale can be read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer, moor = moored(model)
    step(model, optimizer)
    x, y = batch(0)
    hidden = model[0](x)
    hidden.retain_grad()
    functional.cross_entropy(model[2](model[1](hidden)), y).backward()
    torch.testing.assert_close(curvature(moor, "0.bias"), 8 * hidden.grad.T @ hidden.grad)


# Parameters of layers


class LowRank(nn.Linear):
    """A linear layer with further parameters, as loralib has."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__(ins, outs)
        self.down, self.up = nn.Parameter(torch.randn(2, ins)), nn.Parameter(torch.randn(outs, 2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return super().forward(x) + self.scale * (x @ self.down.T) @ self.up.T


@pytest.mark.parametrize(
    ("change", "factors"),
    [
        (lambda layer: LowRank(INPUTS, 6), {"0.weight", "0.bias"}),
        (weight_norm, set()),
        (spectral_norm, set()),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.3), set()),
        (parametrizations.weight_norm, set()),
        (parametrizations.spectral_norm, set()),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_only_plain_weights_and_biases_have_factors(change, factors):
    torch.manual_seed(0)
    model = small()
    model[0] = change(model[0])
    optimizer, moor = moored(model)
    for seed in range(2):
        step(model, optimizer, seed)
    assert {name for name in with_factors(moor) if name.startswith("0.")} == factors
    model.eval()  # spectral_norm changes its vectors in training
    nothing_moves(model, optimizer, moor, lambda seed: 10 * loss_of(model, seed))


def test_two_layers_that_share_a_weight_equal_one_layer_called_twice():
    results = []
    for shared in (False, True):
        torch.manual_seed(0)
        first = nn.Linear(INPUTS, INPUTS, bias=False)
        model = nn.Sequential(first, nn.Tanh(), first, nn.Linear(INPUTS, 3))
        if shared:
            model[2] = nn.Linear(INPUTS, INPUTS, bias=False)
            model[2].weight = first.weight
        optimizer, moor = moored(model)
        step(model, optimizer)
        results.append(curvature(moor, "0.weight"))
    assert torch.equal(*results)


def test_embedding_tied_to_the_head_has_scores_and_says_why():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3, 4), nn.Linear(4, 3)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x).tanh())

    model = Tied()
    optimizer, moor = moored(model)
    functional.cross_entropy(model(torch.tensor([0, 1, 2])), torch.tensor([1, 2, 0])).backward()
    optimizer.step()
    assert with_factors(moor) == {"head.bias"}
    assert "Embedding" in moor._states.diagonal_reasons[model.head.weight]


# One line


def test_balanced_factors_are_refused_in_one_line():
    with pytest.raises(MooringError, match="Balanced rescales scores") as error:
        Balanced(Kronecker())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", ["wrapper", "model", "layer"])
def test_model_compiled_as_one_graph_is_refused_in_one_line(part):
    model = small()
    if part == "wrapper":
        model = torch.compile(model, backend="eager", fullgraph=True)
    else:
        (model if part == "model" else model[0]).compile(backend="eager", fullgraph=True)
    with pytest.raises(MooringError, match="fullgraph=True") as error:
        moored(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv2d(1, 3, 2)])
def test_sample_without_a_batch_equals_a_batch_of_one(layer):
    x = torch.randn(4) if isinstance(layer, nn.Linear) else torch.randn(1, 4, 4)
    results = []
    for batched in (False, True):
        model = nn.Sequential(copy.deepcopy(layer))
        optimizer, moor = moored(model, batch_size=1)
        model(x.unsqueeze(0) if batched else x).pow(3).sum().backward()
        optimizer.step()
        results.append(curvature(moor, "0.weight"))
    torch.testing.assert_close(*results)


def test_batch_without_samples_is_not_observed():
    torch.manual_seed(0)
    model = small()
    optimizer, moor = moored(model)
    step(model, optimizer)
    before = curvature(moor, "0.weight").clone()
    optimizer.zero_grad()
    model(torch.zeros(0, INPUTS)).sum().backward()
    optimizer.step()
    assert torch.equal(curvature(moor, "0.weight"), before)
