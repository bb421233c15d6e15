"""Tests of training with accumulated, clipped and scaled gradients."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mooring
from by_hand import (
    F64,
    PULLS,
    Batches,
    ByHand,
    Make,
    agree,
    check,
    close,
    draw_most_likely,
    identical,
    make_batches,
    pair,
    scaled_step,
    states,
    train_by_hand,
    two_tasks,
)


@pytest.mark.parametrize("how", ["a backward pass each", "one backward pass", "the first without a gradient"])
@pytest.mark.parametrize("importance", ["ewc", "per sample", "sampled", "mas"])
def test_accumulated_micro_batches_equal_one_batch(importance: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "multinomial", draw_most_likely)
    sizes = (3, 4, 1)
    weights = torch.ones(8, 1, dtype=F64)
    if how == "the first without a gradient":
        weights[:3] = 0  # a satisfied margin and a masked loss give a zero loss

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
            hand.observe(x)
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


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "per sample", "mas", "si"])
@pytest.mark.parametrize("optimizer", SCALED)
def test_training_with_grad_scaler_equals_training_without(optimizer: str, importance: str, pull: str) -> None:
    moor, hand = pair(SCALED[optimizer], importance, pull)
    scaler = torch.amp.GradScaler("cpu")
    two_tasks(lambda m, batches: [scaled_step(scaler, m, x, y) for x, y in batches], moor)
    two_tasks(train_by_hand, hand)
    assert moor.steps == 4
    agree(moor, hand)


@pytest.mark.parametrize("optimizer", SCALED)
def test_grad_scaler_with_unscale_and_clipping_equals_training_without(optimizer: str) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "per sample", "mas", "si"])
@pytest.mark.parametrize("optimizer", SCALED)
def test_step_skipped_by_grad_scaler_is_not_counted(optimizer: str, importance: str, pull: str) -> None:
    moor, hand = pair(SCALED[optimizer], importance, pull)
    scaler = torch.amp.GradScaler("cpu")
    skipped = make_batches(3, count=1)[0]

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
def test_outputs_of_a_skipped_step_do_not_count_in_the_next(optimizer: str, importance: str, zero_grad: str) -> None:
    moor, hand = pair(SCALED[optimizer], importance)
    scaler = torch.amp.GradScaler("cpu")
    good, bad = make_batches(1, count=2)
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
def test_gradients_after_a_scaled_step_equal_those_without_a_mooring(optimizer: str, pull: str) -> None:
    moor, _ = pair(SCALED[optimizer], "ewc", pull)
    scaler = torch.amp.GradScaler("cpu")
    scaled_step(scaler, moor, *make_batches(1, count=1)[0])
    moor.consolidate()
    scaled_step(scaler, moor, *make_batches(2, count=1)[0])
    plain = copy.deepcopy(moor.model)
    x, y = make_batches(2, count=2)[1]
    plain.zero_grad()
    mse_loss(plain(x), y).backward()
    scaled_step(scaler, moor, x, y)
    for ours, theirs in zip(moor.model.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad)
