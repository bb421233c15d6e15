"""A training loop, once moored, works unchanged with whatever else is in it.

The reference is `ByHand`: the paper's formulas written out around a plain optimizer, in float64.
"""

import copy
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

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
    """What `mooring.attach` should do, around an optimizer whose `step` is called here instead."""

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
        """Name, parameter and learning rate as it is now."""
        rates = {p: float(g.get("lr", 1.0)) for g in self.optimizer.param_groups for p in g["params"]}
        return [(name, p, rates[p]) for name, p in self.model.named_parameters() if p in rates and p.requires_grad]

    def look(self, x: Tensor) -> None:
        """The gradient of the outputs that MAS and EWC with drawn labels want, summed until the next step."""
        outputs = self.outputs(self.model(x))
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        self.samples += len(outputs)
        if self.importance in ("mas", "sampled"):
            rows = outputs.log_softmax(-1)
            looked = outputs.square().sum() if self.importance == "mas" else rows.amax(-1).sum()
            named = [(name, p) for name, p, _ in self.parameters()]
            gradients = torch.autograd.grad(looked, [p for _, p in named], allow_unused=True)
            for (name, _), gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    self.probe[name] = self.probe.get(name, 0) + wide(gradient)

    @torch.no_grad()
    def step(self) -> None:
        due = [(name, p, lr) for name, p, lr in self.parameters() if p.grad is not None]
        for name, p, _ in due:
            self.start(name, p)
        gradients = {name: p.grad.clone() for name, p, _ in due}
        before = {name: wide(p).clone() for name, p, _ in due}
        if self.pull == "penalty":
            for name, p, lr in due:
                cap = 1 / (lr * STRENGTH) if lr else float("inf")
                p.grad = p.grad + STRENGTH * self.previous[name].clamp(max=cap) * (p - self.anchor[name])
        self.optimizer.step()
        for name, p, lr in due:
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
            return (previous.sqrt() / (previous.sqrt() + current.sqrt())).nan_to_num(0.0)  # 0/0 is free
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


def some_batches(seed: int, count: int = 4, dtype: torch.dtype = F64) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, 8, 7, generator=generator, dtype=F64).to(dtype)
    return [(rows[:, :4] + seed, rows[:, 4:]) for rows in drawn]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pair(
    make: Make = sgd, importance: str = "ewc", pull: str = "interpolation", model: nn.Module | None = None
) -> tuple[mooring.Mooring, ByHand]:
    """The same model and optimizer twice: moored, and by hand."""
    model = network() if model is None else model
    twin = copy.deepcopy(model)
    optimizer = make(model)
    moor = mooring.attach(model, optimizer, importance=IMPORTANCES[importance], pull=PULLS[pull])
    return moor, ByHand(twin, make(twin), importance, pull)


def train(moor: mooring.Mooring, batches: Batches) -> None:
    """The loop that a user has."""
    for x, y in batches:
        moor.optimizer.zero_grad()
        mse_loss(moor.model(x), y).backward()
        moor.optimizer.step()


def train_by_hand(hand: ByHand, batches: Batches) -> None:
    for x, y in batches:
        hand.optimizer.zero_grad()
        hand.look(x)
        mse_loss(hand.model(x), y).backward()
        hand.step()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()


def two_tasks(loop: Callable[[Any, Batches], Any], moored: Any) -> None:
    """One task, a consolidation, and half of the next, so that importances of both kinds are at hand."""
    loop(moored, some_batches(1))
    moored.consolidate()
    loop(moored, some_batches(2))


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-14 if rtol < 1e-8 else 1e-30)


def agree(moor: mooring.Mooring, hand: ByHand) -> None:
    """Parameters and all that is kept of them are as by hand, and not for want of anything to compare."""
    expected = dict(hand.model.named_parameters())
    for name, p in moor.model.named_parameters():
        close(p, expected[name.replace("_orig_mod.", "")])
    for kept in ("anchor", "previous", "current"):
        ours, theirs = getattr(moor, kept), getattr(hand, kept)
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
    """Two tasks in a user's loop give what they give by hand."""
    two_tasks(loop, moor)
    two_tasks(loop_by_hand, hand)
    agree(moor, hand)


def one_line(error: pytest.ExceptionInfo[MooringError]) -> bool:
    return "\n" not in str(error.value)


def states(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def identical(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Optimizers


class SignDescent(torch.optim.Optimizer):
    """An optimizer that a user wrote."""

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
    """Adds weight decay to `p.grad` itself, as many optimizers outside torch do."""

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


# Closures


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


# Gradients: accumulated, clipped, scaled


def draw_the_likeliest(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    assert count == 1
    return rows.argmax(-1, keepdim=True)


@pytest.mark.parametrize("how", ["a backward pass each", "one backward pass", "the first without a gradient"])
@pytest.mark.parametrize("importance", ["ewc", "per sample", "sampled", "mas"])
def test_micro_batches_are_one_batch(importance: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "multinomial", draw_the_likeliest)
    sizes = (3, 4, 1)
    weights = torch.ones(8, 1, dtype=F64)
    if how == "the first without a gradient":
        weights[:3] = 0  # a margin that is kept, a loss that is masked

    def losses(model: nn.Module, *tensors: Tensor) -> Iterator[Tensor]:
        for x, y, w in zip(*(t.split(sizes) for t in (*tensors, weights)), strict=True):
            yield (w * (model(x) - y).square()).sum() / 24

    def train_in_parts(moor: mooring.Mooring, batches: Batches) -> None:
        for x, y in batches:
            moor.optimizer.zero_grad()
            if how == "one backward pass":
                sum(losses(moor.model, x, y)).backward()
            else:
                for loss in losses(moor.model, x, y):
                    loss.backward()
            moor.optimizer.step()

    def train_whole(hand: ByHand, batches: Batches) -> None:
        for x, y in batches:
            hand.optimizer.zero_grad()
            hand.look(x)
            ((weights * (hand.model(x) - y).square()).sum() / 24).backward()
            hand.step()

    moor, hand = pair(importance=importance)
    check(moor, hand, train_in_parts, train_whole)
    assert moor.steps == 4


@pytest.mark.parametrize("importance", ["ewc", "si"])
def test_importance_sees_the_clipped_gradient(importance: str) -> None:
    norms = []

    def clipped(moored: Any, step: Callable[[], Any], x: Tensor, y: Tensor) -> None:
        moored.optimizer.zero_grad()
        mse_loss(moored.model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(moored.model.parameters(), 0.05)))
        step()

    moor, hand = pair(importance=importance)
    two_tasks(lambda m, batches: [clipped(m, m.optimizer.step, x, y) for x, y in batches], moor)
    two_tasks(lambda h, batches: [clipped(h, h.step, x, y) for x, y in batches], hand)
    agree(moor, hand)
    assert min(norms) > 0.05


SCALED: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "fused sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "fused adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),
}


def scaled_step(scaler: torch.amp.GradScaler, moor: mooring.Mooring, x: Tensor, y: Tensor, spoil: bool = False) -> None:
    moor.optimizer.zero_grad()
    loss = mse_loss(moor.model(x), y)
    scaler.scale(loss * float("inf") if spoil else loss).backward()
    scaler.step(moor.optimizer)
    scaler.update()


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "per sample", "mas", "si"])
@pytest.mark.parametrize("optimizer", SCALED)
def test_grad_scaler_changes_nothing(optimizer: str, importance: str, pull: str) -> None:
    moor, hand = pair(SCALED[optimizer], importance, pull)
    scaler = torch.amp.GradScaler("cpu")
    two_tasks(lambda m, batches: [scaled_step(scaler, m, x, y) for x, y in batches], moor)
    two_tasks(train_by_hand, hand)
    assert moor.steps == 4
    agree(moor, hand)


@pytest.mark.parametrize("optimizer", SCALED)
def test_grad_scaler_with_unscale_and_clipping(optimizer: str) -> None:
    moor, hand = pair(SCALED[optimizer], "ewc", "penalty")
    scaler = torch.amp.GradScaler("cpu")

    def train_clipped(moor: mooring.Mooring, batches: Batches) -> None:
        for x, y in batches:
            moor.optimizer.zero_grad()
            scaler.scale(mse_loss(moor.model(x), y)).backward()
            scaler.unscale_(moor.optimizer)
            assert float(nn.utils.clip_grad_norm_(moor.model.parameters(), 0.05)) > 0.05
            scaler.step(moor.optimizer)
            scaler.update()

    def train_clipped_by_hand(hand: ByHand, batches: Batches) -> None:
        for x, y in batches:
            hand.optimizer.zero_grad()
            mse_loss(hand.model(x), y).backward()
            nn.utils.clip_grad_norm_(hand.model.parameters(), 0.05)
            hand.step()

    check(moor, hand, train_clipped, train_clipped_by_hand)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "per sample", "mas", "si"])
@pytest.mark.parametrize("optimizer", SCALED)
def test_a_step_that_grad_scaler_skips_leaves_no_trace(optimizer: str, importance: str, pull: str) -> None:
    moor, hand = pair(SCALED[optimizer], importance, pull)
    scaler = torch.amp.GradScaler("cpu")
    skipped = some_batches(3, count=1)[0]

    def train_with_a_skipped_step(moor: mooring.Mooring, batches: Batches) -> None:
        for i, (x, y) in enumerate(batches):
            scaled_step(scaler, moor, x, y)
            if i == 1:
                before, kept, scale = states(moor.model), copy.deepcopy(moor.state_dict()), scaler.get_scale()
                scaled_step(scaler, moor, *skipped, spoil=True)
                assert scaler.get_scale() < scale
                assert moor.steps == 2
                assert identical(states(moor.model), before)
                now = moor.state_dict()
                assert identical(
                    [now[key] for key in kept if key != "mooring"], [kept[k] for k in kept if k != "mooring"]
                )

    check(moor, hand, train_with_a_skipped_step)


@pytest.mark.parametrize("zero_grad", ["to none", "to zeros", "after the forward pass", "at the end"])
@pytest.mark.parametrize("importance", ["mas", "per sample"])
@pytest.mark.parametrize("optimizer", ["sgd", "fused sgd"])
def test_the_outputs_of_a_skipped_step_are_not_mixed_into_the_next(
    optimizer: str, importance: str, zero_grad: str
) -> None:
    moor, hand = pair(SCALED[optimizer], importance)
    scaler = torch.amp.GradScaler("cpu")
    good, bad = some_batches(1, count=2)
    for (x, y), spoil in ((bad, True), (good, False)):
        if zero_grad in ("to none", "to zeros"):
            moor.optimizer.zero_grad(set_to_none=zero_grad == "to none")
        loss = mse_loss(moor.model(x), y)
        if zero_grad == "after the forward pass":
            moor.optimizer.zero_grad()
        scaler.scale(loss * float("inf") if spoil else loss).backward()
        scaler.step(moor.optimizer)
        scaler.update()
        if zero_grad == "at the end":
            moor.optimizer.zero_grad()
    train_by_hand(hand, [good])
    assert moor.steps == 1
    for name, score in hand.current.items():
        close(moor.current[name], score)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("optimizer", SCALED)
def test_gradients_after_a_scaled_step_are_what_they_are_without_a_mooring(optimizer: str, pull: str) -> None:
    moor, _ = pair(SCALED[optimizer], "ewc", pull)
    scaler = torch.amp.GradScaler("cpu")
    scaled_step(scaler, moor, *some_batches(1, count=1)[0])
    moor.consolidate()
    scaled_step(scaler, moor, *some_batches(2, count=1)[0])
    plain = copy.deepcopy(moor.model)
    x, y = some_batches(2, count=2)[1]
    plain.zero_grad()
    mse_loss(plain(x), y).backward()
    scaled_step(scaler, moor, x, y)
    for ours, theirs in zip(moor.model.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad)


# Number formats


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_state_is_float32_or_wider(dtype: torch.dtype, importance: str) -> None:
    moor, hand = pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.125), importance, model=network(dtype))
    train(moor, some_batches(1, dtype=dtype))
    train_by_hand(hand, some_batches(1, dtype=dtype))
    assert identical(states(moor.model), states(hand.model))  # nothing is held yet
    state_dtype = F64 if dtype == F64 else torch.float32
    for name, score in hand.current.items():
        assert moor.current[name].dtype == moor.anchor[name].dtype == state_dtype
        close(moor.current[name], score, rtol=1e-10 if dtype == F64 else 1e-5)
    moor.consolidate()
    hand.consolidate()
    train(moor, some_batches(2, count=1, dtype=dtype))
    train_by_hand(hand, some_batches(2, count=1, dtype=dtype))
    for ours, theirs, name in zip(moor.model.parameters(), hand.model.parameters(), moor.previous, strict=True):
        assert ours.dtype == dtype
        assert moor.previous[name].dtype == state_dtype
        close(ours, theirs, rtol=max(torch.finfo(dtype).eps, 8 * torch.finfo(state_dtype).eps))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_is_bfloat16_by_choice(dtype: torch.dtype) -> None:
    model = network(dtype)
    moor = mooring.attach(model, sgd(model), state_dtype=torch.bfloat16)
    hand = ByHand(twin := copy.deepcopy(model), sgd(twin), "ewc", "interpolation")
    two_tasks(lambda m, batches: train(m, [(x.to(dtype), y.to(dtype)) for x, y in batches]), moor)
    kept = {key: tensor for key, tensor in moor.state_dict().items() if key != "mooring"}
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    train_by_hand(hand, [(x.to(dtype), y.to(dtype)) for x, y in some_batches(1)])
    for name, previous in moor.previous.items():  # four roundings, of g, g^2 and two averages
        close(previous.float(), hand.current[name] / 2, rtol=4 * 2**-8)


@pytest.mark.parametrize(("dtype", "state_dtype"), [(torch.float32, torch.bfloat16), (F64, torch.float32)])
def test_si_measures_the_path_in_the_parameters_own_precision(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    def small(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-8 if dtype == F64 else 1e-4)

    model = network(dtype)
    hand = ByHand(twin := copy.deepcopy(model), small(twin), "si", "interpolation")
    moor = mooring.attach(model, small(model), importance="si", state_dtype=state_dtype)
    train(moor, some_batches(1, count=2, dtype=dtype))
    train_by_hand(hand, some_batches(1, count=2, dtype=dtype))
    for name, path in hand.path.items():
        kept = moor.state_dict()[f"path.{name}"]
        assert bool(path.all())
        close(kept.to(dtype), path, rtol=8 * torch.finfo(state_dtype).eps)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_narrow_state_does_not_round_the_parameters(pull: str, scaled: bool) -> None:
    """Inputs that were always 0 in the first task leave the weights on them free: they train exactly as without."""
    model = network(torch.float32)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, fused=scaled) for m in (model, plain)]
    moor = mooring.attach(model, optimizers[0], pull=PULLS[pull], state_dtype=torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    first, second = ([(x.float(), y.float()) for x, y in some_batches(task, count=1)] for task in (1, 2))
    first[0][0][:, 0] = 0
    scaled_step(scaler, moor, *first[0])
    moor.consolidate()
    with torch.no_grad():
        model[0].weight.add_(0.01)  # away from the anchor, so that there is something to pull
    plain.load_state_dict(model.state_dict())
    scaled_step(scaler, moor, *second[0])
    train_plain(plain, optimizers[1], second)
    assert not moor.previous["0.weight"][:, 0].any()
    assert moor.previous["0.weight"][:, 1:].all()
    assert torch.equal(model[0].weight[:, 0], plain[0].weight[:, 0])
    assert not torch.equal(model[0].weight[:, 1:], plain[0].weight[:, 1:])  # while these are held


# Parameters: tied, frozen, without a gradient, new


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
def test_a_tied_parameter_is_moored_once(importance: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.last(self.first(x).tanh()))

    torch.manual_seed(0)
    moor, hand = pair(importance=importance, model=Tied().double())
    check(moor, hand)
    assert sorted(moor.anchor) == ["first.weight", "out.bias", "out.weight"]


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
def test_nothing_is_stored_for_a_frozen_parameter(importance: str) -> None:
    model = network()
    model[0].requires_grad_(False)
    moor, hand = pair(importance=importance, model=model)
    before = states(model[0])
    check(moor, hand)
    assert identical(states(model[0]), before)
    assert not [key for key in moor.state_dict() if ".0." in key]


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
def test_a_parameter_that_is_unfrozen_later_is_free_until_the_next_consolidation(importance: str) -> None:
    moor, hand = pair(importance=importance)
    for model in (moor.model, hand.model):
        model[0].requires_grad_(False)
    for task in (1, 2, 3):
        if task == 2:
            for model in (moor.model, hand.model):
                model[0].requires_grad_(True)
        train(moor, some_batches(task))
        train_by_hand(hand, some_batches(task))
        assert ("0.weight" in moor.anchor) == (task > 1)
        if task == 2:
            assert not moor.previous["0.weight"].any()
        if task < 3:
            moor.consolidate()
            hand.consolidate()
    agree(moor, hand)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
def test_a_parameter_without_a_gradient_is_left_alone(importance: str, pull: str) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads, self.head = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 3) for _ in range(2)), 0

        def forward(self, x: Tensor) -> Tensor:
            return self.heads[self.head](self.body(x).tanh())

    torch.manual_seed(0)
    moor, hand = pair(lambda m: torch.optim.Adam(m.parameters(), lr=0.01), importance, pull, TwoHeads().double())
    train(moor, some_batches(1))
    train_by_hand(hand, some_batches(1))
    moor.consolidate()
    hand.consolidate()
    for model in (moor.model, hand.model):
        model.head = 1
        with torch.no_grad():
            model.heads[0].weight.add_(1.0)  # away from its anchor, where a pull would show
    weight, previous = moor.model.heads[0].weight.detach().clone(), moor.previous["heads.0.weight"].clone()
    anchor = moor.anchor["heads.0.weight"].clone()
    train(moor, some_batches(2))
    train_by_hand(hand, some_batches(2))
    assert torch.equal(moor.model.heads[0].weight, weight)
    assert not moor.current["heads.0.weight"].any()
    assert torch.equal(moor.anchor["heads.0.weight"], anchor)
    moor.consolidate()
    hand.consolidate()
    assert torch.equal(moor.previous["heads.0.weight"], previous)
    assert previous.any()
    for name, expected in hand.previous.items():
        close(moor.previous[name], expected)
    for ours, theirs in zip(moor.model.parameters(), hand.model.parameters(), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "per sample", "mas", "si"])
def test_a_head_added_later_is_free_until_the_next_consolidation_and_then_held(importance: str, pull: str) -> None:
    moor, hand = pair(importance=importance, pull=pull)
    torch.manual_seed(1)
    head = nn.Linear(3, 3).double()
    for task in (1, 2, 3):
        if task == 2:
            for moored in (moor, hand):
                added = copy.deepcopy(head)
                moored.model.append(added)
                moored.optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.05})
        for batch in some_batches(task):
            train(moor, [batch])
            train_by_hand(hand, [batch])
            if task == 2:
                assert not moor.previous["3.weight"].any()
                close(moor.current["3.weight"], hand.current["3.weight"])
        if task < 3:
            moor.consolidate()
            hand.consolidate()
    agree(moor, hand)
    assert moor.previous["3.weight"].any()


def test_parameters_of_the_loss_are_left_to_the_optimizer() -> None:
    temperature = nn.Parameter(torch.ones((), dtype=F64))
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    moor = mooring.attach(model, optimizer)
    for task in (1, 2):
        for x, y in some_batches(task):
            optimizer.zero_grad()
            mse_loss(model(x) * temperature, y).backward()
            expected = temperature.item() - 0.1 * temperature.grad.item()
            optimizer.step()
            assert temperature.item() == expected
        moor.consolidate()
    assert sorted(moor.anchor) == ["0.bias", "0.weight", "2.bias", "2.weight"]


# Models: compiled, checkpointed, channels last


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile as it is in a new process."""
    import torch._functorch.config

    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=True):
        yield
    torch.compiler.reset()


def compiled_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("importance", ["ewc", "mas"])
@pytest.mark.parametrize("compile_", [torch.compile, compiled_in_place])
@pytest.mark.parametrize("when", ["before", "after", "long before"])
def test_a_compiled_model(when: str, compile_: Callable[..., nn.Module], importance: str) -> None:
    """Compiled before attaching or after it, or compiled and trained for a while before attaching."""
    model = network()
    twin = copy.deepcopy(model)
    called = model if when == "after" else compile_(model, backend="aot_eager")
    if when == "long before":
        for each in (called, twin):
            train_plain(each, sgd(each), some_batches(0))
    moor = mooring.attach(called, sgd(called), importance=IMPORTANCES[importance])
    hand = ByHand(twin, sgd(twin), importance, "interpolation")
    called = compile_(model, backend="aot_eager") if when == "after" else called
    check(moor, hand, lambda m, batches: train_plain(called, m.optimizer, batches))
    assert sorted(moor.anchor) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    moor.detach()
    for each, optimizer in ((called, moor.optimizer), (twin, hand.optimizer)):
        train_plain(each, optimizer, some_batches(3))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(ours, theirs)


@pytest.mark.usefixtures("fresh_compiler")
def test_mas_on_the_model_itself_when_its_compiled_form_was_trained_before() -> None:
    model = network()
    twin = copy.deepcopy(model)
    called = torch.compile(model, backend="aot_eager")
    for each in (called, twin):
        train_plain(each, sgd(each), some_batches(0))
    moor = mooring.attach(model, sgd(model), importance=MAS())
    hand = ByHand(twin, sgd(twin), "mas", "interpolation")
    check(moor, hand, lambda m, batches: train_plain(called, m.optimizer, batches))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
def test_mas_leaves_the_gradients_of_a_model_compiled_by_inductor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor lets a backward pass overwrite what the forward pass saved, and MAS makes two of them.

    Code that was compiled for plain training, in this process or out of the cache of an earlier one, must not be used.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    class Gated(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h = self[0](x).tanh()
            return self[2](self[1](h).sigmoid() * h + h.exp())

    torch.manual_seed(0)
    model = Gated(nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 3)).double()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model)
    for each in (compiled, twin):
        train_plain(each, sgd(each), some_batches(0, count=1))
    moor = mooring.attach(compiled, sgd(compiled), importance=MAS())
    hand = ByHand(twin, sgd(twin), "mas", "interpolation")
    check(moor, hand)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](checkpoint(lambda x: self[1](self[0](x)), x, use_reentrant=False))


@pytest.mark.parametrize("importance", ["mas", "sampled"])
def test_activation_checkpointing(importance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "multinomial", draw_the_likeliest)
    twin = network()
    model = Checkpointed(*copy.deepcopy(twin))
    moor = mooring.attach(model, sgd(model), importance=IMPORTANCES[importance])
    hand = ByHand(twin, sgd(twin), importance, "interpolation")
    check(moor, hand)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("channels", [(3, 4), (64, 512)])  # the second is worked on in pieces, where it can be
def test_channels_last(channels: tuple[int, int], importance: str, pull: str) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Conv2d(*channels, 3), nn.Tanh(), nn.Flatten(), nn.Linear(channels[1], 3)).double()
    model = copy.deepcopy(twin).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    moor = mooring.attach(model, sgd(model), importance=IMPORTANCES[importance], pull=PULLS[pull])
    hand = ByHand(twin, sgd(twin), importance, pull)
    for task in (1, 2):
        for _ in range(2):
            x, y = torch.randn(2, channels[0], 3, 3, dtype=F64), torch.randn(2, 3, dtype=F64)
            train(moor, [(x.to(memory_format=torch.channels_last), y)])
            train_by_hand(hand, [(x, y)])
        if task == 1:
            moor.consolidate()
            hand.consolidate()
    agree(moor, hand)
    assert not model[0].weight.is_contiguous()


# What a model returns


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Opaque:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


class Returning(nn.Sequential):
    """Computes a loss of its own, as language models do, and returns it with the logits."""

    form: Callable[[Tensor, Tensor], Any]

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return self.form(logits.sin().mean(), logits)


def returning(form: Callable[[Tensor, Tensor], Any]) -> Returning:
    model = Returning(*network())
    model.form = form
    return model


def learn_from_returned_loss(
    form: Callable[[Tensor, Tensor], Any],
    loss_of: Callable[[Any], Tensor],
    seen: Callable[[Tensor], Tensor] = lambda logits: logits,
    **options: Any,
) -> None:
    """Two tasks on the loss that a model returns, moored and by hand; `seen` is what MAS should look at."""
    model, twin = returning(form), network()
    moor = mooring.attach(model, sgd(model), importance=MAS(), **options)
    hand = ByHand(twin, sgd(twin), "mas", "interpolation")
    hand.outputs = seen
    for task in (1, 2):
        for x, _ in some_batches(task):
            model.zero_grad()
            loss_of(model(x)).backward()
            moor.optimizer.step()
            twin.zero_grad()
            hand.look(x)
            twin(x).sin().mean().backward()
            hand.step()
        if task == 1:
            moor.consolidate()
            hand.consolidate()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(ours, theirs)
    for name, score in hand.current.items():
        close(moor.current[name], score)
        assert score.any()


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda loss, logits: logits, lambda returned: returned.sin().mean()),
    "tuple": (lambda loss, logits: (loss, logits), lambda returned: returned[0]),
    "tuple, loss outside": (lambda loss, logits: (loss, logits), lambda returned: returned[1].sin().mean()),
    "list": (lambda loss, logits: [logits, loss], lambda returned: returned[1]),
    "dict": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda returned: returned["loss"]),
    "dataclass": (Output, lambda returned: returned.loss),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_found_in_what_a_model_returns(form: str) -> None:
    learn_from_returned_loss(*FORMS[form])


@pytest.mark.parametrize(
    "form",
    [
        Opaque,
        lambda loss, logits: {"loss": loss, "scores": logits},
        lambda loss, logits: (loss,),
        lambda loss, logits: loss,
        lambda loss, logits: None,
    ],
)
def test_outputs_that_are_not_found_are_asked_for(form: Callable[[Tensor, Tensor], Any]) -> None:
    model = returning(form)
    mooring.attach(model, sgd(model), importance="mas")
    with pytest.raises(MooringError, match="outputs=") as error:
        model(some_batches(1)[0][0])
    assert one_line(error)


@pytest.mark.parametrize("form", [Opaque, Output, lambda loss, logits: {"loss": loss, "scores": logits}])
@pytest.mark.parametrize(
    "seen", [lambda logits: logits, lambda logits: logits[:, :2], lambda logits: logits.log_softmax(-1)]
)
def test_outputs_are_what_the_given_function_says(
    form: Callable[[Tensor, Tensor], Any], seen: Callable[[Tensor], Tensor]
) -> None:
    def logits(returned: Any) -> Tensor:
        return returned["scores"] if isinstance(returned, dict) else returned.logits

    def loss(returned: Any) -> Tensor:
        return returned["loss"] if isinstance(returned, dict) else returned.loss

    learn_from_returned_loss(form, loss, seen, outputs=lambda returned: seen(logits(returned)))


@pytest.mark.parametrize("importance", ["mas", "per sample", "sampled"])
def test_an_evaluation_does_not_count(importance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "multinomial", draw_the_likeliest)
    aside = some_batches(5, count=1)[0][0]

    def train_and_evaluate(moor: mooring.Mooring, batches: Batches) -> None:
        for x, y in batches:
            moor.optimizer.zero_grad()
            moor.model(aside)  # somebody forgot no_grad
            outputs = moor.model(x)
            moor.model(aside)
            mse_loss(outputs, y).backward()
            moor.model(aside)
            with torch.no_grad():
                moor.model(aside)
            with torch.inference_mode():
                moor.model(aside)
            moor.optimizer.step()
            moor.model(aside)

    moor, hand = pair(importance=importance)
    check(moor, hand, train_and_evaluate)


@pytest.mark.parametrize("importance", ["mas", "per sample", "sampled"])
def test_a_model_whose_own_forward_never_ran_is_refused(importance: str) -> None:
    moor, _ = pair(importance=importance)
    before = states(moor.model)
    x, y = some_batches(1)[0]
    first, act, last = moor.model
    mse_loss(last(act(first(x))), y).backward()
    with pytest.raises(MooringError, match="call the model itself") as error:
        moor.optimizer.step()
    assert one_line(error)
    assert identical(states(moor.model), before)
    assert moor.steps == 0


# Afterwards


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("how", ["detach", "context manager"])
def test_afterwards_steps_are_plain(how: str, importance: str, pull: str) -> None:
    moor, _ = pair(OPTIMIZERS["sgd momentum"], importance, pull)
    if how == "detach":
        two_tasks(train, moor)
        moor.detach()
    else:
        with moor as entered:
            assert entered is moor
            two_tasks(train, moor)
    plain = copy.deepcopy(moor.model)
    optimizer = OPTIMIZERS["sgd momentum"](plain)
    optimizer.load_state_dict(copy.deepcopy(moor.optimizer.state_dict()))
    kept = copy.deepcopy(moor.state_dict())
    train(moor, some_batches(3))
    train_plain(plain, optimizer, some_batches(3))
    assert identical(states(moor.model), states(plain))
    assert not moor.model._forward_hooks
    assert kept.keys() == moor.state_dict().keys()
    assert identical(list(moor.state_dict().values()), list(kept.values()))  # and is still readable
    mooring.attach(moor.model, moor.optimizer)  # and can be moored again


@pytest.mark.parametrize("pull", PULLS)
def test_afterwards_steps_are_plain_even_if_the_optimizer_failed_half_way(pull: str) -> None:
    class Fails(SignDescent):
        fails = False

        def move(self, p: Tensor, lr: float) -> None:
            if self.fails:
                raise KeyError("out of memory, say")
            p.sub_(lr * p.grad)

    moor, _ = pair(lambda m: Fails(m.parameters(), lr=0.1), "ewc", pull)
    with moor:
        two_tasks(train, moor)
        moor.optimizer.zero_grad()
        x, y = some_batches(3)[0]
        mse_loss(moor.model(x), y).backward()
        gradients = [p.grad.clone() for p in moor.model.parameters()]
        moor.optimizer.fails = True
        with pytest.raises(KeyError):
            moor.optimizer.step()
    expected = [p - 0.1 * g for p, g in zip(moor.model.parameters(), gradients, strict=True)]
    moor.optimizer.fails = False
    moor.optimizer.step()
    assert identical(states(moor.model), expected)
