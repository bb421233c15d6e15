"""Tests of training with every optimizer, several optimizers, and closures."""

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
    identical,
    make_batches,
    network,
    one_line,
    pair,
    states,
    train,
    train_by_hand,
    two_tasks,
)
from mooring import EWC, SI
from mooring.errors import MooringError


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_the_oracle(optimizer: str, importance: str, pull: str) -> None:
    moor, hand = pair(OPTIMIZERS[optimizer], importance, pull)
    check(moor, hand)


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("pull", ["proximal", "penalty"])
def test_each_group_is_pulled_at_its_present_learning_rate(pull: str, tensor_lr: bool) -> None:
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
        for batch in make_batches(task):
            train(moor, [batch])
            train_by_hand(hand, [batch])
            products += [lr * STRENGTH * hand.previous[name] for name, _, lr in hand.parameters()]
            for scheduler in schedulers:
                scheduler.step()
        if task < 3:
            moor.consolidate()
            hand.consolidate()
    agree(moor, hand)
    assert any(bool((p > 1).any()) for p in products)  # clamped in this group
    assert any(bool(((p > 0) & (p < 1)).any()) for p in products)  # and not in the other


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
def test_several_optimizers_of_one_model_can_each_have_a_mooring(importance: str) -> None:
    model = network()
    hand_model = copy.deepcopy(model)
    makes: list[Make] = [
        lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.Adam(m[2].parameters(), lr=0.01),
    ]
    moors = [mooring.attach(model, make(model), importance=IMPORTANCES[importance]) for make in makes]
    hands = [ByHand(hand_model, make(hand_model), importance, "interpolation") for make in makes]
    for task in (1, 2):
        for x, y in make_batches(task):
            model.zero_grad()
            hand_model.zero_grad()
            mse_loss(model(x), y).backward()
            for moor in moors:
                moor.optimizer.step()
            for hand in hands:
                hand.observe(x)
            mse_loss(hand_model(x), y).backward()
            for hand in hands:
                hand.step()
        if task == 1:
            for moored in (*moors, *hands):
                moored.consolidate()
    for moor, hand in zip(moors, hands, strict=True):
        agree(moor, hand)
    assert [sorted(moor.anchor) for moor in moors] == [["0.bias", "0.weight"], ["2.bias", "2.weight"]]


def test_several_moorings_hold_normalisation_statistics_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2])]
    moors = [mooring.attach(model, optimizer, buffers="frozen") for optimizer in optimizers]

    def iterate(x: Tensor, y: Tensor) -> None:
        model.zero_grad()
        mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    (first, second) = make_batches(1, count=2)
    iterate(*first)
    for moor in moors:
        moor.consolidate()
    assert ["frozen_norms=1" in repr(moor) for moor in moors] == [True, False]
    anchor = model[1].running_mean.clone()
    iterate(*second)
    assert torch.equal(model[1].running_mean, anchor)


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("pull", ["interpolation", "penalty"])
@pytest.mark.parametrize("importance", ["ewc", "si", "mas"])
@pytest.mark.parametrize("optimizer", ["sgd", "user-written"])
def test_step_with_a_closure_equals_a_step_without(
    optimizer: str, importance: str, pull: str, by_keyword: bool
) -> None:
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
def test_optimizer_that_evaluates_its_closure_twice_is_refused(importance: str) -> None:
    class Twice(SignDescent):
        def step(self, closure: Callable[[], Tensor]) -> Tensor:
            closure()
            return super().step(closure)

    moor, _ = pair(lambda m: Twice(m.parameters()), importance)
    ((x, y),) = make_batches(1, count=1)
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


VARIANTS = {
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.1},
    ],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1}],
    "AdamW": [{}],
    "NAdam": [{}, {"weight_decay": 0.1}],
    "RAdam": [{}],
    "Adamax": [{"weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.5, "weight_decay": 0.1}],
    "Adagrad": [{"weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "ASGD": [{"weight_decay": 0.1}],
    "Rprop": [{}],
}
FORMS = [(name, options, foreach) for name in VARIANTS for options in VARIANTS[name] for foreach in (False, True)]


@pytest.mark.parametrize(("name", "options", "foreach"), FORMS, ids=str)
def test_importance_gets_the_tasks_gradient_even_if_the_optimizer_overwrites_it(name, options, foreach):
    """Some optimizers, such as Nesterov's foreach form, add momentum to the gradient in place."""
    torch.manual_seed(0)
    model = network()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=foreach, **options)
    moor = mooring.attach(model, optimizer, importance=EWC(decay=0.0))
    for x, y in make_batches(3):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        for parameter, gradient in gradients.items():
            close(moor.current[parameter], gradient**2)


@pytest.mark.parametrize("importance", ["ewc", "si", "rwalk", "mas"])
@pytest.mark.parametrize("pull", PULLS)
def test_maximizing_the_negative_loss_equals_minimizing_the_loss(importance, pull):
    moors = []
    for maximize in (False, True):
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, maximize=maximize)
        moors.append(mooring.attach(model, optimizer, importance=importance, pull=PULLS[pull]))
        for task in range(2):
            for x, y in make_batches(task):
                optimizer.zero_grad()
                (mse_loss(model(x), y) * (-1 if maximize else 1)).backward()
                optimizer.step()
            if task == 0:
                moors[-1].consolidate()
    for name, current in moors[0].current.items():
        close(moors[1].current[name], current)
    for p, q in zip(moors[0].model.parameters(), moors[1].model.parameters(), strict=True):
        close(q.detach(), p.detach())


@pytest.mark.parametrize("importance", ["ewc", "si", "mas", "per sample"])
def test_step_that_calls_its_parents_step_counts_once(importance):
    class Child(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # torch hooks a class when it is first used
    torch.manual_seed(0)
    model, hand_model = network(), network()
    hand_model.load_state_dict(model.state_dict())
    moors = []
    for net, make in ((model, torch.optim.SGD), (hand_model, Child)):
        optimizer = make(net.parameters(), lr=0.05)
        moors.append(mooring.attach(net, optimizer, importance=IMPORTANCES[importance]))
        for x, y in make_batches(0):
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            optimizer.step()
    assert moors[1].steps == moors[0].steps == 4
    for name, current in moors[0].current.items():
        close(moors[1].current[name], current)


@pytest.mark.parametrize("pull", PULLS)
def test_gradient_computed_after_a_failed_step_is_used(pull):
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    moor = mooring.attach(model, optimizer, importance=SI(), pull=PULLS[pull])
    (batches, more) = make_batches(0), make_batches(1)
    train(moor, batches)
    moor.consolidate()
    train(moor, more[:1])

    def explode(*_):
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(explode)
    x, y = more[1]
    mse_loss(model(x), y).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    with pytest.raises(MooringError, match="interrupted half-way"):
        moor.state_dict()
    optimizer.zero_grad()
    (1000 * mse_loss(model(x), y)).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        close(p.grad, expected[name])
    moor.state_dict()


class FailsOnce(torch.optim.SGD):
    """An optimizer whose second step raises, as one that runs out of memory does."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        if self.calls in (2, 6):
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "per sample", "mas", "si"])
def test_step_that_raised_and_is_taken_again_counts_once(importance, pull):
    def train_again(moor, batches):
        for x, y in batches:
            moor.optimizer.zero_grad()
            mse_loss(moor.model(x), y).backward()
            try:
                moor.optimizer.step()
            except RuntimeError:
                moor.optimizer.step()

    moor, hand = pair(importance=importance, pull=pull)
    moor.rebind(FailsOnce(moor.model.parameters(), lr=0.1))
    check(moor, hand, train_again)
    assert moor.steps == 4
    assert moor.optimizer.calls == 10


class ChoosesItsRate(torch.optim.SGD):
    """An optimizer whose learning rate is None, because it chooses its own, as Adafactor does."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad)


def test_optimizer_without_a_known_learning_rate_works_with_pulls_that_do_not_read_it():
    for pull in (
        mooring.Interpolation(),
        mooring.Interpolation(every="task"),
        mooring.Penalty(2.0),
        mooring.Budget(1e-3),
    ):
        model = network()
        moor = mooring.attach(model, ChoosesItsRate(model.parameters()), pull=pull)
        two_tasks(train, moor)
        moor.consolidate()
        assert moor.tasks == 2
        with pytest.raises(MooringError, match=r"diagnose\(\) needs a learning rate"):
            moor.diagnose(strength=1.0)


@pytest.mark.parametrize("pull", [mooring.Proximal(3.0), mooring.Penalty(3.0, clamp=True)], ids=repr)
def test_pull_that_needs_an_unknown_learning_rate_is_refused_before_the_step(pull):
    model = network()
    moor = mooring.attach(model, ChoosesItsRate(model.parameters()), pull=pull)
    before = states(model)
    with pytest.raises(MooringError, match="needs a learning rate, and the optimizer's is None"):
        train(moor, make_batches(1))
    assert identical(states(model), before)
