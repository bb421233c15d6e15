"""Microseconds a model-step: of runs one after the other through a plain eager loop, and of the same as a fleet.

Both do the same arithmetic on the same batches, which lie on the device. The loop is ordinary PyTorch with
`torch.optim.SGD` and, where the method has one, `mooring.attach` without its check for finite gradients, which would
wait for the GPU in every step; TF32 is allowed where the fleet uses it, and bfloat16 is autocast.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

import mooring
from fleets.clock import Clock
from mooring.errors import MooringError
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.methods import find_method
from mooring.lab.model.order import task_order
from mooring.lab.model.precision import parameter_dtype, product_dtype, tf32_mode
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import initial_network
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.streams import Stream

__all__ = ["Pace", "one_by_one", "pace", "specs_of", "together"]

STRENGTH = 1e-3
"""Of penalties: too weak to lose a run, and as much work as any other."""


@dataclass(frozen=True)
class Pace:
    """Microseconds a model-step, both ways."""

    loop: float
    fleet: float

    @property
    def ratio(self) -> float:
        """How many times faster the fleet is."""
        return self.loop / self.fleet


def specs_of(stream: Stream, method: str, network: str, runs: int, batch: int, dtype: str) -> list[RunSpec]:
    """Runs that differ in their seeds."""
    strength = STRENGTH if find_method(method).has_strength else None
    told = {"network": network, "batch": batch, "dtype": dtype, "epochs": 1, "lr": 0.001, "strength": strength}
    return [RunSpec(stream.name, stream.fingerprint, method, seed, **told) for seed in range(runs)]


def one_by_one(specs: Sequence[RunSpec], stream: Stream, device: str) -> float:
    """Microseconds a model-step, one run after the other."""
    clock = Clock(device)
    images, labels = stream.train.images.to(device), stream.train.labels.to(device)
    for spec in specs:
        method, dtype, products = find_method(spec.method), parameter_dtype(spec.dtype), product_dtype(spec.dtype)
        kind = torch.device(device).type
        model = initial_network(spec.network, stream, spec.seed, dtype=dtype).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=spec.lr, momentum=spec.momentum)
        moor = None
        if method.importance:
            pull = method.pull(spec.strength or 0.0)
            importance = method.importance(spec.seed)
            moor = mooring.attach(model, optimizer, importance=importance, pull=pull, check_finite=False)
        for number, task in enumerate(stream.tasks):
            optimizer.state.clear()
            order = task_order(spec.seed, number, 0, task.train).to(device)
            for done, batch in enumerate(order.split(spec.batch)):
                optimizer.zero_grad()
                with torch.autocast(kind, products, enabled=products is not None):
                    loss = cross_entropy(model(normalize_pixels(images[batch], dtype)), labels[batch])
                loss.backward()
                optimizer.step()
                clock.step(number, done + 1)
            if number == 1:
                clock.stop()
            if moor:
                moor.consolidate()
    return clock.us


def together(specs: Sequence[RunSpec], stream: Stream, device: str) -> float:
    """Microseconds a model-step of the same training as a fleet."""
    gc.collect()  # the fleet before this one, whose parts know each other
    clock = Clock(device)
    results = Fleet(specs, stream, device=device).run(clock)
    for result in results:
        if result.status != "finished":
            raise MooringError(f"a run was lost, and the figure would be of a smaller fleet: {result.reason}")
    return clock.us / len(specs)


def pace(specs: Sequence[RunSpec], stream: Stream, device: str, *, few: int, repeats: int) -> Pace:
    """Both in turn, several times, and the medians; `few` of the runs one by one."""
    measured: dict[Callable[[Sequence[RunSpec], Stream, str], float], list[float]] = {one_by_one: [], together: []}
    with tf32_mode(specs[0].dtype):
        for _ in range(repeats):
            for how, found in measured.items():
                found.append(how(specs[:few] if how is one_by_one else specs, stream, device))
    return Pace(*(statistics.median(found) for found in measured.values()))
