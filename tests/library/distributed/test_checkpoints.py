"""Tests that a checkpoint of two ranks resumes on one and on four, and equals one process."""

import pytest
import torch

from library.distributed.ranks import run_ranks
from library.distributed.resuming import folder_of, gone_on, kept, write_checkpoints
from library.distributed.training import Case, Trainer, compare

pytestmark = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 needs GPUs in this torch")

PICKLED = ("mean", "given samples")
"""Cases whose state four ranks read from a file of one process."""


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch warns if there is one process
def test_checkpoint_of_two_ranks_resumes_on_one_and_on_four(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    run_ranks(tmp_path, 2, write_checkpoints, two)
    for case in kept(("ddp", "fsdp")):
        alone = Case("one", *case.what)
        trainer = Trainer(alone, folder_of(two, case))
        if case.kind == "fsdp":
            trainer.save(folder_of(one, case))
            if case.importance in PICKLED:
                torch.save(trainer.moor.state_dict(), folder_of(one, case) / "mooring.pt")
        compare(trainer.finish(), Trainer(alone).start().finish())
    run_ranks(tmp_path, 4, gone_on, two, one)
