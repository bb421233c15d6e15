"""A callback for Lightning's Trainer, with its state in Lightning's checkpoints."""

from typing import TYPE_CHECKING, Any

from mooring.errors import MooringError
from mooring.integrations.deferred_attach import MEASURED, MooringOwner, SavedState

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            message = "mooring.integrations.lightning needs lightning: pip install 'mooring[lightning]'"
            raise ImportError(message) from error

SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
"""Strategies that shard the parameters."""


class MooringCallback(MooringOwner, Callback):
    """A callback that moors the model of Lightning's `Trainer` with the optimizer of `configure_optimizers`.

    Each `fit()` is a task, consolidated at its end. The next `fit()` with this callback continues from there, also with
    another Trainer. Lightning's checkpoints contain the state, and `fit(ckpt_path=...)` loads it.

    Args:
        consolidate: whether the end of `fit()` is the end of a task; if not, call `callback.moor.consolidate()`.
        state: the state to resume from: a `state_dict()`, or the file or folder that it was saved to. The checkpoint of
            a resumed `fit()` replaces it.
        optimizer: the number of the optimizer to moor, if `configure_optimizers` returns several; each may have its
            own callback.
        module: the name of the submodule to moor; by default the whole LightningModule. Importances that read outputs
            ("mas", "ewc" with `labels="sampled"` or `per_sample`) read those of this module, so name the one that
            `training_step` calls.
        verbose: whether to print, when training begins, how many parameters are held, or that nothing is held yet, in a
            first task without a reference or state; and when it ends, what was forgotten, if that is measured.
        options: options of `mooring.attach`, such as `importance`, `pull` and `exclude`.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Linear(3, 1)
        ...     def training_step(self, batch, index):
        ...         return self.net(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        >>> trainer = Trainer(max_steps=2, accelerator="cpu", enable_model_summary=False, **quiet)
        >>> callback = MooringCallback(importance="mas", module="net")
        >>> trainer.callbacks.append(callback)
        >>> trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=4))
        >>> callback.moor.tasks
        1
    """

    def __init__(
        self,
        *,
        consolidate: bool = True,
        state: SavedState = None,
        optimizer: int | None = None,
        module: str | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        MooringOwner.__init__(self, state, options, consolidates=consolidate, verbose=verbose)
        self.consolidate, self.optimizer, self.module = consolidate, optimizer, module

    @property
    def state_key(self) -> str:
        """The key of the state in checkpoints; it contains the number of the optimizer if one is given."""
        return "MooringCallback" if self.optimizer is None else f"MooringCallback{self.optimizer}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return dict(self._next_state() or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint; Lightning calls this before it creates the optimizer."""
        self._resume(state_dict)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Attach; Lightning calls this with the optimizers created and before it reads data."""
        if (strategy := type(trainer.strategy).__name__) in SHARDED:
            raise MooringError(f"MooringCallback does not support {strategy}: use one device or DDP")
        optimizers = trainer.optimizers
        if self.optimizer is None and len(optimizers) != 1:
            raise MooringError(
                f"the model has {len(optimizers)} optimizers: give the one to moor, as in MooringCallback(optimizer=0)"
            )
        number = self.optimizer or 0
        if not 0 <= number < len(optimizers):
            raise MooringError(f"optimizer={number} is not allowed: the model has {len(optimizers)}, counted from 0")
        modules = dict(pl_module.named_modules())
        if (name := self.module or "") not in modules:
            children = ", ".join(name for name, _ in pl_module.named_children())
            raise MooringError(f"module={name!r} is not a module of this model; it has {children}")
        self._attach(modules[name], optimizers[number])
        self.print_coverage()

    def on_train_batch_end(self, trainer: "Trainer", pl_module: "LightningModule", *batch: Any) -> None:
        """Log what a budget has forgotten so far, as it was measured."""
        if (value := self.moor.running_forgetting) is not None:
            pl_module.log(MEASURED, value)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Keep a budget that is measured, while the model is still on its device."""
        if self.consolidate and self.moor.measures:
            self.moor.finish()
        elif not self.consolidate:
            self.warn_if_unfinished("kept")

    def on_test_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Warn of a model whose budget is exceeded."""
        self.warn_if_unfinished("tested")

    def on_predict_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Warn of a model whose budget is exceeded."""
        self.warn_if_unfinished("used")

    def on_fit_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Consolidate; Lightning calls this after its last checkpoint, with the model back on the CPU."""
        self._move_to_model()
        if self.consolidate:
            self.end_task()
