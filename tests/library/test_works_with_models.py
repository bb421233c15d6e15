"""Tests of training with compiled, checkpointed and channels-last models."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mooring
from by_hand import (
    F64,
    IMPORTANCES,
    PULLS,
    ByHand,
    agree,
    check,
    close,
    draw_most_likely,
    make_batches,
    network,
    sgd,
    train,
    train_by_hand,
    train_plain,
)
from mooring import MAS


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset torch.compile to its state in a new process."""
    import torch._functorch.config

    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=True):
        yield
    torch.compiler.reset()


def compiled_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("importance", ["ewc", "mas"])
@pytest.mark.parametrize("compile_", [torch.compile, compiled_in_place])
@pytest.mark.parametrize("when", ["before", "after", "long before"])
def test_compiled_model_equals_the_oracle(when: str, compile_: Callable[..., nn.Module], importance: str) -> None:
    """The model is compiled before or after attach, or compiled and trained before attach."""
    model = network()
    hand_model = copy.deepcopy(model)
    called = model if when == "after" else compile_(model, backend="aot_eager")
    if when == "long before":
        for net in (called, hand_model):
            train_plain(net, sgd(net), make_batches(0))
    moor = mooring.attach(called, sgd(called), importance=IMPORTANCES[importance])
    hand = ByHand(hand_model, sgd(hand_model), importance, "interpolation")
    called = compile_(model, backend="aot_eager") if when == "after" else called
    check(moor, hand, lambda m, batches: train_plain(called, m.optimizer, batches))
    assert sorted(moor.anchor) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    moor.detach()
    for net, optimizer in ((called, moor.optimizer), (hand_model, hand.optimizer)):
        train_plain(net, optimizer, make_batches(3))
    for ours, theirs in zip(model.parameters(), hand_model.parameters(), strict=True):
        close(ours, theirs)


@pytest.mark.usefixtures("fresh_compiler")
def test_mas_works_on_a_model_whose_compiled_form_was_trained_before() -> None:
    model = network()
    hand_model = copy.deepcopy(model)
    called = torch.compile(model, backend="aot_eager")
    for net in (called, hand_model):
        train_plain(net, sgd(net), make_batches(0))
    moor = mooring.attach(model, sgd(model), importance=MAS())
    hand = ByHand(hand_model, sgd(hand_model), "mas", "interpolation")
    check(moor, hand, lambda m, batches: train_plain(called, m.optimizer, batches))


@pytest.mark.faults
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
def test_mas_does_not_change_the_gradients_of_an_inductor_compiled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inductor a backward pass may overwrite the saved tensors, and MAS runs two backward passes.

    Code compiled for plain training, in this process or in the cache of an earlier one, must not be used.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    class Gated(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h = self[0](x).tanh()
            return self[2](self[1](h).sigmoid() * h + h.exp())

    torch.manual_seed(0)
    model = Gated(nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 3)).double()
    hand_model = copy.deepcopy(model)
    compiled = torch.compile(model)
    for net in (compiled, hand_model):
        train_plain(net, sgd(net), make_batches(0, count=1))
    moor = mooring.attach(compiled, sgd(compiled), importance=MAS())
    hand = ByHand(hand_model, sgd(hand_model), "mas", "interpolation")
    check(moor, hand)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](checkpoint(lambda x: self[1](self[0](x)), x, use_reentrant=False))


@pytest.mark.parametrize("importance", ["mas", "sampled"])
def test_activation_checkpointing_equals_the_oracle(importance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "multinomial", draw_most_likely)
    hand_model = network()
    model = Checkpointed(*copy.deepcopy(hand_model))
    moor = mooring.attach(model, sgd(model), importance=IMPORTANCES[importance])
    hand = ByHand(hand_model, sgd(hand_model), importance, "interpolation")
    check(moor, hand)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
@pytest.mark.parametrize("channels", [(3, 4), (64, 512)])  # the second is processed in chunks if possible
def test_channels_last_model_equals_the_oracle(channels: tuple[int, int], importance: str, pull: str) -> None:
    torch.manual_seed(0)
    hand_model = nn.Sequential(nn.Conv2d(*channels, 3), nn.Tanh(), nn.Flatten(), nn.Linear(channels[1], 3)).double()
    model = copy.deepcopy(hand_model).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    moor = mooring.attach(model, sgd(model), importance=IMPORTANCES[importance], pull=PULLS[pull])
    hand = ByHand(hand_model, sgd(hand_model), importance, pull)
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
