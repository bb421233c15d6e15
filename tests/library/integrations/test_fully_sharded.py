"""Tests that the Trainer with FSDP2 and a MooringCallback equals one process, and resumes where it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mooring

pytest.importorskip("transformers", reason="needs mooring[transformers]")
pytest.importorskip("peft", reason="needs mooring[transformers]")

from safetensors.torch import load_file

from library.integrations.fully_sharded import fine_tune, one_of_two, whole
from library.integrations.gpt import adapted_gpt, gpt
from processes import Child, two_ranks

needs_cpu_streams = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 needs GPUs in this torch"
)

LAUNCH = (
    "-m accelerate.commands.launch --use_fsdp --fsdp_version 2 --num_processes 1 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap GPT2Block "
    "--fsdp_state_dict_type SHARDED_STATE_DICT --fsdp_reshard_after_forward true "
    "--fsdp_cpu_ram_efficient_loading false --fsdp_offload_params false"
)
"""The options of Accelerate's launcher for FSDP2 in one process."""


@needs_cpu_streams
@pytest.mark.faults
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_two_ranks_with_fsdp2_equal_one_process_and_resume(adapters, tmp_path):
    ranks = [Child(tmp_path / "ranks", one_of_two, adapters, patience=180, **rank) for rank in two_ranks()]
    for rank in ranks:
        ended = rank.ended()
        assert ended.status == 0, ended.err
    equals_one_process(tmp_path, tmp_path / "ranks", adapters)


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_accelerate_launch_with_fsdp2_on_a_gpu_equals_plain_training(adapters, tmp_path):
    """The launcher shards by its own options, which the Trainer finds in the environment."""
    script, source = Path(__file__).with_name("fully_sharded.py"), Path(mooring.__file__).parents[1]
    path = os.pathsep.join([str(script.parents[2]), str(source), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *LAUNCH.split(), str(script), "lora" if adapters else "full"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    equals_one_process(tmp_path, tmp_path, adapters, use_cpu=False)


def equals_one_process(folder: Path, ranks: Path, adapters: bool, **options: object) -> None:
    """Compare the weights and state files in a folder with those of one process without shards."""
    model = adapted_gpt() if adapters else gpt()
    fine_tune(model, str(folder / "one"), **options)
    torch.testing.assert_close(torch.load(ranks / "weights.pt"), whole(model), rtol=1e-9, atol=1e-9)
    for part in ("checkpoint-2", "checkpoint-6", "."):
        one, two = (load_file(path / part / "mooring.safetensors") for path in (folder / "one", ranks / "two"))
        for key, tensor in one.items():
            if key != "mooring" and not key.startswith("gauge."):  # batches have another size
                torch.testing.assert_close(two[key], tensor, rtol=1e-9, atol=1e-9, msg=key)
