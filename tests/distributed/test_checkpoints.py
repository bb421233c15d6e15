"""A checkpoint of two ranks goes on with one and with four, as if one process had trained all along."""

import pytest
import torch

from distributed.ranks import started
from distributed.resuming import folder_of, gone_on, kept, written
from distributed.training import Case, Trainer, compare

pytestmark = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 needs GPUs in this torch")

PICKLED = ("mean", "given samples")
"""Whose state four ranks read from a file that one process wrote whole."""


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what torch says where there is one process
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_four(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    started(tmp_path, 2, written, two)
    for case in kept(("ddp", "fsdp")):
        alone = Case("one", *case.what)
        trainer = Trainer(alone, folder_of(two, case))
        if case.kind == "fsdp":
            trainer.save(folder_of(one, case))
            if case.importance in PICKLED:
                torch.save(trainer.moor.state_dict(), folder_of(one, case) / "mooring.pt")
        compare(trainer.finish(), Trainer(alone).start().finish())
    started(tmp_path, 4, gone_on, two, one)
