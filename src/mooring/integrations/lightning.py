"""Mooring in Lightning's Trainer: a callback that moors what the Trainer trains, and travels in its checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooring.errors import MooringError
from mooring.integrations.deferred_attach import DeferredAttach, SavedState
from mooring.moor import Mooring

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

__all__ = ["MooringCallback"]

SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
"""Strategies in which no rank has whole parameters."""


class MooringCallback(Callback):
    """Moors the model that Lightning's `Trainer` trains, with the optimizer of `configure_optimizers`.

    One `fit()` is one task: at its end the task is consolidated, and the next `fit()` with this callback, of whichever
    Trainer, goes on from there. The state travels in Lightning's checkpoints: `fit(ckpt_path=...)` takes it up again.

    Args:
        consolidate: whether the end of `fit()` is the end of a task; if not, call `callback.moor.consolidate()`.
        state: what to go on from: a `state_dict()`, or the file or folder that one was saved to. A checkpoint that
            training is resumed from comes first.
        optimizer: which optimizer's parameters to moor, by number, where `configure_optimizers` gives several; each may
            have a callback of its own.
        module: the name of the submodule to moor, by default the whole LightningModule. Importances that look at
            outputs ("mas", "ewc" with `labels="sampled"` or `per_sample`) look at those of this module, so name the
            one that `training_step` calls.
        options: those of `mooring.attach`, such as `importance`, `pull` and `exclude`.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> class DiagonalTerm(LightningModule):
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
        >>> trainer.fit(DiagonalTerm(), torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=4))
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
        **options: Any,
    ) -> None:
        self.consolidate = consolidate
        self.optimizer = optimizer
        self.module = module
        self._deferred = DeferredAttach(state, options)

    @property
    def moor(self) -> Mooring:
        """The Mooring, from the start of the first `fit()` on."""
        return self._deferred.moor

    def save(self, path: str | Path) -> Path:
        """Write the state to a file, or into a folder, for another process's `MooringCallback(state=...)`."""
        return self._deferred.save(path)

    @property
    def state_key(self) -> str:
        """What the state is called in checkpoints: a name of its own for each optimizer that is named."""
        return "MooringCallback" if self.optimizer is None else f"MooringCallback{self.optimizer}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the mooring."""
        return dict(self._deferred.state() or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A checkpoint is taken up; Lightning does so before it makes the optimizer."""
        self._deferred.resume(state_dict)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """The optimizers are there, and no data was read."""
        if (strategy := type(trainer.strategy).__name__) in SHARDED:
            raise MooringError(f"MooringCallback cannot moor a model under {strategy} yet: use one device, or DDP")
        optimizers = trainer.optimizers
        if self.optimizer is None and len(optimizers) != 1:
            raise MooringError(
                f"the model has {len(optimizers)} optimizers: name the one to moor, as in MooringCallback(optimizer=0)"
            )
        number = self.optimizer or 0
        if not 0 <= number < len(optimizers):
            raise MooringError(f"optimizer={number} is not allowed: the model has {len(optimizers)}, counted from 0")
        modules = dict(pl_module.named_modules())
        if (name := self.module or "") not in modules:
            known = ", ".join(name for name, _ in pl_module.named_children())
            raise MooringError(f"module={name!r} is not a module of this model; it has {known}")
        self._deferred.attach(modules[name], optimizers[number])

    def on_fit_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Training is over, and so are its checkpoints; the model is back on the CPU."""
        self._deferred.settle()
        if self.consolidate:
            self.moor.consolidate()
