"""A moored loop works with any optimizer, several of them, and closures."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mooring
from by_hand import (
    F64,
    IMPORTANCES,
    OPTIMIZERS,
    PULLS,
    STRENGTH,
    Batches,
    ByHand,
    Make,
    SignDescent,
    agree,
    check,
    close,
    network,
    one_line,
    pair,
    some_batches,
    train,
    train_by_hand,
)
from mooring.errors import MooringError


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(optimizer: str, importance: str, pull: str) -> None:
    moor, hand = pair(OPTIMIZERS[optimizer], importance, pull)
    check(moor, hand)


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("pull", ["proximal", "penalty"])
def test_each_group_is_pulled_at_its_own_learning_rate_of_that_step(pull: str, tensor_lr: bool) -> None:
    def make(model: nn.Sequential) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.02}]
        if tensor_lr:
            groups = [{**group, "lr": torch.tensor(group["lr"], dtype=F64)} for group in groups]
        return torch.optim.SGD(groups)

    def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda i: (i % 4) / 2, lambda i: 0.5 ** (i % 4)])

    moor, hand = pair(make, "ewc", pull)
    schedulers = warm_up(moor.optimizer), warm_up(hand.optimizer)
    products = []
    for task in (1, 2, 3):
        for batch in some_batches(task):
            train(moor, [batch])
            train_by_hand(hand, [batch])
            products += [lr * STRENGTH * hand.previous[name] for name, _, lr in hand.parameters()]
            for scheduler in schedulers:
                scheduler.step()
        if task < 3:
            moor.consolidate()
            hand.consolidate()
    agree(moor, hand)
    assert any(bool((p > 1).any()) for p in products)  # clamped here
    assert any(bool(((p > 0) & (p < 1)).any()) for p in products)  # and not there


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
def test_several_optimizers_on_one_model_have_a_mooring_each(importance: str) -> None:
    model = network()
    twin = copy.deepcopy(model)
    makes: list[Make] = [
        lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.Adam(m[2].parameters(), lr=0.01),
    ]
    moors = [mooring.attach(model, make(model), importance=IMPORTANCES[importance]) for make in makes]
    hands = [ByHand(twin, make(twin), importance, "interpolation") for make in makes]
    for task in (1, 2):
        for x, y in some_batches(task):
            model.zero_grad()
            twin.zero_grad()
            mse_loss(model(x), y).backward()
            for moor in moors:
                moor.optimizer.step()
            for hand in hands:
                hand.look(x)
            mse_loss(twin(x), y).backward()
            for hand in hands:
                hand.step()
        if task == 1:
            for moored in (*moors, *hands):
                moored.consolidate()
    for moor, hand in zip(moors, hands, strict=True):
        agree(moor, hand)
    assert [sorted(moor.anchor) for moor in moors] == [["0.bias", "0.weight"], ["2.bias", "2.weight"]]


def test_several_optimizers_hold_the_statistics_of_a_normalisation_layer_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2])]
    moors = [mooring.attach(model, optimizer, buffers="interpolate") for optimizer in optimizers]

    def iterate(x: Tensor, y: Tensor) -> None:
        model.zero_grad()
        mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    (first, second) = some_batches(1, count=2)
    iterate(*first)
    for moor in moors:
        moor.consolidate()
    anchor = model[1].running_mean.clone()
    followed = 0.9 * anchor + 0.1 * model[0](second[0]).mean(0).detach()
    iterate(*second)
    close(model[1].running_mean, (anchor + followed) / 2)


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("pull", ["interpolation", "penalty"])
@pytest.mark.parametrize("importance", ["ewc", "si", "mas"])
@pytest.mark.parametrize("optimizer", ["sgd", "user-written"])
def test_a_closure_is_the_same_as_none(optimizer: str, importance: str, pull: str, by_keyword: bool) -> None:
    def train_with_closure(moor: mooring.Mooring, batches: Batches) -> None:
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                moor.optimizer.zero_grad()
                loss = mse_loss(moor.model(x), y)
                loss.backward()
                return loss

            expected = mse_loss(moor.model(x), y)
            returned = moor.optimizer.step(closure=closure) if by_keyword else moor.optimizer.step(closure)
            assert torch.equal(returned, expected)

    moor, hand = pair(OPTIMIZERS[optimizer], importance, pull)
    check(moor, hand, train_with_closure)


@pytest.mark.parametrize("importance", ["ewc", "si", "mas"])
def test_an_optimizer_that_evaluates_its_closure_twice_is_refused(importance: str) -> None:
    class Twice(SignDescent):
        def step(self, closure: Callable[[], Tensor]) -> Tensor:
            closure()
            return super().step(closure)

    moor, _ = pair(lambda m: Twice(m.parameters()), importance)
    ((x, y),) = some_batches(1, count=1)
    evaluated = 0

    def closure() -> Tensor:
        nonlocal evaluated
        evaluated += 1
        moor.optimizer.zero_grad()
        with torch.enable_grad():
            loss = mse_loss(moor.model(x), y)
            loss.backward()
        return loss

    with pytest.raises(MooringError, match="closure several times") as error:
        moor.optimizer.step(closure)
    assert one_line(error)
    assert evaluated == 1
