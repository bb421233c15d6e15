"""A language model with two layers of width 16, and Trainers that train it on generated text."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from mooring.integrations.transformers import MooringCallback, last_checkpoint

WORDS, LENGTH = 24, 8


def gpt(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    size = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**size, **rates, bos_token_id=0, eos_token_id=0)).to(dtype)


def text(task: int, sentences: int = 24) -> list[dict[str, torch.Tensor]]:
    """Return sentences that count up in steps of task + 1, each from its own start."""
    steps = (task + 1) * torch.arange(LENGTH)
    return [{"input_ids": (start + steps) % WORDS, "labels": (start + steps) % WORDS} for start in range(sentences)]


def arguments(folder, **options) -> TrainingArguments:
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 6, "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    return TrainingArguments(str(folder), **{**quiet, **usual, **options})


def train(model, callback: MooringCallback, task: int, folder, resume: str | None = None, **options) -> Trainer:
    data = {"train_dataset": text(task), "eval_dataset": text(task, 4)}
    trainer = Trainer(model, arguments(folder, **options), **data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def two_tasks(importance: str, steps: int) -> tuple[GPT2LMHeadModel, MooringCallback]:
    """Start or resume a script of two tasks, of which only the second writes checkpoints."""
    model, callback = gpt(dropout=0.1, dtype=torch.float32), MooringCallback(importance=importance)
    resume = last_checkpoint("second")
    if resume is None:
        train(model, callback, 0, "first")
    more = {"max_steps": steps, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
    train(model, callback, 1, "second", resume, save_total_limit=1, **more)
    return model, callback


def one_of_two(task_steps: int) -> None:
    """Train two tasks on one of two ranks, end the second with its best weights, and save everything."""
    model, callback = gpt(dtype=torch.float32), MooringCallback(importance="si")
    train(model, callback, 0, "first", ddp_backend="gloo", max_steps=task_steps)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    train(model, callback, 1, "second", ddp_backend="gloo", max_steps=task_steps, **options)
    torch.save(everything(model, callback), f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


def adapted_gpt() -> torch.nn.Module:
    """Return the model with LoRA adapters, in float64 so that ranks can be compared with one process."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = gpt()
    torch.manual_seed(3)
    return get_peft_model(model, config).double()


def learn_with_adapters(folder, **options) -> dict[str, torch.Tensor]:
    """Fine-tune adapters in order with a reference; ranks share it and the batches."""
    model, callback = adapted_gpt(), MooringCallback(reference=text(0, 24), consolidate=False)
    data = {"train_dataset": text(1), "callbacks": [callback]}
    options = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0, **options}
    Trainer(model, arguments(folder, **options), **data).train()
    return everything(model, callback)


def adapters_on_one_of_two() -> None:
    """Fine-tune adapters on one of two ranks, and save everything."""
    end = learn_with_adapters("moored", ddp_backend="gloo", per_device_train_batch_size=4)
    torch.save(end, f"adapters{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


def everything(model, callback: MooringCallback) -> dict[str, torch.Tensor]:
    """Return the weights and the state, to compare them bit for bit."""
    weights = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    return weights | {key: tensor.clone() for key, tensor in callback.moor.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
