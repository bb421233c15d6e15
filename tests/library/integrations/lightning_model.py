"""A LightningModule with two layers, and tasks of generated data."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from mooring.integrations.lightning import MooringCallback

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batches(task: int, count: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(task)
    return [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(x), x.argmax(1) % 3)


class TwoLayerModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return loss(self, x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def loader(task: int) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(batches(task), batch_size=None)


def trainer(*callbacks, **options) -> pl.Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return pl.Trainer(**{**QUIET, "max_epochs": 1, "enable_checkpointing": saves, **options}, callbacks=[*callbacks])


def two_tasks(epochs: int) -> tuple[TwoLayerModule, MooringCallback]:
    """Start or resume a script of two tasks, of which only the second writes checkpoints."""
    model, callback = TwoLayerModule(), MooringCallback(importance="rwalk")
    checkpoints = sorted(Path("second").glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    if not checkpoints:
        trainer(callback).fit(model, loader(0))
    saver = ModelCheckpoint("second", "{epoch}", save_top_k=-1)
    resume = str(checkpoints[-1]) if checkpoints else None
    trainer(callback, saver, max_epochs=epochs).fit(model, loader(1), ckpt_path=resume)
    return model, callback
