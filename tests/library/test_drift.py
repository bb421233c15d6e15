"""Tests of parameter drift and CKA against direct formulas in float64."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mooring
from mooring import drift
from mooring.errors import MooringError


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def hsic_by_definition(k: np.ndarray, m: np.ndarray) -> float:
    """Compute the U-statistic: the mean of k_ij (m_ij + m_qr - 2 m_iq) over all distinct i, j, q, r."""
    quadruples = itertools.permutations(range(len(k)), 4)
    terms = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in quadruples]
    return math.fsum(terms) / len(terms)


def cka_by_definition(x: Tensor, y: Tensor) -> float:
    k, m = (f.flatten(1).double().numpy() @ f.flatten(1).double().numpy().T for f in (x, y))
    return hsic_by_definition(k, m) / math.sqrt(hsic_by_definition(k, k) * hsic_by_definition(m, m))


def hsic_dense(k: np.ndarray, m: np.ndarray) -> float:
    """Compute the closed form of Song et al. with explicit loops over pairs."""
    n = len(k)
    pairs = list(itertools.permutations(range(n), 2))
    trace = sum(k[i, j] * m[j, i] for i, j in pairs)
    total_k, total_m = sum(k[i, j] for i, j in pairs), sum(m[i, j] for i, j in pairs)
    rows_k = [sum(k[i, j] for j in range(n) if j != i) for i in range(n)]
    rows_m = [sum(m[i, j] for j in range(n) if j != i) for i in range(n)]
    cross = sum(a * b for a, b in zip(rows_k, rows_m, strict=True))
    return (trace + total_k * total_m / ((n - 1) * (n - 2)) - 2 * cross / (n - 2)) / (n * (n - 3))


def cka_dense(x: Tensor, y: Tensor) -> float:
    k, m = (f.flatten(1).double().numpy() @ f.flatten(1).double().numpy().T for f in (x, y))
    return hsic_dense(k, m) / math.sqrt(hsic_dense(k, k) * hsic_dense(m, m))


def cka_biased(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    return float((x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))


# Parameters


def test_parameter_drift_is_the_relative_distance_of_a_layers_parameters_taken_together():
    weight, bias, other = normal(3, 4), normal(3, seed=1), normal(5, seed=2)
    parts = [("a.weight", weight + 0.1, weight), ("b.c.weight", other * 3, other), ("a.bias", bias * 2, bias)]
    scores = drift.parameter_drift(parts)
    assert list(scores) == ["a", "b.c"]
    moved = math.sqrt(12 * 0.01 + float(bias.square().sum()))
    assert scores["a"] == pytest.approx(
        moved / math.sqrt(float(weight.square().sum() + bias.square().sum())), rel=1e-12
    )
    assert scores["b.c"] == pytest.approx(2.0, rel=1e-12)


def test_parameter_drift_is_infinite_from_a_zero_anchor_and_0_without_movement():
    zero, one = torch.zeros(2), torch.ones(2)
    parts = [("still.bias", zero, zero), ("away.bias", one, zero), ("kept.bias", one, one), ("scale", one, one)]
    assert drift.parameter_drift(parts) == {"still": 0.0, "away": math.inf, "kept": 0.0, "(root)": 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameter_drift_does_not_underflow_for_small_numbers(dtype):
    anchor = torch.full((100,), 0.01, dtype=dtype)
    theta = anchor * 1.02
    expected = float((theta.double() - anchor.double()).norm() / anchor.double().norm())
    assert 0.01 < expected < 0.03
    assert drift.parameter_drift([("a.weight", theta, anchor)])["a"] == pytest.approx(expected, rel=1e-6)


def test_drift_is_measured_from_the_last_consolidation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, exclude="2.bias", pull=mooring.Penalty(1.0))

    def train():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, 3, dtype=torch.float64)).square().mean().backward()
            optimizer.step()

    for _ in range(2):
        anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
        train()
        expected = {}
        for layer, names in {"0": ["0.weight", "0.bias"], "2": ["2.weight"]}.items():
            now = torch.cat([model.get_parameter(n).detach().reshape(-1) for n in names])
            then = torch.cat([anchor[n].reshape(-1) for n in names])
            expected[layer] = float((now - then).norm() / then.norm())
        scores = moor.drift()
        assert scores == pytest.approx(expected, rel=1e-12)
        assert min(scores.values()) > 1e-4
        moor.consolidate()
        assert moor.drift() == {"0": 0.0, "2": 0.0}


# Debiased CKA of two sets of features


@pytest.mark.parametrize("n", [4, 5, 8])
def test_debiased_cka_equals_the_u_statistic_and_its_closed_form(n):
    x, y = normal(n, 3, seed=n), normal(n, 2, 4, seed=n + 1)
    y[:, 0, :3] += x  # related
    scores = drift.debiased_cka(x, y)
    assert scores == pytest.approx(cka_by_definition(x, y), rel=1e-9)
    assert scores == pytest.approx(cka_dense(x, y), rel=1e-9)


def test_debiased_cka_is_invariant_to_rotation_scale_and_shift():
    x, y = normal(20, 5), normal(20, 6, seed=1)
    y[:, :5] += x
    scores = drift.debiased_cka(x, y)
    assert 0.1 < scores < 0.9
    rotation, _ = torch.linalg.qr(normal(5, 5, seed=2))
    for other in (x @ rotation, x * 1e-6, x * 1e6, -x, x + normal(5, seed=3), (x * 7 - 2) @ rotation):
        assert drift.debiased_cka(other, y) == pytest.approx(scores, rel=1e-9)
        assert drift.debiased_cka(x, other) == pytest.approx(1.0, rel=1e-9)
    assert drift.debiased_cka(y, x) == pytest.approx(scores, rel=1e-9)
    stretched = x * torch.tensor([9.0, 1, 1, 1, 1], dtype=torch.float64)  # not a rotation, so it changes
    assert drift.debiased_cka(stretched, y) != pytest.approx(scores, rel=1e-2)


def test_debiased_cka_of_independent_features_averages_0_unlike_the_biased_one():
    pairs = [(normal(20, 40, seed=2 * i), normal(20, 40, seed=2 * i + 1)) for i in range(200)]
    debiased = sum(drift.debiased_cka(x, y) for x, y in pairs) / len(pairs)
    biased = sum(cka_biased(x, y) for x, y in pairs) / len(pairs)
    assert abs(debiased) < 0.02
    assert biased > 0.5


def test_debiased_cka_of_features_that_do_not_vary_is_undefined():
    assert math.isnan(drift.debiased_cka(torch.zeros(6, 3), normal(6, 3)))


def test_debiased_cka_accepts_one_feature_per_input():
    x, y = normal(9), normal(9, seed=1)
    assert drift.debiased_cka(x, y) == pytest.approx(cka_by_definition(x[:, None], y[:, None]), rel=1e-9)


def test_debiased_cka_refuses_too_few_or_unequal_inputs_in_one_line():
    for x, y, words in (
        (normal(3, 2), normal(3, 2), "at least 4 inputs, not 3"),
        (normal(5, 2), normal(6, 2), "not of 5 and 6"),
    ):
        with pytest.raises(MooringError) as error:
            drift.debiased_cka(x, y)
        assert words in str(error.value)
        assert "\n" not in str(error.value)


# CKA of two models


class Pair(nn.Module):
    """A module that returns a tuple of features and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner(x.flatten(1)).tanh()
        return h, h.sum()


class Net(nn.Module):
    """A network with a convolution, batch norm, dropout and a tuple."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=inplace)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.5)
        self.pair = Pair()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.pool(self.act(self.norm(self.conv(x)))))
        return self.head(self.pair(h)[0])


LAYERS = ["conv", "norm", "pair.inner", "head"]  # those that own parameters


def two_nets(inplace=False):
    """Return two related networks in float64 with trained running statistics."""
    torch.manual_seed(0)
    a = Net(inplace).double()
    for _ in range(5):
        a(1 + 2 * torch.randn(16, 1, 5, 5, dtype=torch.float64))
    b = copy.deepcopy(a)
    with torch.no_grad():
        for p in b.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return a, b


def images(n=22, seed=5):
    """Return inputs of which the first ones differ, so that a part gives another result than the whole."""
    x = normal(n, 1, 5, 5, seed=seed)
    x[: n // 3] = x[: n // 3] * 3 + 1
    return x


@torch.no_grad()
def features_by_hand(model: Net, x: Tensor) -> dict[str, Tensor]:
    """Compute the features of each layer in eval mode over all inputs at once."""
    model = copy.deepcopy(model).eval()
    conv = F.conv2d(x, model.conv.weight, model.conv.bias)
    mean, var = model.norm.running_mean[:, None, None], model.norm.running_var[:, None, None]
    weight, bias = model.norm.weight[:, None, None], model.norm.bias[:, None, None]
    norm = (conv - mean) / (var + model.norm.eps).sqrt() * weight + bias
    inner = norm.relu().mean((2, 3)) @ model.pair.inner.weight.T + model.pair.inner.bias
    head = inner.tanh() @ model.head.weight.T + model.head.bias
    return {"conv": conv, "norm": norm, "pair": inner.tanh(), "pair.inner": inner, "head": head}


def cka_by_hand(a: Net, b: Net, x: Tensor) -> dict[str, float]:
    one, two = features_by_hand(a, x), features_by_hand(b, x)
    return {name: cka_dense(one[name], two[name]) for name in one}


def test_cka_uses_all_inputs_of_all_batches():
    a, b = two_nets()
    x = images()
    expected = cka_by_hand(a, b, x)
    scores = drift.cka(a, b, x, batch_size=5)
    assert list(scores) == LAYERS
    assert scores == pytest.approx({name: expected[name] for name in LAYERS}, rel=1e-8)
    for part in (x[:5], x[-5:], x[:20]):  # the first batch, the last five inputs, all full batches
        partial = cka_by_hand(a, b, part)
        for name in LAYERS:
            assert abs(scores[name] - partial[name]) > 1e-4, name


@pytest.mark.parametrize("batch_size", [1, 3, 7, 21, 22, 1000])
def test_cka_does_not_depend_on_the_batch_size(batch_size):
    a, b = two_nets()
    expected = cka_by_hand(a, b, images())
    scores = drift.cka(a, b, images(), batch_size=batch_size)
    assert scores == pytest.approx({name: expected[name] for name in LAYERS}, rel=1e-8)


def loader_of_pairs(x):
    return DataLoader(TensorDataset(x, torch.arange(len(x))), batch_size=6)


def shuffled_loader(x):
    return DataLoader(TensorDataset(x), batch_size=6, shuffle=True)


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: list(x.split(4)),
        lambda x: [(part, "label") for part in x.split(4)],
        lambda x: [[x[:1]], [x[1:3]], [x[3:]]],
        loader_of_pairs,
        lambda x: DataLoader(x, batch_size=9),
        shuffled_loader,
    ],
    ids=["list", "tuples", "uneven lists", "loader of pairs", "loader of tensors", "shuffled loader"],
)
def test_cka_accepts_tensors_lists_and_loaders(inputs):
    a, b = two_nets()
    expected = cka_by_hand(a, b, images())
    scores = drift.cka(a, b, inputs(images()))
    assert scores == pytest.approx({name: expected[name] for name in LAYERS}, rel=1e-8)


def test_cka_of_unchanged_layers_is_1_and_of_changed_ones_is_less():
    a, _ = two_nets()
    assert drift.cka(a, a, images()) == pytest.approx(dict.fromkeys(LAYERS, 1.0), rel=1e-9)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.pair.inner.weight.mul_(normal(3, 4))
    scores = drift.cka(a, b, images())
    assert scores["conv"] == scores["norm"] == pytest.approx(1.0, rel=1e-9)
    assert scores["pair.inner"] < 0.999


def test_cka_selects_layers_by_name_and_pattern_in_the_models_order():
    a, b = two_nets()
    expected = cka_by_hand(a, b, images())
    scores = drift.cka(a, b, images(), ["head", "conv"])
    assert list(scores) == ["conv", "head"]
    scores = drift.cka(a, b, images(), ["pair*", "norm"])  # a module without parameters of its own, too
    assert list(scores) == ["norm", "pair", "pair.inner"]
    assert scores == pytest.approx({name: expected[name] for name in scores}, rel=1e-8)


def test_cka_of_a_module_that_returns_a_tuple_takes_its_first_tensor():
    a, b = two_nets()
    expected = cka_by_hand(a, b, images())["pair"]
    assert drift.cka(a, b, images(), ["pair"], batch_size=4)["pair"] == pytest.approx(expected, rel=1e-8)


def test_cka_of_a_recurrent_layer_takes_its_outputs():
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.LSTM(3, 4, batch_first=True)).double() for _ in range(2))
    x = normal(12, 5, 3)
    with torch.no_grad():
        expected = cka_dense(a[0](x)[0], b[0](x)[0])
    assert drift.cka(a, b, x, batch_size=5) == pytest.approx({"0": expected}, rel=1e-8)


def test_features_are_copied_before_the_next_layer_works_in_place():
    a, b = two_nets(inplace=True)
    expected = cka_by_hand(a, b, images())
    scores = drift.cka(a, b, images())
    assert scores == pytest.approx({name: expected[name] for name in LAYERS}, rel=1e-8)


def test_cka_of_a_layer_that_gives_one_number_for_each_input():
    class Scalar(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze(1)

    torch.manual_seed(0)
    a, b = (nn.Sequential(Scalar(4, 1)).double() for _ in range(2))
    x = normal(10, 4)
    with torch.no_grad():
        expected = cka_dense(a(x)[:, None], b(x)[:, None])
    assert drift.cka(a, b, x) == pytest.approx({"0": expected}, rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cka_of_a_model_in_lower_precision_loses_no_more_than_its_features_did(dtype):
    a, b = (nn.Sequential(net.conv.to(dtype)) for net in two_nets())
    x = images().to(dtype)
    with torch.no_grad():
        expected = cka_dense(a(x), b(x))
    assert drift.cka(a, b, x, batch_size=6) == pytest.approx({"0": expected}, rel=1e-5)


# The models do not change


def snapshot(model: nn.Module):
    """Return everything of a model that could have changed."""
    return (
        {name: t.clone() for name, t in model.state_dict().items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        [module.training for module in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
    )


def assert_untouched(model: nn.Module, before) -> None:
    after = snapshot(model)
    for old, new in zip(before[:2], after[:2], strict=True):
        assert old.keys() == new.keys()
        for name in old:
            assert old[name] is new[name] is None or torch.equal(old[name], new[name]), name
    assert before[2:] == after[2:]


def mixed_modes():
    """Return two networks with gradients, a frozen part, and submodules in train and eval mode."""
    a, b = two_nets()
    a.train()
    a.norm.eval()
    b.eval()
    b.drop.train()
    b.norm.train()
    for model in (a, b):
        model.conv.requires_grad_(False)
        model(images()).sum().backward()
    return a, b


def test_cka_leaves_both_models_and_the_random_state_bit_identical():
    a, b = mixed_modes()
    before, state = (snapshot(a), snapshot(b)), torch.get_rng_state()
    first = drift.cka(a, b, images(), batch_size=5)
    assert_untouched(a, before[0])
    assert_untouched(b, before[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert drift.cka(a, b, images(), batch_size=5) == first  # eval mode: no dropout, and constant statistics
    expected = cka_by_hand(a, b, images())
    assert first == pytest.approx({name: expected[name] for name in LAYERS}, rel=1e-8)


@pytest.mark.parametrize("loader", [loader_of_pairs, shuffled_loader])
def test_cka_restores_the_random_state_that_a_loader_uses(loader):
    a, b = two_nets()
    inputs, state = loader(images()), torch.get_rng_state()
    drift.cka(a, b, inputs)
    assert torch.equal(torch.get_rng_state(), state)


def test_cka_does_not_change_a_moored_model():
    a, b = two_nets()
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
    moor = mooring.attach(a, optimizer, importance="mas")
    a(images()).square().mean().backward()
    optimizer.step()
    before = {name: t.clone() for name, t in moor.state_dict().items()}
    drift.cka(a, b, images())
    after = moor.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: [x[:4], x[4:, :, :2]],
        lambda x: [x[:4], {"pixels": x[4:]}],
        lambda x: [x[:4], "nonsense"],
    ],
    ids=["a batch that does not fit", "a dictionary", "a string"],
)
def test_failed_forward_pass_removes_hooks_and_restores_modes(inputs):
    a, b = mixed_modes()
    before = snapshot(a), snapshot(b)
    with pytest.raises((RuntimeError, TypeError, AttributeError, MooringError)):
        drift.cka(a, b, inputs(images()))
    assert_untouched(a, before[0])
    assert_untouched(b, before[1])


# Errors


class Lacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Idle(Net):
    """A network with a layer that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def refused(words, *args, **options):
    with pytest.raises(MooringError) as error:
        drift.cka(*args, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_layer_is_refused_with_the_list_of_layers():
    a, b = two_nets()
    refused("no layer matches 'nose'; the layers are conv, norm", a, b, images(), ["conv", "nose"])
    refused("no layer matches 'x*'", a, b, images(), ["x*"])


def test_single_layer_name_is_accepted():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(11)])
    try:
        assert list(drift.cka(model, model, torch.randn(5, 3), "10")) == ["10"]
    except MooringError as error:
        assert "'10'" in str(error)  # noqa: PT017


def test_layer_missing_in_the_second_model_is_refused():
    a, _ = two_nets()
    refused("the second model has no layer 'norm'", a, Lacking(), images())
    assert list(drift.cka(a, Lacking(), images(), ["conv"])) == ["conv"]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_fewer_than_4_inputs_are_refused(n):
    a, b = two_nets()
    refused(f"at least 4 inputs, not {n}", a, b, images()[:n])
    refused(f"at least 4 inputs, not {n}", a, b, [part[None] for part in images()[:n]])


def test_iterator_of_inputs_is_refused_before_it_is_read():
    a, b = two_nets()
    read = []

    def batches():
        read.append(1)
        yield images()

    refused("only once", a, b, batches())
    refused("only once", a, b, iter([images()]))
    refused("only once", a, b, map(torch.clone, [images()]))
    assert not read


def test_layer_that_does_not_run_is_refused():
    torch.manual_seed(0)
    a = Idle().double()
    refused("layer 'unused' gave no tensor", a, a, images(), ["unused"])
    assert "unused" not in drift.cka(a, a, images())


def test_model_without_layers_is_refused():
    refused("no layers with parameters", nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()), images())


# Memory


class Batches:
    """Batches that count how often they are read."""

    def __init__(self, x: Tensor, size: int) -> None:
        self.parts = x.split(size)
        self.passes = 0

    def __iter__(self):
        for i, part in enumerate(self.parts):
            self.passes += i == 0
            yield part


class SizedBatches(Batches):
    def __len__(self) -> int:
        return len(self.parts)


@pytest.mark.parametrize("kind", [Batches, SizedBatches])
def test_features_that_do_not_fit_into_memory_are_collected_in_several_passes(monkeypatch, kind):
    a, b = two_nets()
    x = images()
    whole = kind(x, 5)
    expected = drift.cka(a, b, whole)
    assert whole.passes == 1
    monkeypatch.setattr(drift, "FEATURE_BYTES", 1)
    inputs = kind(x, 5)
    assert drift.cka(a, b, inputs) == expected  # bit for bit
    assert inputs.passes == len(LAYERS)  # a layer at a time
    assert list(expected) == LAYERS
    assert expected == pytest.approx({n: v for n, v in cka_by_hand(a, b, x).items() if n in LAYERS}, rel=1e-8)


def test_one_pass_collects_as_many_layers_as_fit(monkeypatch):
    a, b = two_nets()
    x = images()
    conv = 2 * 22 * 4 * 3 * 3 * 8  # two models, inputs, channels, pixels, bytes: as much again for norm
    inner, head = 2 * 22 * 3 * 8, 2 * 22 * 2 * 8
    everything = SizedBatches(x, 11)
    expected = drift.cka(a, b, everything)
    for budget, passes in ((2 * conv + inner + head, 1), (2 * conv + inner, 2), (2 * conv, 2), (conv, 3)):
        monkeypatch.setattr(drift, "FEATURE_BYTES", budget)
        inputs = SizedBatches(x, 11)
        assert drift.cka(a, b, inputs) == expected
        assert inputs.passes == passes, budget
