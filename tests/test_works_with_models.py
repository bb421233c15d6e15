"""A moored loop works with compiled, checkpointed and channels-last models."""

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
    draw_the_likeliest,
    network,
    sgd,
    some_batches,
    train,
    train_by_hand,
    train_plain,
)
from mooring import MAS


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


@pytest.mark.faults
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
