"""One network that learns the new task, and what it keeps and learns."""

import copy
import math
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from real_networks.problem import Batch, Problem, loss_of, shuffled


class Run:
    """One network that learns the new task; methods change what a step does.

    Args:
        problem: the networks and the data.
        seed: of the network, and of the order of batches.
        rate: a factor of the learning rate.

    Attributes:
        penalty: a term that is added to the loss of a step, by its number.
        after_step: is called after each step.
        gauge: the divergence that Mooring measured at the end.
        train_seconds: the time of training, without evaluation and what comes before it.
        shared_seconds: the time of a training that this run shares with others.
    """

    def __init__(self, problem: Problem, seed: int, rate: float = 1.0) -> None:
        self.problem, self.model = problem, problem.network(seed)
        self.original = copy.deepcopy(self.model).eval().requires_grad_(False)
        torch.manual_seed(1000 + seed)
        named = self.model.named_parameters()
        self.trained = [p for name, p in named if p.requires_grad and not self._is_old_head(name)]
        self.optimizer = problem.optimizer(self.trained, rate)
        self.reference = list(zip(*(part.split(problem.reference_batch) for part in problem.reference), strict=True))
        self.penalty: Callable[[int], Tensor] | None = None
        self.after_step: Callable[[], None] = lambda: None
        self.moor: Any = None
        self.gauge = math.nan
        self.train_seconds = self.shared_seconds = 0.0

    def _is_old_head(self, name: str) -> bool:
        return self.model.new_head is not None and name.startswith("old.")

    def backbone(self) -> dict[str, Tensor]:
        """Return the parameters that are trained and that old and new outputs share."""
        trained = {id(p) for p in self.trained}
        named = self.model.named_parameters()
        return {name: p for name, p in named if id(p) in trained and not name.startswith("new_head")}

    def train(self) -> None:
        """Learn the new task."""
        start = time.perf_counter()
        self.model.train()
        (x, y), problem = self.problem.new_train, self.problem
        batches = shuffled(len(x), problem.batch, problem.epochs, x.device)
        for step, batch in enumerate(islice(batches, problem.steps)):
            self.optimizer.zero_grad()
            with problem.autocast():
                loss = loss_of(self.model.new(problem.prepare(x[batch])), y[batch])
                if self.penalty:
                    loss = loss + self.penalty(step)
            loss.backward()
            self.optimizer.step()
            self.after_step()
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        self.train_seconds += time.perf_counter() - start

    def old_batch(self, step: int) -> Batch:
        """Return a batch of the reference, in turn."""
        x, y = self.reference[step % len(self.reference)]
        return self.problem.prepare(x), y

    def divergence(self, x: Tensor) -> Tensor:
        """Return the mean divergence of the original outputs from the present ones."""
        with torch.no_grad():
            target = _log_probabilities(self.original(x))
        return kl_div(_log_probabilities(self.model(x)), target, reduction="batchmean", log_target=True)

    @torch.no_grad()
    def results(self) -> dict[str, float]:
        """Return what was kept and what was learned, on the test data."""
        self.model.eval()
        (old_x, old_y), (new_x, new_y) = self.problem.old_test, self.problem.new_test
        old, before = self._outputs(self.model, old_x), self._outputs(self.original, old_x)
        new = self._outputs(self.model.new, new_x)
        p, q = before.log_softmax(1), old.log_softmax(1)
        return {
            "before": _accuracy(before, old_y),
            "kept": _accuracy(old, old_y),
            "new": _accuracy(new, new_y),
            "nats": float((p.exp() * (p - q)).sum(1).mean()),
            "rise": float(cross_entropy(old, old_y.flatten()) - cross_entropy(before, old_y.flatten())),
            "new_loss": float(cross_entropy(new, new_y.flatten())),
            "gauge": self.gauge,
            "train_seconds": self.train_seconds,
        }

    def _outputs(self, model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return the outputs, one row for each prediction."""
        parts = inputs.split(max(self.problem.batch, 50))
        return torch.cat([model(self.problem.prepare(part)).float().flatten(0, -2) for part in parts])


def _log_probabilities(outputs: Tensor) -> Tensor:
    return outputs.float().flatten(0, -2).log_softmax(-1)


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return 100 * float((outputs.argmax(1) == labels.flatten()).float().mean())
