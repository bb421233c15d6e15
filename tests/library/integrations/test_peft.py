"""Tests with LoRA: adapters are moored, and the frozen base has no state."""

import pytest
import torch

import mooring

pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("transformers", reason="needs mooring[transformers]")

from peft import LoraConfig, get_peft_model

from library.integrations.gpt import everything, gpt, same, text, train
from mooring.errors import UnheldWarning
from mooring.integrations.transformers import MooringCallback


def adapted():
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    torch.manual_seed(3)
    return get_peft_model(gpt(dtype=torch.float32), config)


def test_adapters_are_moored_and_the_frozen_base_has_no_state(tmp_path):
    model, callback = adapted(), MooringCallback(importance="mas")
    for task in range(2):
        train(model, callback, task, tmp_path)
    assert len(callback.moor.anchor) == 4
    assert all("lora_" in name for name in callback.moor.anchor)
    assert all(score.sum() > 0 for score in callback.moor.previous.values())
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = sum(t.numel() for key, t in callback.moor.state_dict().items() if key != "mooring")
    assert kept == 3 * adapter  # anchor, current and previous


def test_adapters_resume_from_a_checkpoint_and_the_best_are_loaded(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    ends = []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        model, callback = adapted(), MooringCallback(importance="si")
        train(model, callback, 0, tmp_path, resume, **options)
        ends.append(everything(model, callback))
    assert same(*ends)


def test_exclude_leaves_a_trained_base_free():
    model = adapted()
    for p in model.parameters():
        p.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(
        model, optimizer, exclude=["*base_layer*", "*.wte", "*.lm_head", "*.wpe", "*.mlp.*", "*.ln_*", "*.c_proj.*"]
    )
    words = text(0)[0]["input_ids"][None]
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    moor.consolidate()
    assert moor.anchor
    assert all("lora_" in name for name in moor.anchor)


def test_each_task_can_have_its_own_adapter(tmp_path):
    model, callback = adapted(), MooringCallback()
    train(model, callback, 0, tmp_path)
    assert len(callback.moor.anchor) == 4
    model.add_adapter("second", LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    model.set_adapter("second")
    with pytest.warns(UnheldWarning, match=r"lora_A.second.weight' and 3 others appeared after the last task"):
        train(model, callback, 1, tmp_path)
    assert len(callback.moor.anchor) == 8
    assert callback.moor.tasks == 2
