"""Train on upright and then on rotated digits with Lightning's Trainer, plain and moored.

pip install "mooring[lightning]"
python examples/lightning_trainer.py
"""

import argparse
import logging

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import mooring
from mooring.integrations.lightning import MooringCallback


class Classifier(LightningModule):
    """A small network as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.net(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss; call the module itself, so that importances can observe its outputs."""
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a new optimizer for each task; the mooring continues with it."""
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)


def accuracy(model: Classifier, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the accuracy in percent."""
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    """Train two tasks, one `fit()` each; the callback consolidates after each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each task")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    upright, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    rotated = upright.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)
    for moored in (False, True):
        seed_everything(0, verbose=False)
        model = Classifier()
        callback = MooringCallback(importance="si", pull=mooring.Interpolation(stiffness=0.3))
        for x in (upright, rotated):
            trainer = Trainer(
                max_epochs=options.epochs,
                callbacks=[callback] if moored else [],
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(model, DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=20, shuffle=True))
        accuracies = [accuracy(model, x[1400:], y[1400:]) for x in (upright, rotated)]
        print(f"{'moored' if moored else 'plain':7s} upright {accuracies[0]:.1f} %, rotated {accuracies[1]:.1f} %")


if __name__ == "__main__":
    main()
