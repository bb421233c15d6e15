"""Tiny models in each training stack, trained with checkpoints and resumed by objects that name only a reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import mooring
from mooring.integrations import lightning, transformers

WORDS, LENGTH, STEPS, SAVED = 64, 8, 6, 3
End = dict[str, torch.Tensor]
Options = dict[str, Any]

QUIET = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
PACE = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": STEPS, "save_steps": SAVED}


def gpt(dropout: float = 0.1) -> GPT2LMHeadModel:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    size = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    with torch.random.fork_rng():  # the order of the data must not depend on who made the model
        torch.manual_seed(1)
        return GPT2LMHeadModel(GPT2Config(**size, **rates, bos_token_id=0, eos_token_id=0))


def adapted_gpt() -> nn.Module:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = gpt()
    torch.manual_seed(3)
    return get_peft_model(model, config)


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(1)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": WORDS}
    return T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.1))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1, ...; w0 pads and ends."""
    fast = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="w0", eos_token="w0", unk_token="w0")


def ids(task: int, sentences: int = 24) -> torch.Tensor:
    """Return sentences that count up in steps of task + 1, each from its own start: (sentences, LENGTH)."""
    return (torch.arange(sentences)[:, None] + (task + 1) * torch.arange(LENGTH)) % (WORDS - 1) + 1


def rows(task: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": sentence, "labels": sentence} for sentence in ids(task)]


def old_text() -> list[dict[str, torch.Tensor]]:
    """Return batches of the text that the model is to keep."""
    return [{"input_ids": batch, "labels": batch} for batch in ids(0, 8).split(4)]


def old_rows() -> Any:
    """Return the text that the model is to keep as a dataset, for the Trainer's collator."""
    from datasets import Dataset

    sentences = ids(0, 8).tolist()
    return Dataset.from_dict({"input_ids": sentences, "labels": sentences})


def everything(model: nn.Module, *moors: mooring.Mooring) -> End:
    kept = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for number, moor in enumerate(moors):
        kept |= {f"{number}.{key}": tensor.clone() for key, tensor in moor.state_dict().items()}
    return kept


def run_trainer(make: Callable[[int, Path, Any], Trainer], folder: Path, reference: Any, resume: bool) -> End:
    """Train in one task with a reference, or in two without, and resume the last one from its checkpoint."""
    callback = transformers.MooringCallback(**({} if reference is None else {"reference": reference}))
    trainer = None
    for task in (0, 1):
        last, place = task == 1, folder / str(task)
        if last or (reference is None and not resume):
            trainer = make(task, place, trainer and trainer.model)
            trainer.add_callback(callback)
            trainer.train(resume_from_checkpoint=str(place / f"checkpoint-{SAVED}") if resume else None)
    assert trainer is not None
    return everything(trainer.model, callback.moor)


def plain_trainer(make_model: Callable[[], nn.Module]) -> Callable[[int, Path, Any], Trainer]:
    def make(task: int, folder: Path, model: nn.Module | None) -> Trainer:
        arguments = TrainingArguments(str(folder), **PACE, **QUIET)
        return Trainer(model or make_model(), arguments, train_dataset=rows(task))

    return make


def trainer_with_model_init(task: int, folder: Path, model: nn.Module | None) -> Trainer:
    def model_init() -> nn.Module:
        new = gpt()
        new.load_state_dict((model or new).state_dict())
        return new

    arguments = TrainingArguments(str(folder), **PACE, **QUIET)
    return Trainer(args=arguments, train_dataset=rows(task), model_init=model_init)


def seq2seq_trainer(task: int, folder: Path, model: nn.Module | None) -> Trainer:
    return Seq2SeqTrainer(
        model or t5(), Seq2SeqTrainingArguments(str(folder), **PACE, **QUIET), train_dataset=rows(task)
    )


def sft_trainer(task: int, folder: Path, model: nn.Module | None) -> Trainer:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # slow to import, and only the long half needs it

    data = Dataset.from_dict({"input_ids": ids(task).tolist()})
    arguments = SFTConfig(str(folder), max_length=LENGTH, **{**QUIET, **PACE, "bf16": False})
    return SFTTrainer(model or gpt(), arguments, train_dataset=data, processing_class=tokenizer())


def sft_trainer_with_lora(task: int, folder: Path, model: nn.Module | None) -> Trainer:
    return sft_trainer(task, folder, model or adapted_gpt())


def dpo_trainer(task: int, folder: Path, model: nn.Module | None) -> Trainer:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    words = [[f"w{n}" for n in sentence] for sentence in ids(task).tolist()]
    pairs = {
        "prompt": [" ".join(sentence[:2]) for sentence in words],
        "chosen": [" ".join(["", *sentence[2:6]]) for sentence in words],
        "rejected": [" ".join(["", *reversed(sentence[2:6])]) for sentence in words],
    }
    arguments = DPOConfig(str(folder), max_length=LENGTH, **{**QUIET, **PACE, "bf16": False})
    data = {"train_dataset": Dataset.from_dict(pairs), "processing_class": tokenizer()}
    return DPOTrainer(model or gpt(), gpt(dropout=0.0), arguments, **data)


# Lightning and Accelerate


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batches(task: int, count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(task)
    return [torch.randn(4, 5, generator=generator) for _ in range(count)]


def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(x), x.argmax(1) % 3)


class OneOptimizer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return loss(self, x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)


class TwoOptimizers(OneOptimizer):
    def __init__(self) -> None:
        super().__init__()
        self.rival = network()
        self.automatic_optimization = False

    def training_step(self, x: torch.Tensor, index: int) -> None:
        for net, optimizer in zip((self.net, self.rival), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss(net, x))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9) for net in (self.net, self.rival)]


def run_lightning(model: pl.LightningModule, places: list[Options], folder: Path, reference: Any, resume: bool) -> End:
    """Fit two epochs of a task, after another task if there is no reference; the first epoch is saved."""
    options = {} if reference is None else {"reference": reference}
    callbacks = [lightning.MooringCallback(**place, **options) for place in places]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    if reference is None and not resume:
        first = torch.utils.data.DataLoader(batches(0), batch_size=None)
        pl.Trainer(**quiet, max_epochs=1, enable_checkpointing=False, callbacks=[*callbacks]).fit(model, first)
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = pl.Trainer(**quiet, max_epochs=2, callbacks=[*callbacks, saver])
    second = torch.utils.data.DataLoader(batches(1), batch_size=None)
    trainer.fit(model, second, ckpt_path=str(folder / "epoch=0.ckpt") if resume else None)
    return everything(model, *(callback.moor for callback in callbacks))


def run_accelerate(folder: Path, reference: Any, resume: bool) -> End:
    """Train a loop whose Mooring is in Accelerate's checkpoints."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    options = {} if reference is None or resume else {"reference": reference}
    moor = mooring.attach(model, optimizer, memory=mooring.Memory(), **options)
    accelerator.register_for_checkpointing(moor)

    def train(xs: list[torch.Tensor]) -> None:
        for x in xs:
            accelerator.backward(loss(model, x))
            optimizer.step()
            optimizer.zero_grad()

    if resume:
        accelerator.load_state(str(folder))
    else:
        if reference is None:
            train(batches(0))
            moor.consolidate()
        train(batches(1)[:SAVED])
        accelerator.save_state(str(folder))
    train(batches(1)[SAVED:])
    moor.consolidate()
    return everything(model, moor)


PARTS = [{"optimizer": 0, "module": "net"}, {"optimizer": 1, "module": "rival"}]
old_inputs = [torch.randn(8, 5, generator=torch.Generator().manual_seed(7)) for _ in range(4)]

STACKS: dict[str, tuple[Callable[[Path, Any, bool], End], Callable[[], Any]]] = {
    "trainer": (lambda *a: run_trainer(plain_trainer(gpt), *a), old_text),
    "trainer with model_init": (lambda *a: run_trainer(trainer_with_model_init, *a), old_text),
    "trainer with LoRA": (lambda *a: run_trainer(plain_trainer(adapted_gpt), *a), old_text),
    "seq2seq trainer": (lambda *a: run_trainer(seq2seq_trainer, *a), old_text),
    "SFT trainer": (lambda *a: run_trainer(sft_trainer, *a), old_text),
    "SFT trainer with LoRA": (lambda *a: run_trainer(sft_trainer_with_lora, *a), old_rows),
    "DPO trainer": (lambda *a: run_trainer(dpo_trainer, *a), old_text),
    "lightning": (lambda *a: run_lightning(OneOptimizer(), [{}], *a), lambda: old_inputs),
    "lightning with two optimizers": (lambda *a: run_lightning(TwoOptimizers(), PARTS, *a), lambda: old_inputs),
    "accelerate": (run_accelerate, lambda: old_inputs),
}
"""The run of each stack, and its reference."""
