"""Oracle: the paper's formulas around a plain optimizer in float64, and training loops to compare with."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mooring
from mooring import EWC, MAS, SI
from mooring.errors import MooringError

F64 = torch.float64
STRENGTH = 3000.0
PULLS = {
    "interpolation": mooring.Interpolation(),
    "penalty": mooring.Penalty(STRENGTH, clamp=True),
    "proximal": mooring.Proximal(STRENGTH),
}
IMPORTANCES = {
    "ewc": EWC(),
    "per sample": EWC(per_sample=True),
    "sampled": EWC(labels="sampled"),
    "mas": MAS(),
    "si": SI(),
}
Batches = list[tuple[Tensor, Tensor]]
Make = Callable[[nn.Module], torch.optim.Optimizer]


class ByHand:
    """The expected effect of `mooring.attach`; call its `step` instead of the optimizer's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, importance: str, pull: str) -> None:
        self.model, self.optimizer, self.importance, self.pull = model, optimizer, importance, pull
        self.outputs: Callable[[Any], Tensor] = lambda returned: returned
        self.anchor: dict[str, Tensor] = {}
        self.previous: dict[str, Tensor] = {}
        self.current: dict[str, Tensor] = {}
        self.path: dict[str, Tensor] = {}
        self.had_gradient: set[str] = set()
        self.probe: dict[str, Tensor] = {}
        self.samples = 0

    def parameters(self) -> list[tuple[str, Tensor, float]]:
        """Return name, parameter and present learning rate of each trained parameter."""
        rates = {p: float(g.get("lr", 1.0)) for g in self.optimizer.param_groups for p in g["params"]}
        return [(name, p, rates[p]) for name, p in self.model.named_parameters() if p in rates and p.requires_grad]

    def observe(self, x: Tensor) -> None:
        """Add the gradient of the outputs that MAS and EWC with sampled labels need, until the next step."""
        outputs = self.outputs(self.model(x))
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        self.samples += len(outputs)
        if self.importance in ("mas", "sampled"):
            rows = outputs.log_softmax(-1)
            scalar = outputs.square().sum() if self.importance == "mas" else rows.amax(-1).sum()
            named = [(name, p) for name, p, _ in self.parameters()]
            gradients = torch.autograd.grad(scalar, [p for _, p in named], allow_unused=True)
            for (name, _), gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    self.probe[name] = self.probe.get(name, 0) + wide(gradient)

    @torch.no_grad()
    def step(self) -> None:
        updated = [(name, p, lr) for name, p, lr in self.parameters() if p.grad is not None]
        for name, p, _ in updated:
            self.start(name, p)
        gradients = {name: p.grad.clone() for name, p, _ in updated}
        before = {name: wide(p).clone() for name, p, _ in updated}
        if self.pull == "penalty":
            for name, p, lr in updated:
                cap = 1 / (lr * STRENGTH) if lr else float("inf")
                p.grad = p.grad + STRENGTH * self.previous[name].clamp(max=cap) * (p - self.anchor[name])
        self.optimizer.step()
        for name, p, lr in updated:
            p.grad = gradients[name]
            self.score(name, p, before[name])
            weight = self.weight(self.previous[name], self.current[name], lr)
            p.copy_(wide(p) + weight * (self.anchor[name] - wide(p)))
        self.probe, self.samples = {}, 0

    def start(self, name: str, p: Tensor) -> None:
        if name not in self.anchor:
            self.anchor[name] = wide(p).clone()
            self.previous[name], self.current[name], self.path[name] = (torch.zeros_like(wide(p)) for _ in range(3))

    def score(self, name: str, p: Tensor, before: Tensor) -> None:
        self.had_gradient.add(name)
        g, anchor = wide(p.grad), self.anchor[name]
        if self.importance == "si":
            self.path[name] = self.path[name] - g * (wide(p) - before)
            self.current[name] = self.path[name].clamp(min=0) / ((wide(p) - anchor) ** 2 + 1e-3)
            return
        score = {
            "ewc": lambda: g**2,
            "per sample": lambda: self.samples * g**2,
            "sampled": lambda: self.probe[name] ** 2 / self.samples,
            "mas": lambda: self.probe[name].abs(),
        }[self.importance]()
        self.current[name] = 0.2 * self.current[name] + 0.8 * score

    def weight(self, previous: Tensor, current: Tensor, lr: float) -> Tensor:
        if self.pull == "interpolation":
            return (previous.sqrt() / (previous.sqrt() + current.sqrt())).nan_to_num(0.0)  # 0/0 counts as 0
        p = lr * STRENGTH * previous if self.pull == "proximal" else torch.zeros_like(previous)
        return p / (1 + p)

    @torch.no_grad()
    def consolidate(self) -> None:
        for name, p, _ in self.parameters():
            self.start(name, p)
            self.anchor[name] = wide(p).clone()
            if name in self.had_gradient:
                self.previous[name] = (self.previous[name] + self.current[name]) / 2
            self.current[name], self.path[name] = torch.zeros_like(wide(p)), torch.zeros_like(wide(p))
        self.had_gradient = set()


def wide(t: Tensor) -> Tensor:
    return t.detach().to(torch.promote_types(t.dtype, torch.float32))


def network(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def make_batches(seed: int, count: int = 4, dtype: torch.dtype = F64) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, 8, 7, generator=generator, dtype=F64).to(dtype)
    return [(rows[:, :4] + seed, rows[:, 4:]) for rows in drawn]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pair(
    make: Make = sgd, importance: str = "ewc", pull: str = "interpolation", model: nn.Module | None = None
) -> tuple[mooring.Mooring, ByHand]:
    """Return the same model and optimizer twice: moored, and with the oracle."""
    model = network() if model is None else model
    hand_model = copy.deepcopy(model)
    optimizer = make(model)
    moor = mooring.attach(model, optimizer, importance=IMPORTANCES[importance], pull=PULLS[pull])
    return moor, ByHand(hand_model, make(hand_model), importance, pull)


def train(moor: mooring.Mooring, batches: Batches) -> None:
    """Train with a user's loop."""
    for x, y in batches:
        moor.optimizer.zero_grad()
        mse_loss(moor.model(x), y).backward()
        moor.optimizer.step()


def train_by_hand(hand: ByHand, batches: Batches) -> None:
    for x, y in batches:
        hand.optimizer.zero_grad()
        hand.observe(x)
        mse_loss(hand.model(x), y).backward()
        hand.step()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()


def two_tasks(loop: Callable[[Any, Batches], Any], moored: Any) -> None:
    """Train one task, consolidate, and train half of the next, so that previous and current importances exist."""
    loop(moored, make_batches(1))
    moored.consolidate()
    loop(moored, make_batches(2))


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-14 if rtol < 1e-8 else 1e-30)


def agree(moor: mooring.Mooring, hand: ByHand) -> None:
    """Check that parameters, anchors and importances equal the oracle's, and that no importance is all zero."""
    expected = dict(hand.model.named_parameters())
    for name, p in moor.model.named_parameters():
        close(p, expected[name.replace("_orig_mod.", "")])
    for attribute in ("anchor", "previous", "current"):
        ours, theirs = getattr(moor, attribute), getattr(hand, attribute)
        assert ours.keys() == theirs.keys()
        for name in ours:
            close(ours[name], theirs[name])
    assert all(bool(score.any()) for score in (*moor.current.values(), *moor.previous.values()))


def check(
    moor: mooring.Mooring,
    hand: ByHand,
    loop: Callable[[mooring.Mooring, Batches], Any] = train,
    loop_by_hand: Callable[[ByHand, Batches], Any] = train_by_hand,
) -> None:
    """Check that two tasks in a user's loop equal the oracle."""
    two_tasks(loop, moor)
    two_tasks(loop_by_hand, hand)
    agree(moor, hand)


def one_line(error: pytest.ExceptionInfo[MooringError]) -> bool:
    return "\n" not in str(error.value)


def states(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def identical(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def draw_most_likely(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    assert count == 1
    return rows.argmax(-1, keepdim=True)


def scaled_step(scaler: torch.amp.GradScaler, moor: mooring.Mooring, x: Tensor, y: Tensor, spoil: bool = False) -> None:
    moor.optimizer.zero_grad()
    loss = mse_loss(moor.model(x), y)
    scaler.scale(loss * float("inf") if spoil else loss).backward()
    scaler.step(moor.optimizer)
    scaler.update()


class SignDescent(torch.optim.Optimizer):
    """A user's own optimizer."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group["lr"])
        return loss

    def move(self, p: Tensor, lr: float) -> None:
        p.sub_(lr * p.grad.sign())


class DecaysInPlace(SignDescent):
    """An optimizer that adds weight decay to `p.grad` in place, as many outside torch do."""

    def move(self, p: Tensor, lr: float) -> None:
        p.sub_(lr * p.grad.add_(p, alpha=0.5))


OPTIMIZERS: dict[str, Make] = {
    "sgd": sgd,
    "sgd momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "user-written": lambda m: SignDescent(m.parameters()),
    "user-written, changes gradients": lambda m: DecaysInPlace(m.parameters()),
}
