"""Tests that training after detach() or a context manager is plain training."""

import copy

import pytest
from torch import Tensor
from torch.nn.functional import mse_loss

import mooring
from by_hand import (
    OPTIMIZERS,
    PULLS,
    SignDescent,
    identical,
    make_batches,
    pair,
    states,
    train,
    train_plain,
    two_tasks,
)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("how", ["detach", "context manager"])
def test_steps_after_detach_equal_plain_training(how: str, importance: str, pull: str) -> None:
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
    train(moor, make_batches(3))
    train_plain(plain, optimizer, make_batches(3))
    assert identical(states(moor.model), states(plain))
    assert not moor.model._forward_hooks
    assert kept.keys() == moor.state_dict().keys()
    assert identical(list(moor.state_dict().values()), list(kept.values()))  # and is still readable
    mooring.attach(moor.model, moor.optimizer)  # and can be moored again


@pytest.mark.parametrize("pull", PULLS)
def test_steps_after_detach_equal_plain_training_even_after_a_failed_step(pull: str) -> None:
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
        x, y = make_batches(3)[0]
        mse_loss(moor.model(x), y).backward()
        gradients = [p.grad.clone() for p in moor.model.parameters()]
        moor.optimizer.fails = True
        with pytest.raises(KeyError):
            moor.optimizer.step()
    expected = [p - 0.1 * g for p, g in zip(moor.model.parameters(), gradients, strict=True)]
    moor.optimizer.fails = False
    moor.optimizer.step()
    assert identical(states(moor.model), expected)
