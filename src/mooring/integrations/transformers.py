"""Mooring in `transformers.Trainer`: a callback that moors what the Trainer trains, and saves it where it saves."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mooring.distributed.collectives import world_size
from mooring.errors import MooringError
from mooring.integrations.deferred_attach import DeferredAttach, SavedState
from mooring.integrations.state_file import NAME
from mooring.moor import Mooring

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    message = "mooring.integrations.transformers needs transformers and accelerate: pip install 'mooring[transformers]'"
    raise ImportError(message) from error

__all__ = ["MooringCallback", "last_checkpoint"]

STAGED = "mooring-next.safetensors"
"""The state that a checkpoint under way will hold: written before it, moved into it when it is whole."""


class MooringCallback(TrainerCallback):
    """Moors the model that a `transformers.Trainer` trains, with the optimizer that it makes.

    One `train()` is one task: at its end the task is consolidated, and the next `train()`, of the same Trainer or of
    another one with this callback, goes on from there. Each checkpoint folder holds the state as `mooring.safetensors`,
    which `resume_from_checkpoint` takes up again; what the next task starts from is written to `output_dir` at the end.

    Args:
        consolidate: whether the end of `train()` is the end of a task; if not, call `callback.moor.consolidate()`.
        state: what to go on from: a `state_dict()`, or the file or folder that one was saved to. A checkpoint that
            training is resumed from comes first.
        options: those of `mooring.attach`, such as `importance`, `pull` and `exclude`.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
        >>> data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
        >>> callback = MooringCallback(importance="ewc", exclude="transformer.wte")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True)
        ...     _ = Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
        {...}
        >>> callback.moor.tasks
        1
    """

    def __init__(self, *, consolidate: bool = True, state: SavedState = None, **options: Any) -> None:
        self.consolidate = consolidate
        self._deferred = DeferredAttach(state, options)
        self._training = False
        self._staged = -1

    @property
    def moor(self) -> Mooring:
        """The Mooring, from the start of the first `train()` on."""
        return self._deferred.moor

    def save(self, path: str | Path) -> Path:
        """Write the state to a file, or into a folder, such as one that a model was saved to."""
        return self._deferred.save(path)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """The Trainer is made: refuse what cannot be moored, before any data is read."""
        _refuse(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **given: Any,
    ) -> None:
        """The model and optimizer are there, with a checkpoint's weights where training is resumed from one."""
        _refuse(args)
        if state.is_hyper_param_search:
            raise MooringError(
                "a hyperparameter search trains many models and cannot be moored: train with one setting"
            )
        assert model is not None
        assert optimizer is not None
        self._deferred.attach(model, optimizer, resumes=bool(state.global_step))
        self._training, self._staged = True, -1
        if state.global_step:
            folders = [Path(args.resume_from_checkpoint)] if isinstance(args.resume_from_checkpoint, str) else []
            folders.append(_folder(args, state))
            found = self._deferred.resume_from(*(folder / NAME for folder in folders), _output(args) / STAGED)
            if args.should_save and found.name == STAGED and folders[-1].is_dir():
                self.save(folders[-1])  # before the next checkpoint takes its place

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """A step was taken, and a checkpoint may be due."""
        if control.should_save:
            self._stage(args, state)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """An epoch is over, and a checkpoint may be due."""
        if control.should_save:
            self._stage(args, state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """The model was evaluated, and may turn out to be the best so far."""
        if self._training and args.save_strategy == "best":
            self._stage(args, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """The Trainer has written its checkpoint: the mooring's state takes its place in the folder."""
        if not args.should_save:
            return
        if self._staged == state.global_step:
            os.replace(_output(args) / STAGED, _folder(args, state) / NAME)
            self._staged = -1
        else:
            self.save(_folder(args, state))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Training is over, and the best weights are back where that was asked for: their state comes with them."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            if world_size() > 1:
                dist.barrier()  # the first rank may still be writing
            self._deferred.resume_from(Path(state.best_model_checkpoint) / NAME)
        if self.consolidate:
            self.moor.consolidate()
        if args.should_save and args.save_strategy != "no":
            self.save(_output(args))
            (_output(args) / STAGED).unlink(missing_ok=True)
        self._training = False

    def _stage(self, args: TrainingArguments, state: TrainerState) -> None:
        """Write the state before the Trainer writes its checkpoint, and before it deletes an older one.

        Killed between the two, the checkpoint is whole and its mooring beside it.
        """
        if args.should_save and self._staged != state.global_step:
            self.save(_output(args) / STAGED)
            self._staged = state.global_step


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint that was written whole, to resume from; None where there is none.

    A kill while a checkpoint is written leaves half a folder, which `resume_from_checkpoint=True` would take.

    Example:
        >>> last_checkpoint("nowhere") is None
        True
    """
    root = Path(output_dir)
    steps = {int(number): folder for folder in root.glob("checkpoint-*") if (number := folder.name[11:]).isdigit()}
    for _, folder in sorted(steps.items(), reverse=True):
        try:
            TrainerState.load_from_json(str(folder / "trainer_state.json"))  # what the Trainer writes last
        except (OSError, ValueError, TypeError):
            continue
        if (folder / NAME).is_file() or (root / STAGED).is_file():
            return str(folder)
    return None


def _output(args: TrainingArguments) -> Path:
    return Path(args.output_dir or ".")


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return _output(args) / f"checkpoint-{state.global_step}"


def _refuse(args: TrainingArguments) -> None:
    """Refuse the ways of training in which no optimizer of torch takes the steps, or no rank has whole parameters."""
    for way in ("deepspeed", "fsdp"):
        if getattr(args, way, None):
            raise MooringError(f"MooringCallback cannot moor a model under {way} yet: train on one device, or with DDP")
