"""Tests that a run in each training stack resumes to the same end, also if the script names only its reference."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="needs mooring[transformers]")
pytest.importorskip("lightning", reason="needs mooring[lightning]")
pytest.importorskip("peft", reason="needs peft")

from library.zoo.stack_runs import STACKS

FAST = {("trainer with LoRA", "reference"), ("lightning with two optimizers", "reference"), ("accelerate", "reference")}
CASES = [
    pytest.param(stack, kind, marks=() if (stack, kind) in FAST else pytest.mark.faults)
    for stack in STACKS
    for kind in ("reference", "no reference")
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
]


def header(end: dict[str, torch.Tensor]) -> dict:
    return json.loads(bytes(end["0.mooring"].tolist()))


@pytest.mark.parametrize(("stack", "kind"), CASES)
def test_resumed_run_that_names_only_its_reference_equals_the_uninterrupted_one(stack, kind, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if stack.startswith(("SFT", "DPO")):
        pytest.importorskip("trl", reason="needs trl")
    run, make_reference = STACKS[stack]
    reference = make_reference() if kind == "reference" else None
    whole = run(tmp_path, reference, False)
    resumed = run(tmp_path, reference, True)
    assert header(resumed) == header(whole)
    budget = "Budget(nats=0.03," if "LoRA" in stack else "Budget(nats=0.1,"
    assert header(whole)["pull"].startswith(budget if reference else "Interpolation(")
    assert ("adapters" in header(whole)) == ("LoRA" in stack and reference is not None)
    assert header(whole)["tasks"] == 2
    assert resumed.keys() == whole.keys()
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []
