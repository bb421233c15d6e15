"""Tests that the Trainer with a MooringCallback equals a plain loop with `mooring.attach`."""

import re
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import mooring
from mooring.errors import MooringError

pytest.importorskip("transformers", reason="needs mooring[transformers]")

from safetensors.torch import load_file
from transformers import Trainer

from library.integrations.gpt import WORDS, arguments, everything, gpt, same, text, train
from mooring.integrations.transformers import MooringCallback

IMPORTANCES = ["ewc", "mas", "si", mooring.EWC(decay=None, per_sample=True)]


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def by_hand(importance, tasks: int, steps: int, accumulation: int, norm: float) -> torch.nn.Module:
    model = gpt().train()
    moor = None
    for task in range(tasks):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        before, moor = moor, mooring.attach(model, optimizer, importance=importance)
        if before:
            moor.load_state_dict(before.state_dict())
            before.detach()
        words = torch.stack([example["input_ids"] for example in text(task)]).split(4)
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(accumulation):
                x = words[(step * accumulation + micro) % len(words)]
                model(input_ids=x, labels=x, num_items_in_batch=accumulation * x.numel()).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            schedule.step()
        moor.consolidate()
    return model


@pytest.mark.parametrize("importance", IMPORTANCES, ids=str)
def test_trainer_equals_a_plain_loop(importance, tmp_path):
    model, callback = gpt(), MooringCallback(importance=importance)
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "lr_scheduler_type": "linear"}
    for task in range(2):
        InOrder(model, arguments(tmp_path, **options), train_dataset=text(task), callbacks=[callback]).train()
    torch.testing.assert_close(
        dict(model.named_parameters()),
        dict(by_hand(importance, tasks=2, steps=6, accumulation=2, norm=0.1).named_parameters()),
        rtol=1e-9,
        atol=1e-9,
    )
    assert callback.moor.tasks == 2


def test_pull_acts_once_per_optimizer_step(tmp_path):
    callback = MooringCallback(consolidate=False)
    trainer = train(gpt(), callback, 0, tmp_path, gradient_accumulation_steps=3)
    assert (callback.moor.steps, callback.moor.tasks) == (6, 0)
    trainer.train()  # the same optimizer and the same task, longer
    assert (callback.moor.steps, callback.moor.tasks) == (12, 0)
    callback.moor.consolidate()
    assert callback.moor.tasks == 1


def test_first_task_is_plain_fine_tuning(tmp_path):
    moored, plain = gpt(), gpt()
    train(moored, MooringCallback(), 0, tmp_path)
    Trainer(plain, arguments(tmp_path), train_dataset=text(0)).train()
    assert same(moored.state_dict(), plain.state_dict())


def test_second_task_stays_closer_to_the_first(tmp_path):
    """The second task moves a moored model less than a plain one."""
    moved = {}
    for name, callbacks in {"plain": [], "moored": [MooringCallback()]}.items():
        trainer = Trainer(gpt(), arguments(tmp_path), train_dataset=text(0), callbacks=callbacks)
        trainer.train()
        start = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
        trainer.train_dataset = text(1)
        trainer.train()
        moved[name] = sum((tensor - start[key]).norm() for key, tensor in trainer.model.state_dict().items())
    assert moved["moored"] < 0.8 * moved["plain"]


def test_next_task_in_another_process_starts_from_the_first_tasks_folder(tmp_path):
    ends = []
    for apart in (False, True):
        model, callback = gpt(), MooringCallback(importance="si")
        train(model, callback, 0, tmp_path / "first", save_strategy="epoch")
        if apart:
            weights = model.state_dict()
            model, callback = gpt(), MooringCallback(importance="si", state=tmp_path / "first")
            model.load_state_dict(weights)
        train(model, callback, 1, tmp_path / "second")
        ends.append(everything(model, callback))
    assert same(*ends)


def test_best_weights_are_loaded_with_their_state(tmp_path):
    model, callback = gpt(), MooringCallback(importance="si", consolidate=False)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = train(model, callback, 0, tmp_path, **options)
    best = load_file(f"{trainer.state.best_model_checkpoint}/mooring.safetensors")
    assert trainer.state.best_global_step < 6
    assert callback.moor.steps == trainer.state.best_global_step
    assert same(best, callback.moor.state_dict())
    callback.moor.consolidate()
    weights = dict(model.named_parameters())
    assert all(torch.equal(anchor, weights[name].data) for name, anchor in callback.moor.anchor.items())


def test_save_strategy_best_saves_the_state(tmp_path):
    options = {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    train(gpt(), MooringCallback(), 0, tmp_path, **options)
    folders = sorted(tmp_path.glob("checkpoint-*"))
    assert folders
    assert all((folder / "mooring.safetensors").is_file() for folder in folders)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["mooring.safetensors"]


@pytest.mark.parametrize("importance", ["ewc", "mas"])
def test_state_is_float32_under_mixed_precision(importance, tmp_path):
    model, callback = gpt(dtype=torch.float32), MooringCallback(importance=importance)
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    train(model, callback, 0, tmp_path, bf16=True, **checkpointing)
    train(model, callback, 1, tmp_path, bf16=True)
    assert {anchor.dtype for anchor in callback.moor.anchor.values()} == {torch.float32}
    assert callback.moor.tasks == 2
    assert callback.moor.previous["transformer.h.0.mlp.c_fc.weight"].sum() > 0


def test_non_finite_loss_stops_before_the_update(tmp_path):
    model, callback = gpt(), MooringCallback()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = torch.inf
    with pytest.raises(mooring.errors.NonFiniteError, match=r"gradient of .* is not finite"):
        train(model, callback, 0, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"deepspeed": "config.json"},
            "does not support deepspeed, whose .*: train on one device, with DDP or with FSDP2",
        ),
        ({"fsdp": True, "fsdp_plugin_args": {"fsdp_version": 1}}, "does not support FSDP1, which flattens parameters"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "does not support FSDP on XLA"),
    ],
    ids=["deepspeed", "FSDP1", "XLA"],
)
def test_unsupported_options_are_refused_before_training(options, message):
    with pytest.raises(MooringError, match=message):
        MooringCallback().on_init_end(SimpleNamespace(**{"fsdp_config": None} | options), None, None)


def test_fsdp2_is_not_refused():
    args = SimpleNamespace(fsdp=True, fsdp_config={}, fsdp_plugin_args={"fsdp_version": 2})
    MooringCallback().on_init_end(args, None, None)


def test_bad_options_are_refused_when_the_callback_is_created(tmp_path):
    with pytest.raises(
        MooringError, match=r"unknown option of mooring.attach 'importanse' \(did you mean 'importance'"
    ):
        MooringCallback(importanse="ewc")
    with pytest.raises(MooringError, match=r"mooring\.safetensors does not exist: give the file or folder"):
        MooringCallback(state=tmp_path)
    (tmp_path / "mooring.safetensors").write_text("something else")
    with pytest.raises(MooringError, match="is not the state of a Mooring"):
        MooringCallback(state=tmp_path)
    with pytest.raises(MooringError, match="no Mooring before training: train first"):
        MooringCallback().moor.consolidate()


def test_state_that_does_not_fit_leaves_nothing_attached(tmp_path):
    train(gpt(), MooringCallback(importance="si"), 0, tmp_path, save_strategy="epoch")
    callback = MooringCallback(importance="ewc", state=tmp_path)
    with pytest.raises(MooringError, match="made by importance SI, this Mooring has EWC"):
        train(gpt(), callback, 1, tmp_path)
    with pytest.raises(MooringError, match="no Mooring before training"):
        _ = callback.moor


@pytest.mark.parametrize(("stack", "extra"), [("transformers", "transformers"), ("lightning", "lightning")])
def test_missing_library_is_named_with_its_install_command(stack, extra, monkeypatch):
    for name in (stack, f"{stack}.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"mooring.integrations.{stack}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'mooring\[{extra}\]'"):
        __import__(f"mooring.integrations.{stack}")


def test_reference_is_not_read_again_when_training_is_resumed(tmp_path):
    read = []

    def reference(model):
        read.append(len(read))
        tokens = torch.stack([example["input_ids"] for example in text(0)[:4]])
        return {"input_ids": tokens, "labels": tokens}

    options = {"importance": "ewc", "pull": mooring.Interpolation(), "reference": reference, "batches": 2}
    callback = MooringCallback(**options)
    train(gpt(), callback, 1, tmp_path, save_strategy="steps", save_steps=3)
    assert read == [0, 1]
    assert callback.moor.tasks == 2
    assert all(bool(t.any()) for t in callback.moor.previous.values())
    again = MooringCallback(**options)
    train(gpt(), again, 1, tmp_path, str(tmp_path / "checkpoint-3"), save_strategy="steps", save_steps=3)
    assert read == [0, 1]
    assert again.moor.tasks == 2
    later = MooringCallback(state=tmp_path, **options)
    train(again.moor.model, later, 1, tmp_path / "later")
    assert read == [0, 1]
    assert later.moor.tasks == 3


def test_training_prints_what_is_held_once_unless_silenced(tmp_path, capsys):
    for verbose in (True, False):
        model, callback = gpt(), MooringCallback(verbose=verbose)
        train(model, callback, 0, tmp_path, max_steps=1)
        first = capsys.readouterr().err
        train(model, callback, 1, tmp_path, max_steps=1)
        second = capsys.readouterr().err
        assert first.count("mooring: nothing held yet: first task; for a model that is already trained") == verbose
        assert second.count("mooring: 28 of 28 parameters held") == verbose


def test_end_of_training_prints_what_was_forgotten_unless_silenced(tmp_path, capsys):
    known = [{"input_ids": row, "labels": row} for row in torch.arange(32).view(4, 8) % WORDS]
    for verbose in (True, False):
        train(gpt(), MooringCallback(reference=known, verbose=verbose), 1, tmp_path, max_steps=1)
        printed = capsys.readouterr().err
        lines = re.findall(r"^mooring: forgotten: (\S+) \+- \S+ nats on \d+ samples$", printed, re.MULTILINE)
        assert len(lines) == verbose
        assert all(0 < float(nats) <= 0.1 for nats in lines)


LEAN = mooring.Memory(previous="8bit", current="none")


def lean_callback(pull, **options):
    known = [{"input_ids": row, "labels": row} for row in torch.arange(32).view(4, 8) % WORDS]
    return MooringCallback(reference=known, pull=pull, memory=LEAN, verbose=False, **options)


@pytest.mark.parametrize("steps", [3, 8])  # before and after the first measurement
def test_training_ends_within_its_budget_where_no_importance_of_it_is_kept(tmp_path, steps):
    exceeding, keeping = (lean_callback(mooring.Budget(1e-3), consolidate=only) for only in (False, True))
    unended = pytest.warns(UserWarning, match="the model is kept with") if steps > 7 else nullcontext()
    with unended:
        train(gpt(), exceeding, 1, tmp_path / "exceeding", max_steps=steps, learning_rate=0.05)
    assert exceeding.moor.measured().nats > 2e-3
    with pytest.warns(UserWarning, match="taught is not held in the next one"):
        train(gpt(), keeping, 1, tmp_path / "keeping", max_steps=steps, learning_rate=0.05)
    assert keeping.moor.tasks == 1
    assert 0 < keeping.moor.measured().nats <= 1e-3


def test_pull_once_per_task_acts_where_no_importance_of_the_task_is_kept(tmp_path):
    ends = []
    for consolidate in (False, True):
        model, callback = gpt(), lean_callback(mooring.rules.Blend(0.5), consolidate=consolidate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, callback, 1, tmp_path / str(consolidate), max_steps=3, learning_rate=0.05)
        ends.append({name: p.detach() for name, p in model.named_parameters()})
    for name, anchor in callback.moor.anchor.items():
        torch.testing.assert_close(ends[1][name], (ends[0][name] + anchor) / 2)


def test_training_without_a_reference_or_importance_is_refused(tmp_path):
    callback = MooringCallback(importance="ewc", pull=mooring.Proximal(1.0), memory=LEAN, verbose=False)
    with pytest.raises(MooringError, match=r"this task has no importance, .*: give consolidate\(data=...\)"):
        train(gpt(), callback, 1, tmp_path, max_steps=1)


def test_new_tokens_between_tasks_are_free_and_old_ones_held(tmp_path):
    model, callback = gpt(), MooringCallback(pull=mooring.Proximal(1e9))
    train(model, callback, 0, tmp_path)
    old = model.transformer.wte.weight.detach().clone()
    model.resize_token_embeddings(WORDS + 2, mean_resizing=False)
    added = model.transformer.wte.weight.detach()[WORDS:].clone()
    train(model, callback, 1, tmp_path)
    known = callback.moor.previous["transformer.wte.weight"][:WORDS] > 1e-6
    assert known.any()
    moved = (model.transformer.wte.weight.detach()[:WORDS] - old).abs()
    assert float(moved[known].max()) < 1e-3
    assert bool((model.transformer.wte.weight.detach()[WORDS:] != added).any())
    assert not callback.moor.coverage().unheld
