"""Tests of `mooring.attach` with models and optimizers that Accelerate prepared."""

import pytest
import torch
from torch import nn

import mooring
from mooring.errors import MooringError

pytest.importorskip("accelerate", reason="needs mooring[transformers]")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Reset Accelerate's global state, and the environment variables that earlier Trainers set."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batches(task: int, count: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(task)
    return [torch.randn(4, 5, generator=generator) for _ in range(count)]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), x.argmax(1) % 3)


def test_prepared_model_and_optimizer_equal_a_plain_loop():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    moor = mooring.attach(model, optimizer, importance="mas")
    for task in range(2):
        for x in batches(task):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, x))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        assert moor.steps == 4
        moor.consolidate()

    alone = network()
    plain = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    own = mooring.attach(alone, plain, importance="mas")
    for task in range(2):
        for first, second in zip(batches(task)[::2], batches(task)[1::2], strict=True):
            plain.zero_grad()
            for x in (first, second):
                (loss(alone, x) / 2).backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            plain.step()
        own.consolidate()
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=0, atol=0)


def test_registered_mooring_is_in_accelerates_checkpoints(tmp_path):
    def begin():
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
        moor = mooring.attach(model, optimizer, importance="rwalk")
        accelerator.register_for_checkpointing(moor)
        return accelerator, model, optimizer, moor

    def go_on(accelerator, model, optimizer, xs):
        for x in xs:
            accelerator.backward(loss(model, x))
            optimizer.step()
            optimizer.zero_grad()

    accelerator, model, optimizer, moor = begin()
    go_on(accelerator, model, optimizer, batches(0))
    moor.consolidate()
    go_on(accelerator, model, optimizer, batches(1)[:3])
    accelerator.save_state(str(tmp_path))
    go_on(accelerator, model, optimizer, batches(1)[3:])
    accelerator, resumed, optimizer, other = begin()
    accelerator.load_state(str(tmp_path))
    assert (other.tasks, other.steps) == (1, 3)
    go_on(accelerator, resumed, optimizer, batches(1)[3:])
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(other.state_dict(), moor.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("importance", ["ewc", "mas"])
def test_scaled_optimizer_updates_once_per_step_and_not_in_skipped_steps(importance):
    Accelerator(cpu=True)
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)):
        model = network()
        optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), scaler=scaler)
        moor = mooring.attach(model, optimizer, importance=importance)
        for task in range(2):
            for number, x in enumerate(batches(task)):
                scaled = loss(model, x) if scaler is None else scaler.scale(loss(model, x))
                if scaler is not None and number == 3:
                    (scaled * torch.inf).backward()
                    optimizer.step()
                    assert optimizer.step_was_skipped
                    optimizer.zero_grad()
                    scaled = scaler.scale(loss(model, x))
                scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert moor.steps == 8
            moor.consolidate()
        ends.append(model.state_dict())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)


def test_state_stays_float32_under_bf16_autocast():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    moor = mooring.attach(model, optimizer, importance="mas")
    for x in batches(0):
        accelerator.backward(loss(model, x))
        optimizer.step()
        optimizer.zero_grad()
    moor.consolidate()
    assert {kept.dtype for kept in (*moor.anchor.values(), *moor.previous.values())} == {torch.float32}
    assert moor.previous["0.weight"].sum() > 0


def test_wrapper_without_an_optimizer_is_refused_in_one_line():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self):
            self.param_groups = []

    with pytest.raises(MooringError, match="Wrapper has no step hooks: give attach the optimizer that it wraps"):
        mooring.attach(network(), Wrapper())


def test_optimizer_cannot_be_moored_again_through_its_wrapper():
    accelerator = Accelerator(cpu=True)
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, inner)
    with pytest.raises(MooringError, match="already has a Mooring"):
        mooring.attach(model, accelerator.prepare(inner))
