"""Measure the microseconds per model-step of a plain eager loop, one run after the other, and of a fleet.

Both do the same arithmetic on the same batches, which are on the device. The loop is ordinary PyTorch with
`torch.optim.SGD` and, if the method needs it, `mooring.attach` without its check for finite gradients, which would wait
for the GPU in every step. TF32 is allowed where the fleet uses it, and bfloat16 uses autocast.
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
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.methods import find_method
from mooring_lab.model.order import task_order
from mooring_lab.model.precision import parameter_dtype, product_dtype, tf32_mode
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams import Stream

__all__ = ["Pace", "one_by_one", "pace", "specs_of", "together"]

STRENGTH = 1e-3
"""The strength of penalties; it is too small to make a run unstable, and the work does not depend on it."""


@dataclass(frozen=True)
class Pace:
    """The microseconds per model-step of a loop and of a fleet."""

    loop: float
    fleet: float

    @property
    def ratio(self) -> float:
        """The speed-up of the fleet."""
        return self.loop / self.fleet


def specs_of(stream: Stream, method: str, network: str, runs: int, batch: int, dtype: str) -> list[RunSpec]:
    """Return runs that differ only in their seed."""
    strength = STRENGTH if find_method(method).has_strength else None
    fields = {"network": network, "batch": batch, "dtype": dtype, "epochs": 1, "lr": 0.001, "strength": strength}
    return [RunSpec(stream.name, stream.fingerprint, method, seed, **fields) for seed in range(runs)]


def one_by_one(specs: Sequence[RunSpec], stream: Stream, device: str) -> float:
    """Return the microseconds per model-step of runs one after the other."""
    clock = Clock(device)
    images, labels = stream.train.images.to(device), stream.train.labels.to(device)
    for spec in specs:
        method, dtype, autocast_dtype = find_method(spec.method), parameter_dtype(spec.dtype), product_dtype(spec.dtype)
        device_type = torch.device(device).type
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
                with torch.autocast(device_type, autocast_dtype, enabled=autocast_dtype is not None):
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
    """Return the microseconds per model-step of the runs as a fleet."""
    gc.collect()  # frees the previous fleet, whose objects refer to each other
    clock = Clock(device)
    results = Fleet(specs, stream, device=device).run(clock)
    for result in results:
        if result.status != "finished":
            raise MooringError(f"a run did not finish, so the time is not that of the whole fleet: {result.reason}")
    return clock.us / len(specs)


def pace(specs: Sequence[RunSpec], stream: Stream, device: str, *, loop_runs: int, repeats: int) -> Pace:
    """Return the medians of several measurements in turn; the loop trains only `loop_runs` of the runs."""
    measured: dict[Callable[[Sequence[RunSpec], Stream, str], float], list[float]] = {one_by_one: [], together: []}
    with tf32_mode(specs[0].dtype):
        for _ in range(repeats):
            for measure, times in measured.items():
                times.append(measure(specs[:loop_runs] if measure is one_by_one else specs, stream, device))
    return Pace(*(statistics.median(times) for times in measured.values()))
