"""Cases of the conformance suites (tiny networks, dtypes and optimizers) and checks that both suites use."""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

import mooring
from mooring.errors import UnheldWarning
from mooring.rules import Importance, Pull


class _Attention(nn.Module):
    """Self-attention over tokens, with the embedding tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        logits: Tensor = self.head(x.mean(1))
        return logits


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _convolution() -> nn.Module:
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(64, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor], int]] = {
    "linear": (_linear, lambda g: torch.randn(8, 6, generator=g), 3),
    "convolution": (_convolution, lambda g: torch.randn(8, 1, 6, 6, generator=g), 3),
    "attention": (_Attention, lambda g: torch.randint(7, (8, 4), generator=g), 7),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}

Snapshot = dict[str, Tensor]
"""Everything that a training step may change: parameters, gradients, buffers, modes, random state."""


@dataclass
class Case:
    """One network in one dtype with one optimizer, trained on fixed batches.

    Example:
        >>> case = Case("linear", "float64", "sgd")
        >>> before = case.snapshot()
        >>> case.train(2)
        >>> sorted(name for name, t in case.snapshot().items() if not torch.equal(t, before.get(name, t)))[0]
        'parameter 0.bias'
    """

    network: str
    dtype: str
    optimizer_name: str

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = NETWORKS[self.network][0]().to(DTYPES[self.dtype])
        self.optimizer = OPTIMIZERS[self.optimizer_name](self.model)
        self._moor: mooring.Mooring | None = None

    @property
    def moor(self) -> mooring.Mooring:
        """The Mooring of a case made by `attach`."""
        assert self._moor is not None, "attach() returns a case with a Mooring"
        return self._moor

    def __str__(self) -> str:
        return f"{self.network}-{self.dtype}-{self.optimizer_name}"

    def new(self) -> "Case":
        """Return the same case, untrained."""
        return Case(self.network, self.dtype, self.optimizer_name)

    def attach(self, importance: Importance | str, pull: Pull | None = None) -> "Case":
        """Return the same case, untrained, with a Mooring."""
        case = self.new()
        case._moor = mooring.attach(case.model, case.optimizer, importance=importance, pull=pull)
        return case

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return batch number `index`: inputs and labels."""
        _, inputs, classes = NETWORKS[self.network]
        generator = torch.Generator().manual_seed(index)
        x = inputs(generator)
        x = x.to(DTYPES[self.dtype]) if x.is_floating_point() else x
        return x, torch.randint(classes, (8,), generator=generator)

    def train(self, steps: int, first: int = 0) -> None:
        """Train on batches first, first + 1, ...; dropout uses the global random state."""
        for index in range(first, first + steps):
            x, y = self.batch(index)
            self.optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(self.model(x), y))
            with warnings.catch_warnings():  # a bias before batch normalization has no importance
                warnings.simplefilter("ignore", UnheldWarning)
                self.optimizer.step()

    def snapshot(self) -> Snapshot:
        """Copy everything that a training step may change."""
        kept = {f"parameter {name}": p.detach().clone() for name, p in self.model.named_parameters()}
        grads = [(name, p.grad) for name, p in self.model.named_parameters()]
        kept |= {f"gradient {name}": grad.clone() for name, grad in grads if grad is not None}
        kept |= {f"buffer {name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        kept |= {f"mode {name}": torch.tensor(module.training) for name, module in self.model.named_modules()}
        return kept | {"random state": torch.get_rng_state()}


CASES = [Case(*names) for names in product(NETWORKS, DTYPES, OPTIMIZERS)]


def check_equal(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise AssertionError unless both have the same tensors, bit for bit (NaN equals NaN).

    Example:
        >>> check_equal("halves", {"a": torch.ones(1)}, {"a": torch.zeros(1)})
        Traceback (most recent call last):
        ...
        AssertionError: halves: 'a' differs, by up to 1
    """
    if actual.keys() != expected.keys():
        raise AssertionError(f"{what}: {sorted(actual.keys() ^ expected.keys())} are only on one side")
    for name, tensor in actual.items():
        other = expected[name]
        same_shape = tensor.shape == other.shape and tensor.dtype == other.dtype
        if not same_shape or not torch.equal(tensor.nan_to_num(), other.nan_to_num()):
            by = f", by up to {(tensor.double() - other.double()).abs().max():.3g}" if same_shape else " in type"
            raise AssertionError(f"{what}: {name!r} differs{by}")


def check_resumes(make: Callable[[], Case]) -> None:
    """Check that training interrupted in a task and resumed in new objects equals uninterrupted training."""
    uninterrupted, first, second = make(), make(), make()
    for case in (uninterrupted, first):
        torch.manual_seed(1)
        case.train(3)
        case.moor.consolidate()
        case.train(2, first=3)
    random_state = torch.get_rng_state()
    second.model.load_state_dict(deepcopy(first.model.state_dict()))
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    second.moor.load_state_dict(deepcopy(first.moor.state_dict()))
    for case in (uninterrupted, second):
        torch.set_rng_state(random_state)
        case.train(3, first=5)
        case.moor.consolidate()
        case.train(2, first=8)
    check_equal("resumed in the middle of a task", second.snapshot(), uninterrupted.snapshot())
    check_equal("the resumed mooring's state", second.moor.state_dict(), uninterrupted.moor.state_dict())


def check_plain_training(what: str, case: Case, moored: Case, steps: int) -> None:
    """Check that a moored case trains like the plain one, bit for bit."""
    snapshots = []
    for run in (case.new(), moored):
        torch.manual_seed(1)
        run.train(steps)
        snapshots.append(run.snapshot())
    check_equal(f"{case}: {what}", snapshots[1], snapshots[0])
