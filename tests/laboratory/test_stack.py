"""A stack of networks runs in the fastest mode that gives the outputs of the single networks."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from laboratory.small import class_stream, spec_for, trained_by_hand
from laboratory.test_batched_layers import randomized
from mooring_lab.engines.engine import LocalEngine
from mooring_lab.engines.runner import RunContext, SilentReporter
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.stack import stack as stack_module
from mooring_lab.fleet.stack.batched_layers import LAYERS
from mooring_lab.fleet.stack.stack import Stack, fastest_mode
from mooring_lab.networks.multi_head import MultiHeadNetwork, is_standard_layer

HERE = "laboratory.test_stack"
SHAPE = (1, 8, 8)


# Networks


class Patches(nn.Module):
    """A small vision transformer: patches, a hand-written attention block, a mean over the positions."""

    def __init__(self, dropout: float = 0.0, placed: bool = False) -> None:
        super().__init__()
        self.cut, self.enter = nn.Conv2d(1, 8, 2, stride=2), nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.between, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.places = nn.Parameter(torch.randn(1, 16, 8) / 3) if placed else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).mT + self.places
        y = self.enter(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return (x + self.outer(torch.nn.functional.gelu(self.inner(self.between(x))))).mean(1)


class Encoder(nn.Module):
    """The same with torch's encoder layers, which have a fast path for inference."""

    def __init__(self, batch_first: bool = True, **options: object) -> None:
        super().__init__()
        self.first = batch_first
        self.cut = nn.Conv2d(1, 8, 2, stride=2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first, **options)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2)
        return self.layers(x.mT).mean(1) if self.first else self.layers(x.permute(2, 0, 1)).mean(0)


class Remembering(nn.Module):
    """A network that replaces its buffer by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 6)
        self.register_buffer("usual", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.flatten(1))
        if self.training:
            self.usual = 0.9 * self.usual + 0.1 * y.detach().mean(0)
        return torch.tanh(y - self.usual)


def patches(shape: tuple[int, int, int]) -> nn.Module:
    return Patches()


def encoder(shape: tuple[int, int, int]) -> nn.Module:
    return Encoder()


def dropping(shape: tuple[int, int, int]) -> nn.Module:
    return Patches(dropout=0.2)


def placed(shape: tuple[int, int, int]) -> nn.Module:
    return Patches(placed=True)


def remembering(shape: tuple[int, int, int]) -> nn.Module:
    return Remembering()


def final(fleet: Fleet) -> dict[str, dict[str, torch.Tensor]]:
    specs = list(fleet.specs)
    fleet.run()
    return {spec.key: fleet.stack.network_of(row).state_dict() for row, spec in enumerate(specs)}


@pytest.mark.parametrize(
    ("network", "mode"), [("patches", "batched"), ("encoder", "batched"), ("placed", "vmap"), ("remembering", "vmap")]
)
def test_transformer_in_a_fleet_equals_the_run_alone_and_a_plain_loop(network, mode):
    stream = class_stream(tasks=2, images=30)
    settings = {"network": f"{HERE}:{network}", "epochs": 1, "lr": 0.05}
    specs = [spec_for(method, stream, seed, **settings) for method in ("plain", "explicit-ewc") for seed in (0, 1)]
    fleet = Fleet(specs, stream)
    assert fleet.stack.mode == mode
    together = final(fleet)
    for spec in specs[1:3]:
        alone = final(Fleet([spec], stream))[spec.key]
        torch.testing.assert_close(together[spec.key], alone, rtol=1e-9, atol=1e-9)
        expected = trained_by_hand(spec, stream).state_dict()
        torch.testing.assert_close(together[spec.key], expected, rtol=1e-9, atol=1e-9)


def test_transformer_with_dropout_trains_sequentially_and_a_line_says_so(tmp_path):
    class Listening(SilentReporter):
        def note(self, line: str) -> None:
            lines.append(line)

    lines: list[str] = []
    stream = class_stream(tasks=1, images=20)
    specs = [spec_for("plain", stream, seed, network=f"{HERE}:dropping", epochs=1) for seed in (0, 1)]
    assert Fleet(specs, stream).stack.mode == "sequential"
    context = RunContext({stream.fingerprint: stream}, {}, reporter=Listening())
    LocalEngine(context, tmp_path).run([specs], lambda results: None)
    assert lines == [f"{specs[0].network} cannot be stacked: its runs train one after the other"]


# Execution modes


def identical_networks(backbone: nn.Module, runs: int = 2, heads: int = 2) -> list[MultiHeadNetwork]:
    """Return networks with the same weights."""
    network = MultiHeadNetwork(backbone, 3, heads, SHAPE)
    return [copy.deepcopy(network) for _ in range(runs)]


class Twice(nn.Module):
    """A network that uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(64, 64)
        self.layers = nn.Sequential(nn.Flatten(), inner, nn.Tanh(), inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Tied(nn.Module):
    """A network with two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.one(x.flatten(1))))


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


MODES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "encoder": ("batched", lambda: Encoder(norm_first=True)),
    "encoder, length first": ("vmap", lambda: Encoder(batch_first=False)),
    "instance norm": (
        "batched",
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten()),
    ),
    "instance norm with statistics": (
        "vmap",
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten()),
    ),
    "one dimension": (
        "batched",
        lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(1, 4, 3), nn.PReLU(), nn.GroupNorm(2, 4), nn.Flatten()),
    ),
    "one dimension in a row": (
        "batched",
        lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Flatten()),
    ),
    "padding by name": (
        "batched",
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    ),
    "no parameters": (
        "batched",
        lambda: nn.Sequential(nn.BatchNorm2d(1, affine=False, track_running_stats=False), nn.Flatten()),
    ),
    "cumulative batch norm": ("sequential", lambda: flat(nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=None))),
    "dropout": ("sequential", lambda: flat(nn.Linear(64, 8), nn.Dropout(0.1))),
    "one layer twice": ("batched", Twice),
    "one weight twice": ("vmap", Tied),
    "weight norm": ("vmap", lambda: flat(nn.utils.parametrizations.weight_norm(nn.Linear(64, 8)))),
}


@pytest.mark.parametrize("runs", [1, 2, 3])
@pytest.mark.parametrize("case", MODES)
def test_each_network_runs_in_the_fastest_correct_mode(case, runs):
    mode, create = MODES[case]
    assert Stack(identical_networks(create(), runs)).mode == mode


def mixing_runs(name: str) -> Callable[..., torch.Tensor]:
    """Return a layer function that takes the tensor of that name from the previous run."""

    def mixed(layer: nn.Module, x: torch.Tensor, tensors: dict[str, torch.Tensor], runs: int) -> torch.Tensor:
        rolled = {n: t.roll(1, 0) if n == name else t for n, t in tensors.items()}
        return functions[type(layer)](layer, x, rolled, runs)

    functions = dict(LAYERS)
    return mixed


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (nn.Linear, "weight"),
        (nn.Linear, "bias"),
        (nn.BatchNorm1d, "weight"),
        (nn.BatchNorm1d, "bias"),
        (nn.BatchNorm1d, "running_mean"),
        (nn.BatchNorm1d, "running_var"),
        (nn.LayerNorm, "weight"),
        (nn.LayerNorm, "bias"),
    ],
)
def test_layer_that_mixes_runs_is_not_used_even_if_all_networks_are_identical(kind, name, monkeypatch):
    backbone = flat(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU())
    assert fastest_mode(identical_networks(backbone)) == "batched"
    monkeypatch.setitem(LAYERS, kind, mixing_runs(name))
    assert fastest_mode(identical_networks(backbone)) == "vmap"


def test_choosing_a_mode_changes_neither_networks_nor_global_state():
    networks = [
        MultiHeadNetwork(flat(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)), 3, 1, SHAPE) for _ in range(5)
    ]
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    random, fast = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    modes = [network.training for network in networks]
    stack = Stack(networks)
    assert stack.mode == "sequential"
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.backends.mha.get_fastpath_enabled() is fast is True
    assert [network.training for network in networks] == modes
    for run, (network, state) in enumerate(zip(networks, before, strict=True)):
        torch.testing.assert_close(network.state_dict(), state, rtol=0, atol=0)
        torch.testing.assert_close(stack.network_of(run).state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["batched", "vmap", "sequential"])
def test_given_mode_is_used_and_all_modes_agree(mode):
    networks = [randomized(MultiHeadNetwork(Encoder(), 3, 2, SHAPE), seed) for seed in range(3)]
    stack = Stack(networks, mode=mode)
    x = torch.rand(3, 4, *SHAPE, dtype=torch.float64)
    heads = torch.arange(12).view(3, 4) % 2
    assert stack.mode == mode
    for train in (True, False):
        alone = torch.stack([net.train(train)(x[run], heads[run]) for run, net in enumerate(networks)])
        torch.testing.assert_close(stack(x, heads, train=train), alone, rtol=1e-10, atol=1e-10)


def test_mode_is_chosen_once_for_each_architecture(monkeypatch):
    chosen = []
    monkeypatch.setattr(
        stack_module, "fastest_mode", lambda networks: chosen.append(networks) or fastest_mode(networks)
    )
    monkeypatch.setattr(stack_module, "_MODES", {})

    def stacked(*layers):
        return Stack(identical_networks(flat(*layers))).mode

    assert stacked(nn.Linear(64, 8), nn.ReLU()) == stacked(nn.Linear(64, 8), nn.ReLU()) == "batched"
    assert len(chosen) == 1
    assert stacked(nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5)) == "sequential"
    assert stacked(nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.0)) != "sequential"  # the same layers with another setting
    assert len(chosen) == 3
    monkeypatch.setitem(LAYERS, nn.Linear, mixing_runs("weight"))
    assert stacked(nn.Linear(64, 8), nn.ReLU()) == "vmap"


def test_mode_of_unknown_layers_is_chosen_each_time(monkeypatch):
    class Hiding(nn.Module):
        def __init__(self, noise: float):
            super().__init__()
            self.noise = noise

        def forward(self, x):
            return x + self.noise * torch.rand_like(x) if self.noise else x

    monkeypatch.setattr(stack_module, "_MODES", {})
    assert Stack(identical_networks(flat(nn.Linear(64, 8), Hiding(0.0)))).mode != "sequential"
    assert Stack(identical_networks(flat(nn.Linear(64, 8), Hiding(1.0)))).mode == "sequential"


def test_modified_layer_is_not_a_standard_layer():
    hooked, patched = nn.Linear(64, 8), nn.Linear(64, 8)
    hooked.register_forward_hook(lambda layer, args, out: 2 * out)
    patched.forward = lambda x: x[:, :8]
    assert [is_standard_layer(layer) for layer in (nn.Linear(64, 8), hooked, patched)] == [True, False, False]
