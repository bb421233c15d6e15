"""Tests of training with every dtype of parameters and of the state."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mooring
from by_hand import (
    F64,
    PULLS,
    ByHand,
    close,
    identical,
    make_batches,
    network,
    pair,
    scaled_step,
    sgd,
    states,
    train,
    train_by_hand,
    train_plain,
    two_tasks,
)
from mooring import Budget
from mooring.rules import Importance, Kronecker
from mooring.state.memory import Memory


def in_dtype(dtype: torch.dtype) -> Memory:
    """Return a memory that keeps everything in one dtype."""
    return Memory(anchor=dtype, previous=dtype, current=dtype)


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_scores_are_at_least_float32_and_anchors_have_the_parameters_dtype(dtype: torch.dtype, importance: str) -> None:
    moor, hand = pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.125), importance, model=network(dtype))
    train(moor, make_batches(1, dtype=dtype))
    train_by_hand(hand, make_batches(1, dtype=dtype))
    assert identical(states(moor.model), states(hand.model))  # no pull yet
    state_dtype = F64 if dtype == F64 else torch.float32
    for name, score in hand.current.items():
        assert moor.current[name].dtype == state_dtype
        assert moor.anchor[name].dtype == dtype  # exact, because an anchor was a parameter
        close(moor.current[name], score, rtol=1e-10 if dtype == F64 else 1e-5)
    moor.consolidate()
    hand.consolidate()
    train(moor, make_batches(2, count=1, dtype=dtype))
    train_by_hand(hand, make_batches(2, count=1, dtype=dtype))
    for ours, theirs, name in zip(moor.model.parameters(), hand.model.parameters(), moor.previous, strict=True):
        assert ours.dtype == dtype
        assert moor.previous[name].dtype == state_dtype
        close(ours, theirs, rtol=max(torch.finfo(dtype).eps, 8 * torch.finfo(state_dtype).eps))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_bfloat16_is_used_for_the_state(dtype: torch.dtype) -> None:
    model = network(dtype)
    moor = mooring.attach(model, sgd(model), memory=in_dtype(torch.bfloat16))
    hand = ByHand(hand_model := copy.deepcopy(model), sgd(hand_model), "ewc", "interpolation")
    two_tasks(lambda m, batches: train(m, [(x.to(dtype), y.to(dtype)) for x, y in batches]), moor)
    kept = {key: tensor for key, tensor in moor.state_dict().items() if key != "mooring"}
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    train_by_hand(hand, [(x.to(dtype), y.to(dtype)) for x, y in make_batches(1)])
    for name, previous in moor.previous.items():  # four roundings, of g, g^2 and two averages
        close(previous.float(), hand.current[name] / 2, rtol=4 * 2**-8)


@pytest.mark.parametrize(("dtype", "state_dtype"), [(torch.float32, torch.bfloat16), (F64, torch.float32)])
def test_si_measures_the_path_in_the_parameters_precision(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    def small(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-8 if dtype == F64 else 1e-4)

    model = network(dtype)
    hand = ByHand(hand_model := copy.deepcopy(model), small(hand_model), "si", "interpolation")
    moor = mooring.attach(model, small(model), importance="si", memory=in_dtype(state_dtype))
    train(moor, make_batches(1, count=2, dtype=dtype))
    train_by_hand(hand, make_batches(1, count=2, dtype=dtype))
    for name, path in hand.path.items():
        kept = moor.state_dict()[f"path.{name}"]
        assert bool(path.all())
        close(kept.to(dtype), path, rtol=8 * torch.finfo(state_dtype).eps)


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("scaled", [False, True])
def test_narrow_memory_does_not_round_the_parameters(pull: str, scaled: bool) -> None:
    """Weights of inputs that were always 0 in the first task are free and train exactly as without a Mooring."""
    model = network(torch.float32)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, fused=scaled) for m in (model, plain)]
    moor = mooring.attach(model, optimizers[0], pull=PULLS[pull], memory=in_dtype(torch.bfloat16))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    first, second = ([(x.float(), y.float()) for x, y in make_batches(task, count=1)] for task in (1, 2))
    first[0][0][:, 0] = 0
    scaled_step(scaler, moor, *first[0])
    moor.consolidate()
    with torch.no_grad():
        model[0].weight.add_(0.01)  # away from the anchor, so that the pull has an effect
    plain.load_state_dict(model.state_dict())
    scaled_step(scaler, moor, *second[0])
    train_plain(plain, optimizers[1], second)
    assert not moor.previous["0.weight"][:, 0].any()
    assert moor.previous["0.weight"][:, 1:].all()
    assert torch.equal(model[0].weight[:, 0], plain[0].weight[:, 0])
    assert not torch.equal(model[0].weight[:, 1:], plain[0].weight[:, 1:])  # while the others are held


@pytest.mark.parametrize("importance", [None, Kronecker()], ids=["diagonal", "kronecker"])
def test_whole_loop_within_autocast_equals_forward_passes_within_it(importance: Importance | None) -> None:
    """The rules compute in float32, also in hooks that run within autocast."""
    drawn = [(x, y.argmax(-1)) for x, y in make_batches(1, 8, torch.float32)]
    weights, budgets = [], []
    for whole in (True, False):
        model = network(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pull = Budget(1e-3, distil=False)
            moor = mooring.attach(model, optimizer, importance=importance, pull=pull, reference=drawn[:4])
        for x, y in drawn:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(9 - x), y)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=whole):
                loss.backward()
                optimizer.step()
                budgets.append(moor.pull_energy())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            moor.consolidate(data=drawn[4:])
        weights.append([*states(model), *(t.float() for name, t in moor.state_dict().items() if name != "mooring")])
    assert identical(*weights)
    assert 0.9e-3 < max(budgets) < 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("pull", PULLS)
def test_model_made_double_after_a_task_is_not_rounded(pull: str) -> None:
    moor, hand = pair(pull=pull, model=network(torch.float32))
    train(moor, make_batches(1, dtype=torch.float32))
    train_by_hand(hand, make_batches(1, dtype=torch.float32))
    moor.consolidate()
    hand.consolidate()
    for name, p in moor.model.double().named_parameters():
        hand.model.get_parameter(name).data = p.detach().clone()
        hand.model.get_parameter(name).grad = None
        hand.previous[name], hand.anchor[name] = moor.previous[name].double(), moor.anchor[name].double()
    for task in (2, 3):
        train(moor, make_batches(task))
        train_by_hand(hand, make_batches(task))
        for ours, theirs in zip(moor.model.parameters(), hand.model.parameters(), strict=True):
            close(ours, theirs, rtol=1e-6 if task == 2 else 1e-5)
            assert not torch.equal(ours, ours.float().double())
        moor.consolidate()
        hand.consolidate()
        for name, p in moor.model.named_parameters():
            assert torch.equal(moor.anchor[name], p)
