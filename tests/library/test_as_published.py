"""The definitions of the paper's public code that the core has as options equal a loop written by hand."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import mooring
from by_hand import close, make_batches, network
from mooring.errors import MooringError

EPOCHS, STEPS = 2, 13
"""Two tasks of two epochs of 13 steps: 52 steps."""


class AuthorsByHand:
    """The explicit step of the authors' code (DESIGN, section 17) around SGD with momentum."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        self.model, self.kind = model, kind
        self.named = dict(model.named_parameters())
        self.path = {name: torch.zeros_like(p) for name, p in self.named.items()}
        self.fisher, self.previous = copy.deepcopy(self.path), copy.deepcopy(self.path)
        self.anchor, self.start = self.values(), self.values()
        self.tasks = 0

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named.items()}

    def start_epoch(self) -> None:
        self.start = self.values()

    def score(self, name: str) -> Tensor:
        squared = (self.named[name].detach() - self.anchor[name]) ** 2
        if self.kind == "si":
            return self.path[name] / (squared + 1e-10)
        return self.fisher[name] + self.path[name] / (self.fisher[name] * squared + 1e-10)

    @torch.no_grad()
    def after_step(self) -> None:
        for name, p in self.named.items():
            rise = (p.grad * (p - self.start[name])).clamp(min=0)
            self.path[name] = 0.8 * rise + 0.2 * self.path[name]
            self.fisher[name] = 0.8 * (p.grad * p) ** 2 + 0.2 * self.fisher[name]
            if self.tasks:
                current, previous = self.score(name).sqrt(), self.previous[name].sqrt()
                kept = current / (current + previous + 1e-20)
                p.copy_(kept * p + (1 - kept) * self.anchor[name])

    def consolidate(self) -> None:
        self.previous = {name: (self.previous[name] + self.score(name)) / 2 for name in self.named}
        self.path = {name: torch.zeros_like(p) for name, p in self.named.items()}
        self.anchor, self.tasks = self.values(), self.tasks + 1
        self.start_epoch()


@pytest.mark.parametrize("kind", ["si", "rwalk"])
def test_rising_paths_and_returning_weights_equal_the_authors_loop(kind: str) -> None:
    model = network()
    hand = AuthorsByHand(copy.deepcopy(model), kind)
    rules = {"si": mooring.SI, "rwalk": mooring.RWalk}
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (model, hand.model))
    importance = rules[kind](path="rising", damping=1e-10)
    moor = mooring.attach(model, optimizer, importance=importance, pull=mooring.Interpolation(returns=True))
    for task in (1, 2):
        for epoch in range(EPOCHS):
            if epoch:
                moor.start_epoch()
                hand.start_epoch()
            for x, y in make_batches(task, STEPS):
                for trained, descent in ((model, optimizer), (hand.model, own)):
                    descent.zero_grad()
                    mse_loss(trained(x), y).backward()
                    descent.step()
                hand.after_step()
        moor.consolidate()
        hand.consolidate()
    for name, p in hand.named.items():
        close(dict(model.named_parameters())[name], p, rtol=1e-7)
        close(moor.previous[name], hand.previous[name], rtol=1e-5)
    assert all(bool(score.any()) for score in moor.previous.values())


def test_a_saved_state_continues_with_the_carried_fisher_information() -> None:
    def moored() -> mooring.Mooring:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        return mooring.attach(model, optimizer, importance=mooring.RWalk(path="rising", damping=1e-10))

    def train(moor: mooring.Mooring, task: int) -> None:
        for x, y in make_batches(task):
            moor.optimizer.zero_grad()
            mse_loss(moor.model(x), y).backward()
            moor.optimizer.step()

    first, second = moored(), moored()
    train(first, 1)
    first.consolidate()
    assert bool(first.state_dict()["fisher.0.weight"].all())  # not reset
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, 2)
    train(second, 2)
    assert first.current["0.weight"].equal(second.current["0.weight"])


def test_weights_without_any_importance_return_only_if_asked_to() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    for returns, rate in ((False, 0.0), (True, 1.0)):
        pull = mooring.Interpolation(returns=returns)
        assert pull.rate(zero, zero, lr=0.1).item() == rate
        assert pull.rate(zero, one, lr=0.1).item() == 0.0
        assert pull.rate(one, zero, lr=0.1).item() == 1.0


@pytest.mark.parametrize("rule", [mooring.SI, mooring.RWalk])
def test_an_unknown_path_is_refused_in_one_line(rule) -> None:
    with pytest.raises(MooringError, match="integral") as error:
        rule(path="falling")
    assert "\n" not in str(error.value)
