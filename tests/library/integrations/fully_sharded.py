"""Trainers whose model Accelerate shards with FSDP2, on ranks on the CPU, where it would ignore its plugin."""

import sys

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer

import mooring
from library.integrations.gpt import adapted_gpt, arguments, gpt, same, text
from mooring.distributed.dtensor import gathered, is_fully_sharded, reshard
from mooring.integrations.transformers import MooringCallback

TINY = 1e-3
"""A budget that six steps exceed."""


class ShardedTrainer(Trainer):
    """A Trainer that prepares its model by Accelerate's FSDP2, as `fsdp=True` does on GPUs; of one process plainly."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not dist.is_initialized() or self.is_fsdp_enabled:  # as `accelerate launch --use_fsdp` asks for on a GPU
            return
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
            state_dict_type="SHARDED_STATE_DICT",
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
        state = self.accelerator.state
        state.distributed_type, state.fsdp_plugin, self.is_fsdp_enabled = DistributedType.FSDP, plugin, True


def options_of_rank() -> dict[str, object]:
    """Return options with which ranks share the batches of one process."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    usual = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 8 // world}
    return usual | ({"ddp_backend": "gloo"} if world > 1 else {})


def fine_tune(model: torch.nn.Module, folder: str, resume: str | None = None, **options: object) -> MooringCallback:
    """Fine-tune with a reference and a budget so small that the end of the task has to return towards the anchor."""
    pull = mooring.Budget(TINY, distil=False)  # on shards nothing is distilled
    callback = MooringCallback(reference=text(0, 8), pull=pull)
    checkpoints = {"save_strategy": "steps", "save_steps": 2}
    args = arguments(folder, **options_of_rank() | checkpoints | options)
    ShardedTrainer(model, args, train_dataset=text(1), callbacks=[callback]).train(resume_from_checkpoint=resume)
    return callback


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights as one process has them."""
    reshard(model.modules())
    return {name: gathered(p.detach()).cpu() for name, p in model.named_parameters()}


def one_of_two(adapters: bool) -> None:
    """Fine-tune on one of two ranks on the CPU."""
    dist.init_process_group("gloo")
    fine_tune_and_resume(adapters)


def fine_tune_and_resume(adapters: bool, **options: object) -> None:
    """Fine-tune shards, resume from the middle, check that both end with the same weights, and save those."""
    model = adapted_gpt() if adapters else gpt()
    fine_tune(model, "two", **options)
    assert is_fully_sharded(model)
    weights = whole(model)
    resumed = adapted_gpt() if adapters else gpt()
    fine_tune(resumed, "two", "two/checkpoint-2", save_strategy="no", **options)
    assert same(weights, whole(resumed))
    if dist.get_rank() == 0:
        torch.save(weights, "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    fine_tune_and_resume(sys.argv[1] == "lora", use_cpu=False)
