"""A callback for `transformers.Trainer`, with its state in the Trainer's checkpoints."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mooring.distributed.dtensor import world_size
from mooring.errors import MooringError
from mooring.integrations.deferred_attach import MEASURED, MooringOwner, SavedState
from mooring.integrations.state_file import NAME, is_sharded, save
from mooring.reference.batches import is_row

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    message = "mooring.integrations.transformers needs transformers and accelerate: pip install 'mooring[transformers]'"
    raise ImportError(message) from error

STAGED = "mooring-next.safetensors"
"""The state of the checkpoint in progress: written before it, and moved into it when it is complete."""


class MooringCallback(MooringOwner, TrainerCallback):
    """A callback that moors the model and optimizer of a `transformers.Trainer`.

    Each `train()` is a task, consolidated at its end. The next `train()` with this callback continues from there, also
    with another Trainer. Each checkpoint folder contains the state as `mooring.safetensors`, which
    `resume_from_checkpoint` loads. The state that the next task starts from is written to `output_dir` at the end.

    Args:
        consolidate: whether the end of `train()` is the end of a task; if not, call `callback.moor.consolidate()`.
        state: the state to resume from: a `state_dict()`, or the file or folder that it was saved to. The checkpoint of
            a resumed `train()` replaces it.
        verbose: whether to print, when training begins, how many parameters are held, or that nothing is held yet, in a
            first task without a reference or state; and when it ends, what was forgotten, if that is measured.
        options: options of `mooring.attach`, such as `reference`, `importance`, `pull` and `exclude`. A reference may
            also be a dataset in the form of the training data, which is put into batches by the Trainer's collator.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
        >>> data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
        >>> callback = MooringCallback(importance="ewc")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True)
        ...     _ = Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
        {...}
        >>> callback.moor.tasks
        1
    """

    def __init__(
        self, *, consolidate: bool = True, state: SavedState = None, verbose: bool = True, **options: Any
    ) -> None:
        MooringOwner.__init__(self, state, options, consolidates=consolidate, verbose=verbose)
        self.consolidate, self._training, self._staged = consolidate, False, -1

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Refuse unsupported options before any data is read."""
        _check_supported(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **given: Any,
    ) -> None:
        """Attach, and load the state if training is resumed; the model already has the checkpoint's weights."""
        _check_supported(args)
        if state.is_hyper_param_search:
            raise MooringError(
                "a hyperparameter search trains many models, which cannot be moored: train with one setting"
            )
        assert model is not None
        assert optimizer is not None
        reference = self._options.get("reference")
        if is_dataset(reference):
            reference = CollatedRows(reference, args.train_batch_size, given["train_dataloader"])
        self._attach(model, optimizer, resumes=bool(state.global_step), reference=reference)
        self._training, self._staged = True, -1
        if state.global_step:
            folders = [Path(args.resume_from_checkpoint)] if isinstance(args.resume_from_checkpoint, str) else []
            folders.append(_folder(args, state))
            file = self._resume_from(*(folder / NAME for folder in folders), _output(args) / STAGED)
            if file.name == STAGED and folders[-1].is_dir():
                self._write(args, folders[-1])  # before the next checkpoint overwrites the staged file
        self.print_coverage()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Stage the state if a checkpoint follows."""
        if control.should_save:
            self._stage(args, state)

    on_epoch_end = on_step_end

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Add what a budget has forgotten so far, as it was measured, to what the Trainer logs."""
        value = self.moor.running_forgetting if self._training else None
        if value is None:
            return
        records = [given.get("logs"), state.log_history[-1] if state.log_history else None]
        for record in records:
            if record is not None:
                record[MEASURED] = value

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Stage the state if the Trainer may save the model as the best so far."""
        if self._training and args.save_strategy == "best":
            self._stage(args, state)
        if not self._training:
            self.warn_if_unfinished("evaluated")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Move the staged state into the checkpoint that the Trainer has written."""
        if self._staged != state.global_step:
            self._write(args, _folder(args, state))
        elif args.should_save:
            os.replace(_output(args) / STAGED, _folder(args, state) / NAME)
        self._staged = -1

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Load the state of the best weights if the Trainer loaded those, then consolidate and save."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            if world_size() > 1:
                dist.barrier()  # the first rank may still be writing the file
            self._resume_from(Path(state.best_model_checkpoint) / NAME)
        if self.consolidate:
            self.end_task()
        else:
            self.warn_if_unfinished("kept")
        if args.save_strategy != "no":
            self._write(args, _output(args))
            if args.should_save:
                (_output(args) / STAGED).unlink(missing_ok=True)
        self._training = False

    def _stage(self, args: TrainingArguments, state: TrainerState) -> None:
        """Write the state before the Trainer writes its checkpoint and deletes an older one.

        If the process is killed between the two, the checkpoint is complete and the staged file has its state.
        """
        if self._staged != state.global_step:
            self._write(args, _output(args) / STAGED)
            self._staged = state.global_step

    def _write(self, args: TrainingArguments, path: Path) -> None:
        """Write the state in the processes that save; those with shards all take part in gathering it."""
        if args.should_save or is_sharded(self.moor):
            save(self.moor, path, writes=args.should_save)


class CollatedRows:
    """The rows of a dataset in batches, as the Trainer's collator makes them for training.

    Args:
        rows: a dataset, or a list of rows.
        size: the number of rows in a batch.
        loader: the Trainer's loader of training data, with the collator and the columns that it takes.
    """

    def __init__(self, rows: Any, size: int, loader: Any) -> None:
        columns = getattr(loader.dataset, "column_names", None)  # without those that the model does not take
        if columns and getattr(rows, "column_names", None):
            if missing := [name for name in columns if name not in rows.column_names]:
                raise MooringError(
                    f"the reference has no column {missing[0]!r}: prepare it as the Trainer's data, which has "
                    f"{', '.join(columns)}"
                )
            rows = rows.select_columns(columns)
        self.rows, self.size, self.collate = rows, size, loader.collate_fn

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.rows, Iterable):
            rows = iter(self.rows)
        else:  # by its length, because not every dataset raises an IndexError after its last row
            rows = (self.rows[index] for index in range(len(self.rows)))
        while batch := list(islice(rows, self.size)):
            yield self.collate(batch)


def is_dataset(reference: Any) -> bool:
    """Return whether a reference has rows: a `datasets.Dataset`, a torch dataset with an index, or a list of rows.

    Example:
        >>> is_dataset([{"input_ids": [1, 2]}]), is_dataset([torch.zeros(4, 2)])
        (True, False)
    """
    if type(reference).__module__.partition(".")[0] == "datasets":
        return True
    if isinstance(reference, torch.utils.data.IterableDataset):
        return False
    is_torch_dataset = isinstance(reference, torch.utils.data.Dataset)
    is_indexed = isinstance(reference, list | tuple) or (is_torch_dataset and hasattr(reference, "__len__"))
    if not is_indexed or not len(reference):
        return False
    return is_row(reference[0]) or (is_torch_dataset and not isinstance(reference[0], torch.Tensor | tuple | list))


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint to resume from; None if there is none.

    If the process is killed while it writes a checkpoint, the folder is incomplete, and `resume_from_checkpoint=True`
    would still use it.

    Example:
        >>> last_checkpoint("nowhere") is None
        True
    """
    root = Path(output_dir)
    steps = {int(number): folder for folder in root.glob("checkpoint-*") if (number := folder.name[11:]).isdigit()}
    for _, folder in sorted(steps.items(), reverse=True):
        try:
            TrainerState.load_from_json(str(folder / "trainer_state.json"))  # the last file that the Trainer writes
        except (OSError, ValueError, TypeError):
            continue
        if (folder / NAME).is_file() or (root / STAGED).is_file():
            return str(folder)
    return None


def _output(args: TrainingArguments) -> Path:
    return Path(args.output_dir or ".")


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return _output(args) / f"checkpoint-{state.global_step}"


def _check_supported(args: TrainingArguments) -> None:
    """Refuse DeepSpeed, FSDP1 and FSDP on XLA, with the reason; FSDP2 is supported."""
    if getattr(args, "deepspeed", None):
        raise MooringError(
            "MooringCallback does not support deepspeed, whose optimizer steps on flattened copies of parameters that "
            "no hook can see: train on one device, with DDP or with FSDP2"
        )
    if not getattr(args, "fsdp", None):
        return
    config = args.fsdp_config
    if isinstance(config, dict) and config.get("xla"):
        raise MooringError("MooringCallback does not support FSDP on XLA: train on GPUs, or without fsdp")
    plugin = getattr(args, "fsdp_plugin_args", None) or {}  # transformers 4 has environment variables instead
    if int(plugin.get("fsdp_version", os.environ.get("FSDP_VERSION", 1))) == 1:
        raise MooringError(
            'MooringCallback does not support FSDP1, which flattens parameters: give fsdp_config={"version": 2}'
        )
