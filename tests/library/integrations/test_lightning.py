"""Tests that Lightning's Trainer with a MooringCallback equals a plain loop and resumes after a kill."""

from types import SimpleNamespace

import pytest
import torch

import mooring
from mooring.errors import MooringError, UnheldWarning
from processes import Child, wait_for

pytest.importorskip("lightning", reason="needs mooring[lightning]")

from library.integrations.lightning_model import (
    QUIET,
    TwoLayerModule,
    batches,
    loader,
    loss,
    network,
    trainer,
    two_tasks,
)
from mooring.integrations.lightning import MooringCallback

EPOCHS = 24
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")


def by_hand(importance, norm: float, accumulation: int) -> torch.nn.Module:
    model = network()
    moor = None
    for task in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        if moor is None:
            moor = mooring.attach(model, optimizer, importance=importance)
        moor.rebind(optimizer)
        for number, x in enumerate(batches(task)):
            (loss(model, x) / accumulation).backward()
            if (number + 1) % accumulation == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
                optimizer.step()
                optimizer.zero_grad()
        moor.consolidate()
    return model


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
def test_trainer_equals_a_plain_loop(importance):
    model, callback = TwoLayerModule(), MooringCallback(importance=importance)
    for task in range(2):
        options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
        trainer(callback, **options).fit(model, loader(task))
    expected = by_hand(importance, norm=0.1, accumulation=2).state_dict()
    torch.testing.assert_close(model.net.state_dict(), expected, rtol=1e-12, atol=1e-12)
    assert callback.moor.tasks == 2


def test_pytorch_lightning_package_works():
    pl = pytest.importorskip("pytorch_lightning")

    class Others(pl.LightningModule):
        forward, training_step = TwoLayerModule.forward, TwoLayerModule.training_step
        configure_optimizers = TwoLayerModule.configure_optimizers

        def __init__(self):
            super().__init__()
            self.net = network()

    model, callback = Others(), MooringCallback()
    for task in range(2):
        options = {**QUIET, "max_epochs": 1, "enable_checkpointing": False, "callbacks": [callback]}
        pl.Trainer(**options, gradient_clip_val=0.1, accumulate_grad_batches=2).fit(model, loader(task))
    expected = by_hand("ewc", norm=0.1, accumulation=2).state_dict()
    torch.testing.assert_close(model.net.state_dict(), expected, rtol=1e-12, atol=1e-12)


def test_killed_and_resumed_training_equals_uninterrupted_training(tmp_path, monkeypatch):
    child = Child(tmp_path / "killed", two_tasks, EPOCHS)
    assert wait_for((tmp_path / "killed" / "second" / "epoch=3.ckpt").exists, child), child.ended().err
    child.kill()
    assert child.ended().status == -9
    (tmp_path / "whole").mkdir()
    ends = []
    for folder in ("whole", "killed"):
        monkeypatch.chdir(tmp_path / folder)
        model, callback = two_tasks(EPOCHS)
        ends.append({**model.state_dict(), **callback.moor.state_dict()})
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_next_task_in_another_process_starts_from_the_saved_state(tmp_path):
    ends = []
    for apart in (False, True):
        model, callback = TwoLayerModule(), MooringCallback(importance="si")
        trainer(callback).fit(model, loader(0))
        if apart:
            file = callback.save(tmp_path)
            weights = model.state_dict()
            model, callback = TwoLayerModule(), MooringCallback(importance="si", state=file)
            model.load_state_dict(weights)
        trainer(callback).fit(model, loader(1))
        ends.append({**model.state_dict(), **callback.moor.state_dict()})
    torch.testing.assert_close(*ends, rtol=0, atol=0)


class Rivals(TwoLayerModule):
    def __init__(self) -> None:
        super().__init__()
        self.rival = network()
        self.automatic_optimization = False

    def training_step(self, x, index) -> None:
        for net, optimizer in zip((self.net, self.rival), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss(net, x))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.3) for net in (self.net, self.rival)]


def test_with_several_optimizers_one_must_be_given():
    with pytest.raises(MooringError, match="the model has 2 optimizers: give the one to moor"):
        trainer(MooringCallback()).fit(Rivals(), loader(0))
    with pytest.raises(MooringError, match=r"optimizer=2 is not allowed: the model has 2, counted from 0"):
        trainer(MooringCallback(optimizer=2)).fit(Rivals(), loader(0))
    callback = MooringCallback(optimizer=1, consolidate=False)
    trainer(callback).fit(Rivals(), loader(0))
    assert callback.moor.steps == 8
    assert {name.partition(".")[0] for name in callback.moor.anchor} == {"rival"}


def test_each_optimizer_can_have_a_callback_and_checkpoints_have_both(tmp_path):
    callbacks = [MooringCallback(optimizer=number, module=name) for number, name in enumerate(("net", "rival"))]
    second_trainer = trainer(*callbacks)
    second_trainer.fit(Rivals(), loader(0))
    second_trainer.save_checkpoint(tmp_path / "both.ckpt")
    kept = torch.load(tmp_path / "both.ckpt", weights_only=True)["callbacks"]
    for callback in callbacks:
        assert torch.equal(kept[callback.state_key]["anchor.0.weight"], callback.moor.anchor["0.weight"])
    assert len({callback.state_key for callback in callbacks}) == 2


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_sharded_strategy_is_refused(name):
    import lightning.pytorch.strategies as strategies

    strategy = object.__new__(getattr(strategies, name))
    with pytest.raises(MooringError, match=f"does not support {name}: use one device or DDP"):
        MooringCallback().on_fit_start(SimpleNamespace(strategy=strategy), TwoLayerModule())


def test_module_option_moors_a_submodule():
    with pytest.raises(MooringError, match="MAS saw no outputs since the last step"):
        trainer(MooringCallback(importance="mas", optimizer=1)).fit(Rivals(), loader(0))
    callback = MooringCallback(importance="mas", optimizer=1, module="rival")
    trainer(callback).fit(Rivals(), loader(0))
    assert callback.moor.previous["0.weight"].sum() > 0
    with pytest.raises(MooringError, match="module='body' is not a module of this model; it has net, rival"):
        trainer(MooringCallback(module="body", optimizer=0)).fit(Rivals(), loader(0))


def test_state_is_float32_under_mixed_precision():
    model, callback = TwoLayerModule().float(), MooringCallback(importance="mas")
    data = [x.float() for x in batches(0)]
    trainer(callback, precision="bf16-mixed").fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    assert {anchor.dtype for anchor in callback.moor.anchor.values()} == {torch.float32}
    assert callback.moor.previous["net.0.weight"].sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1, "task"])
def test_training_on_a_gpu_equals_the_cpu_and_the_state_follows_the_model(every):
    ends = []
    for accelerator in ("cpu", "gpu"):
        model, callback = TwoLayerModule(), MooringCallback(pull=mooring.Interpolation(every=every))
        for task in range(3):
            trainer(callback, accelerator=accelerator, devices=1).fit(model, loader(task))
            assert {anchor.device.type for anchor in callback.moor.anchor.values()} == {"cpu"}
        ends.append(model.state_dict())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)


def test_weights_loaded_after_the_reference_was_read_warn(capsys):
    class LoadsLate(TwoLayerModule):
        def on_fit_start(self):
            self.net.load_state_dict({key: tensor + 1.0 for key, tensor in self.net.state_dict().items()})

    callback = MooringCallback(reference=[(x, x.argmax(1) % 3) for x in batches(0, 2)])
    with (
        pytest.warns(UnheldWarning, match="the model's outputs on past data changed by .* before the first step"),
        pytest.warns(UnheldWarning, match="'net.0.weight' and 3 others changed between the last task"),
    ):
        trainer(callback).fit(LoadsLate(), loader(1))
    assert "mooring: 4 of 4 parameters held" in capsys.readouterr().err


def test_training_says_once_that_nothing_is_held_yet_unless_silenced(capsys):
    for verbose in (True, False):
        trainer(MooringCallback(verbose=verbose)).fit(TwoLayerModule(), loader(0))
        assert capsys.readouterr().err.count("mooring: nothing held yet: first task") == verbose


def test_end_of_training_prints_what_was_forgotten_unless_silenced(capsys):
    known = [(x, x.argmax(1) % 3) for x in batches(0, 3)]
    for verbose in (True, False):
        trainer(MooringCallback(reference=known, verbose=verbose)).fit(TwoLayerModule(), loader(1))
        assert capsys.readouterr().err.count("mooring: forgotten: ") == verbose
