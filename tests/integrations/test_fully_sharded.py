"""Tests that the Trainer with FSDP2 and a MooringCallback equals one process, and resumes where it was."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs mooring[transformers]")
pytest.importorskip("peft", reason="needs mooring[transformers]")

from safetensors.torch import load_file

from distributed.ranks import free_port
from integrations.fully_sharded import fine_tune, one_of_two, whole
from integrations.gpt import adapted_gpt, gpt
from processes import Child

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 needs GPUs in this torch"),
]


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_two_ranks_with_fsdp2_equal_one_process_and_resume(adapters, tmp_path):
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Child(tmp_path / "ranks", one_of_two, adapters, patience=180, **env, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(2)
    ]
    for rank in ranks:
        ended = rank.ended()
        assert ended.status == 0, ended.err
    model = adapted_gpt() if adapters else gpt()
    fine_tune(model, str(tmp_path / "one"))
    torch.testing.assert_close(torch.load(tmp_path / "ranks" / "weights.pt"), whole(model), rtol=1e-9, atol=1e-9)
    for folder in ("checkpoint-2", "checkpoint-6", "."):
        one, two = (
            load_file(path / folder / "mooring.safetensors") for path in (tmp_path / "one", tmp_path / "ranks/two")
        )
        kept = [key for key in one if key != "mooring" and not key.startswith("gauge.")]  # batches have another size
        for key in kept:
            torch.testing.assert_close(two[key], one[key], rtol=1e-9, atol=1e-9, msg=key)
