"""Tests that a killed and resumed Trainer ends where an uninterrupted one does, bit for bit."""

import shutil

import pytest
import torch

from mooring.errors import MooringError
from processes import Child, two_ranks, wait_for

pytest.importorskip("transformers", reason="needs mooring[transformers]")

from library.integrations.gpt import (
    adapters_on_one_of_two,
    everything,
    gpt,
    learn_with_adapters,
    one_of_two,
    same,
    train,
    two_tasks,
)
from mooring.integrations.transformers import MooringCallback, last_checkpoint

STEPS = 36


class KilledError(Exception):
    """A kill at an exact moment, which a signal could not hit."""


@pytest.mark.parametrize("importance", ["si"])
def test_killed_and_resumed_training_equals_uninterrupted_training(importance, tmp_path, monkeypatch):
    child = Child(tmp_path / "killed", two_tasks, importance, STEPS)
    second = tmp_path / "killed" / "second"
    places = [second / f"checkpoint-{step}" / "mooring.safetensors" for step in range(8, STEPS - 12, 4)]
    assert wait_for(lambda: any(place.exists() for place in places), child), child.ended().err
    child.kill()
    assert child.ended().status == -9
    (tmp_path / "whole").mkdir()
    ends = []
    for folder in ("whole", "killed"):
        monkeypatch.chdir(tmp_path / folder)
        assert (last_checkpoint("second") is None) == (folder == "whole")
        ends.append(everything(*two_tasks(importance, STEPS)))
    assert same(*ends)


@pytest.mark.parametrize("moment", ["_save_optimizer_and_scheduler", "on_save", "_stage"])
def test_kill_during_a_checkpoint_loses_nothing(moment, tmp_path, monkeypatch):
    """The Trainer deletes the older checkpoint before it calls on_save for the newer one."""
    from transformers import Trainer

    owner = Trainer if moment == "_save_optimizer_and_scheduler" else MooringCallback
    usual = getattr(owner, moment)
    calls = []

    def killed_at_the_second(*args, **kwargs):
        calls.append(moment)
        if len(calls) == 2:
            raise KilledError
        return usual(*args, **kwargs)

    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    uninterrupted = everything(*two_tasks("mas", 12))
    (tmp_path / "killed").mkdir()
    monkeypatch.chdir(tmp_path / "killed")
    with monkeypatch.context() as patched:
        patched.setattr(owner, moment, killed_at_the_second)
        with pytest.raises(KilledError):
            two_tasks("mas", 12)
    assert last_checkpoint("second") == ("second/checkpoint-8" if moment == "on_save" else "second/checkpoint-4")
    assert same(everything(*two_tasks("mas", 12)), uninterrupted)


@pytest.mark.faults  # slow
def test_two_ranks_have_equal_states_and_one_writes(tmp_path):
    children = [Child(tmp_path, one_of_two, 6, **environment) for environment in two_ranks()]
    assert [child.ended().status for child in children] == [0, 0], children[0].err.read_text()
    assert same(*(torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)))
    folders = sorted((tmp_path / "second").glob("checkpoint-*"))
    assert [(folder / "mooring.safetensors").is_file() for folder in folders] == [True] * 3
    assert not list((tmp_path / "second").glob("mooring-next*"))


@pytest.mark.faults  # slow
def test_adapters_on_two_ranks_have_the_state_of_one_process(tmp_path):
    """What the reference shows of the past is the same; what training adds is not, with batches of another size."""
    pytest.importorskip("peft", reason="needs peft")
    children = [Child(tmp_path, adapters_on_one_of_two, **environment) for environment in two_ranks()]
    assert [child.ended().status for child in children] == [0, 0], children[0].err.read_text()
    ends = [torch.load(tmp_path / f"adapters{rank}.pt") for rank in (0, 1)]
    assert same(*ends)
    whole = learn_with_adapters(tmp_path / "one", max_steps=6)
    assert ends[0].keys() == whole.keys()
    factors = [key for key in whole if key.startswith("past_")]
    assert len(factors) == 4
    for key in factors:
        torch.testing.assert_close(ends[0][key], whole[key], rtol=1e-9, atol=1e-12, msg=key)


def test_state_of_other_weights_is_refused(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    train(gpt(), MooringCallback(), 0, tmp_path, **options)
    shutil.copy(tmp_path / "checkpoint-2" / "mooring.safetensors", tmp_path / "checkpoint-4")
    with pytest.raises(MooringError, match=r"checkpoint-4/mooring\.safetensors belongs to other weights: resume from"):
        train(gpt(), MooringCallback(), 0, tmp_path, resume=f"{tmp_path}/checkpoint-4", **options)
    (tmp_path / "checkpoint-4" / "mooring.safetensors").unlink()
    with pytest.raises(MooringError, match="resume from a checkpoint that was saved with a MooringCallback"):
        train(gpt(), MooringCallback(), 0, tmp_path, resume=f"{tmp_path}/checkpoint-4", **options)


def test_checkpoint_in_another_folder_is_resumed(tmp_path):
    ends = []
    train(gpt(), MooringCallback(), 0, tmp_path, save_strategy="steps", save_steps=2)
    moved = str(tmp_path / "elsewhere" / "checkpoint-4")
    for resume in (str(tmp_path / "checkpoint-4"), moved):
        if resume == moved:
            shutil.move(tmp_path / "checkpoint-4", moved)
        model, callback = gpt(), MooringCallback()
        train(model, callback, 0, tmp_path, resume, resume_from_checkpoint=resume)
        ends.append(everything(model, callback))
    assert same(*ends)
