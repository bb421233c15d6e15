"""Training of the same network and method by Avalanche, timed by a plugin; it is imported only if Avalanche is."""

import warnings

import torch
from torch import nn

from fleets.clock import Clock
from mooring_lab.model.precision import tf32_mode
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams import Stream

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports raise deprecation warnings
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.training import EWC, SynapticIntelligence
    from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin

__all__ = ["through_avalanche"]


class Timer(SupervisedPlugin):
    """A plugin that reports every iteration to the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.time, self.task, self.done = clock, -1, 0

    def before_training_exp(self, strategy, **kwargs) -> None:
        """Start a task."""
        self.task, self.done = self.task + 1, 0

    def after_training_iteration(self, strategy, **kwargs) -> None:
        """Record a step."""
        self.done += 1
        self.time.step(self.task, self.done)

    def after_training_epoch(self, strategy, **kwargs) -> None:
        """Stop the clock before the method's work at the end of the task."""
        if self.task == 1:
            self.time.stop()


def through_avalanche(spec: RunSpec, stream: Stream, device: str, workers: int = 0) -> float:
    """Return the microseconds per step of one run with Avalanche's strategy, without evaluation or loggers."""
    clock = Clock(device)
    model = initial_network(spec.network, stream, spec.seed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=spec.lr, momentum=spec.momentum)
    options = {"model": model, "optimizer": optimizer, "criterion": nn.CrossEntropyLoss(), "train_mb_size": spec.batch}
    options |= {"train_epochs": 1, "device": torch.device(device), "plugins": [Timer(clock)]}
    strength = spec.strength or 0.0
    tensors = [
        (normalize_pixels(stream.train.images[task.train]), stream.train.labels[task.train]) for task in stream.tasks
    ]
    with warnings.catch_warnings(), tf32_mode(spec.dtype):
        warnings.simplefilter("ignore")
        options["evaluator"] = EvaluationPlugin()
        strategy = (
            EWC(ewc_lambda=strength, **options)
            if spec.method == "ewc"
            else SynapticIntelligence(si_lambda=strength, **options)
        )
        tasks = tensors_benchmark(train_tensors=tensors, test_tensors=tensors[:1], task_labels=[0] * len(tensors))
        for experience in tasks.train_stream:
            strategy.train(experience, num_workers=workers)
    return clock.us
