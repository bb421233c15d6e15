"""A moored loop works in any number format, with a state as wide or narrow as one likes."""

import copy

import pytest
import torch
from torch import nn

import mooring
from by_hand import (
    F64,
    PULLS,
    ByHand,
    close,
    identical,
    network,
    pair,
    scaled_step,
    sgd,
    some_batches,
    states,
    train,
    train_by_hand,
    train_plain,
    two_tasks,
)


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_scores_are_float32_or_wider_and_anchors_as_their_parameters(dtype: torch.dtype, importance: str) -> None:
    moor, hand = pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.125), importance, model=network(dtype))
    train(moor, some_batches(1, dtype=dtype))
    train_by_hand(hand, some_batches(1, dtype=dtype))
    assert identical(states(moor.model), states(hand.model))  # nothing is held yet
    state_dtype = F64 if dtype == F64 else torch.float32
    for name, score in hand.current.items():
        assert moor.current[name].dtype == state_dtype
        assert moor.anchor[name].dtype == dtype  # it loses nothing: an anchor was a parameter
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
