"""Small streams for the laboratory's tests, and a training loop written out by hand."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import mooring
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.methods import find_method
from mooring_lab.model.order import batch_sizes, joint_order, task_order
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams import Stream, by_class, digits, permuted
from mooring_lab.streams.stream import in_scenario

gpu = pytest.mark.gpu


class Once:
    """Saves a fleet in its first harbour."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step(self, fleet: Fleet) -> None:
        pass

    def on_task_end(self, fleet: Fleet) -> None:
        if not self.path.exists():
            checkpoint.save(fleet, self.path)


def short(stream: Stream, tasks: int, images: int) -> Stream:
    """The first images of the first tasks."""
    kept = tuple(replace(t, train=t.train[:images], test=t.test[:images]) for t in stream.tasks[:tasks])
    return replace(stream, tasks=kept)


def class_stream(tasks: int = 3, images: int = 36) -> Stream:
    return short(by_class(digits(), per_task=2), tasks, images)


def growing_stream(tasks: int = 3, images: int = 36) -> Stream:
    return in_scenario(class_stream(tasks, images), "class")


def domain_stream(tasks: int = 3, images: int = 36) -> Stream:
    return short(permuted(digits(), tasks), tasks, images)


def spec_for(method: str, stream: Stream, seed: int = 0, **options) -> RunSpec:
    """A run of a method at a strength that is safe on so little data, in float64."""
    method_row = find_method(method)
    mild = {"ewc": 1e3, "mas": 1e-3, "balanced-ewc": 1e3, "clamped-ewc": 1e3, "proximal-ewc": 300.0}
    mild |= {"summed-ewc": 3.0, "clamped-summed-ewc": 300.0, "laplace-kronecker": 0.3}
    mild |= {"balanced-mas": 1e-3, "clamped-mas": 1e-3, "budget-measured": 0.3, "budget-distil": 0.3}
    strength = mild.get(method, method_row.strength)
    defaults = {
        "strength": strength if method_row.has_strength else None,
        "memory": 20 if method_row.memory else None,
        "dtype": "float64",
        "epochs": 2,
        "batch": 10,
    }
    return RunSpec(stream.name, stream.fingerprint, method_row.name, seed, **{**defaults, **options})


def optimizer_by_hand(spec: RunSpec, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a run alone."""
    settings = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(parameters, betas=(spec.momentum, 0.999), **settings)
    return torch.optim.SGD(parameters, momentum=spec.momentum, **settings)


def scheduler_by_hand(spec: RunSpec, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """The schedule of one task of a run alone, for a number of steps in each epoch."""
    total = steps * spec.epochs
    warmup = math.ceil(total / 10)
    factors = {
        "constant": lambda step: 1.0,
        "cosine": lambda step: (1 + math.cos(math.pi * (step // steps) / spec.epochs)) / 2,
        "warmup-linear": lambda step: min(step / warmup, (total - step) / max(1, total - warmup)),
    }
    return LambdaLR(optimizer, factors[spec.schedule])


def trained_by_hand(spec: RunSpec, stream: Stream) -> torch.nn.Module:
    """The network that a plain PyTorch loop with `mooring.attach` gives; for methods without a memory."""
    method, dtype = find_method(spec.method), getattr(torch, spec.dtype)
    model = initial_network(spec.network, stream, spec.seed, dtype=dtype)
    optimizer = optimizer_by_hand(spec, model.parameters())
    moor = None
    if method.importance is not None:
        exclude = "heads" if stream.heads == "per task" else ()
        pull = method.pull(spec.strength or 0.0)
        rules = {"importance": method.importance(spec.seed), "pull": pull, "merge": method.merge}
        moor = mooring.attach(model, optimizer, exclude=exclude, buffers=spec.buffers, **rules)
    labels = stream.train.labels.clone()
    if stream.scenario == "class" and method.all_tasks:
        for number, task in enumerate(stream.tasks):
            labels[task.train] += sum(len(earlier.classes) for earlier in stream.tasks[:number])
    heads = torch.zeros(len(stream.train), dtype=torch.int64)
    for number, task in enumerate(stream.tasks):
        heads[task.train] = stream.head(number)
    # in the class-incremental scenario the head really grows: rows of the initial head are added before each task
    rows = {name: p.detach().clone() for name, p in model.heads[0].named_parameters()}
    seen = 0
    for number, task in enumerate(stream.tasks):
        if stream.scenario == "class":
            count = stream.outputs if method.all_tasks else seen + len(task.classes)
            for name, p in model.heads[0].named_parameters():
                p.data = torch.cat([p.data[:seen], rows[name][seen:count]])
            labels[task.train] += seen if not method.all_tasks else 0
            seen = count
        if number and stream.heads == "per task" and spec.heads == "inherit" and not method.all_tasks:
            model.inherit(number, number - 1)
        if moor is not None and method.anchors == "start" and number == 0:
            moor.consolidate()
        optimizer.state.clear()
        still = number >= getattr(method.plugin, "trained_tasks", number + 1)
        model.backbone.requires_grad_(not still)
        model.train(not still)
        scheduler = None
        for epoch in range(spec.epochs):
            if method.all_tasks:
                order = joint_order(spec.seed, number, epoch, [t.train for t in stream.tasks], spec.epochs)
            else:
                order = task_order(spec.seed, number, epoch, task.train)
            batches = order.split(spec.batch)
            scheduler = scheduler or scheduler_by_hand(spec, optimizer, len(batches))
            for batch in batches:
                optimizer.zero_grad()
                x = normalize_pixels(stream.train.images[batch], dtype)
                head = heads[batch] if method.all_tasks else stream.head(number)
                cross_entropy(model(x, head), labels[batch]).backward()
                optimizer.step()
                scheduler.step()
        if moor is not None and method.anchors == "last":
            moor.consolidate()
    assert sum(batch_sizes(len(order), spec.batch)) == len(order)
    return model
