"""One language model that learns the new task; methods change what a step does."""

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from language_models.problem import Problem
from language_models.texts import Batch, without_labels

WARM_UP = 20
"""Steps of the linear warm-up before the rate decays; a fifth of shorter trainings."""

ADAPTER_RANK = 16
ADAPTER_ALPHA = 32

Loss = Callable[[Any, Batch], Tensor]


class Run:
    """A copy of the model, its optimizer and its training.

    Args:
        problem: the model and the texts.
        seed: of the order of batches, and of adapters.
        adapters: PEFT's configuration of adapters that train instead of all weights.

    Attributes:
        rate: the highest learning rate.
        gauge: the divergence that Mooring measured at the end.
        returned: whether Mooring had to give up a part of what was learned, and warned.
        second_model: whether training needs the original model beside the trained one.
        train_seconds: the time of the steps alone.
        shared_seconds: the time of a training that this run shares with others.
    """

    def __init__(self, problem: Problem, seed: int, adapters: Any = None) -> None:
        self.problem, self.seed = problem, seed
        self.model = copy.deepcopy(problem.original).requires_grad_(True)
        torch.manual_seed(1000 + seed)
        if adapters is not None:
            from peft import get_peft_model

            self.model = get_peft_model(self.model, adapters)
        self.rate = problem.rate if adapters is None else problem.adapter_rate
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=self.rate, weight_decay=0.0)
        self.gauge = math.nan
        self.returned = self.second_model = False
        self.train_seconds = self.shared_seconds = 0.0

    def train(self, penalty: Callable[[int], Tensor] | None = None, loss_of: Loss | None = None) -> None:
        """Learn the new task; a penalty, by the number of the step, is added to its loss."""
        from transformers import get_scheduler

        problem, batches = self.problem, self.problem.batches(self.seed)
        warm_up = min(WARM_UP, problem.steps // 5) if problem.schedule == "decay" else 0
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        kind = "linear" if problem.schedule == "decay" else "constant"
        schedule = get_scheduler(kind, self.optimizer, warm_up, problem.steps)
        self.model.train()
        synchronize(problem.device)
        start = time.perf_counter()
        for step, batch in enumerate(batches):
            self.optimizer.zero_grad()
            with problem.autocast():
                loss = loss_of(self.model, batch) if loss_of else self.model(**batch).loss
                if penalty:
                    loss = loss + penalty(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            schedule.step()
        synchronize(problem.device)
        self.train_seconds = time.perf_counter() - start

    def old_batch(self, step: int) -> Batch:
        """Return a batch of the reference, in turn."""
        return self.problem.reference[step % len(self.problem.reference)]

    def original_logits(self, batch: Batch) -> Tensor:
        """Return the outputs of the original model, which is the base of adapters or else a second model."""
        with torch.no_grad():
            if hasattr(self.model, "disable_adapter"):
                with self.model.disable_adapter():
                    logits: Tensor = self.model(**without_labels(batch)).logits
            else:
                self.second_model = True
                logits = self.problem.original(**without_labels(batch)).logits
        return logits


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that the clock counts its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
