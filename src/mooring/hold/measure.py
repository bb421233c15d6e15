"""Measuring: gauges are batches with outputs of the original model, and a measurement is the distance from them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mooring.errors import MooringError, NonFiniteError, first_line
from mooring.reference.attended import attended
from mooring.reference.batches import (
    LEAVE_OUT,
    Loss,
    Outputs,
    default_loss,
    device_of,
    map_tensors,
    name_batch,
    outputs_on,
    placed,
    rows_of,
    samples_of,
    scalar_loss,
    to_device,
)
from mooring.reference.kinds import Classes, Labels, OutputKind
from mooring.reference.kinds.kind import Stored
from mooring.reference.mixtures import MixedBatches
from mooring.reference.preserve_model_state import (
    Settings,
    passive,
    preserve_model_state,
    read_settings,
    traces_of,
)
from mooring.reference.reference_labels import (
    ignores_labels,
    prepare_labels,
    warn_of_coins,
    warn_of_probabilities,
    without_labels,
)

MAX_POINTS = 4096
"""Above this number every second point of the first half is dropped, so that a long training keeps a short history."""


@dataclass(frozen=True)
class Measurement:
    """What was measured on a gauge, or on several.

    Attributes:
        nats: the divergence from the original model, or the rise of the loss.
        standard_error: of `nats`, from the spread over samples; infinite for a single one.
        samples: the number of samples; with a loss, of batches.
        by_loss: whether it is the rise of a loss, whose unit need not be nats.
        ending: what the end of a task did to the model before: nothing, or that it took the average of the last steps,
            repaired it, or returned it towards the old one, and how far.

    Example:
        >>> print(Measurement(0.0281, 0.0042, 128))
        0.0281 +- 0.0042 nats on 128 samples
        >>> print(Measurement(0.0281, 0.0042, 8, by_loss=True))
        0.0281 +- 0.0042 units of the loss on 8 batches
    """

    nats: float
    standard_error: float
    samples: int
    by_loss: bool = field(default=False, repr=False, compare=False)
    ending: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        unit, counted = ("units of the loss", "batches") if self.by_loss else ("nats", "samples")
        value = f"{self.nats:.3g} +- {self.standard_error:.2g} {unit} on {self.samples} {counted}"
        return f"{value}, after {self.ending}" if self.ending else value


def ratio_of_sums(sums: Sequence[float], counts: Sequence[float]) -> Measurement:
    """Return sum(sums) / sum(counts) over samples with several predictions each, and its standard error.

    Args:
        sums: the sum over the predictions of each sample.
        counts: the number of its predictions; those without any are left out.

    Example:
        >>> ratio_of_sums([1.0, 3.0], [1.0, 1.0])
        Measurement(nats=2.0, standard_error=1.0, samples=2)
    """
    pairs = [(total, count) for total, count in zip(sums, counts, strict=True) if count]
    n, predictions = len(pairs), math.fsum(count for _, count in pairs)
    if not n:
        return Measurement(math.nan, math.inf, 0)
    mean = math.fsum(total for total, _ in pairs) / predictions
    if n == 1 or not math.isfinite(mean):
        return Measurement(mean, math.inf, n)
    residual = math.fsum((total - mean * count) ** 2 for total, count in pairs)
    return Measurement(mean, math.sqrt(residual * n / (n - 1)) / predictions, n)


def combine(measurements: Sequence[Measurement]) -> Measurement:
    """Return the mean over several gauges.

    Example:
        >>> combine([Measurement(1.0, 0.3, 10), Measurement(3.0, 0.4, 10)])
        Measurement(nats=2.0, standard_error=0.25, samples=20)
    """
    parts = len(measurements)
    error = math.sqrt(math.fsum(m.standard_error**2 for m in measurements)) / parts
    return Measurement(math.fsum(m.nats for m in measurements) / parts, error, sum(m.samples for m in measurements))


class MeasuredPoint(NamedTuple):
    """What was measured after a step.

    Attributes:
        task: the number of consolidated tasks at that time.
        step: the number of steps in the task.
        nats: the measured forgetting.
        named: the budget.
    """

    task: int
    step: int
    nats: float
    named: float


class MeasuredHistory(Sequence[MeasuredPoint]):
    """The measured values in their order.

    Example:
        >>> history = MeasuredHistory()
        >>> history.add(MeasuredPoint(task=1, step=7, nats=0.02, named=0.1))
        >>> len(history), history[-1].nats
        (1, 0.02)
    """

    def __init__(self, points: Sequence[Sequence[float]] = ()) -> None:
        self._points = [
            MeasuredPoint(int(task), int(step), float(nats), float(named)) for task, step, nats, named in points
        ]

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> MeasuredPoint:  # type: ignore[override]
        return self._points[index]

    def __iter__(self) -> Iterator[MeasuredPoint]:
        return iter(self._points)

    def add(self, point: MeasuredPoint) -> None:
        """Append a point, and thin out old ones if there are many."""
        self._points.append(point)
        if len(self._points) > MAX_POINTS:
            half = len(self._points) // 2
            self._points = self._points[:half:2] + self._points[half:]

    def plain(self) -> list[list[float]]:
        """Return the points as lists, for a saved state."""
        return [list(point) for point in self._points]


class Gauge:
    """Batches of one past task, with what the model at the end of that task, or at the last consolidation, gave.

    Without a loss a batch is measured by the divergence from the stored outputs; with one, by its rise.

    Args:
        batches: the batches, with labels where the loss needs them.
        loss: the mean loss on a batch; None for the divergence.
        outputs: takes what the model returns and gives its outputs; None is as the kind finds them.
        kind: what the outputs are.
        whole: whether the outputs of a sample depend on the others of its batch, which stays whole then.

    Attributes:
        checkpoints: whether the model has reentrant checkpoints, of which only a backward pass gives gradients.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        loss: Loss | None = None,
        outputs: Outputs | None = None,
        kind: OutputKind | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.batches = batches if isinstance(batches, MixedBatches) else list(batches)
        self.loss, self.outputs, self.kind, self.whole = loss, outputs, kind or Classes(), whole
        self.targets: list[Stored | float] = []
        self.settings: Settings | None = None
        self._placed: tuple[torch.device, Sequence[Any]] | None = None
        self.checkpoints = False
        self._drops_labels: bool | None = None
        self._leaves_traces: bool | None = None
        self._attended: dict[int, Tensor | None] = {}

    def __len__(self) -> int:
        return len(self.batches)

    @torch.no_grad()
    def record(
        self,
        model: nn.Module,
        known: "Gauge | None" = None,
        number_of: Sequence[int] = (),
    ) -> None:
        """Store what the model gives now; from here on the measured value is 0 until it moves.

        The model's settings, such as its head, are those that it had when this gauge was first recorded.

        Args:
            model: the model.
            known: a gauge of the first batches that has just been recorded.
            number_of: the number of each batch in what the user gave, for error messages.
        """
        if self.settings is None:
            self.settings = read_settings(model)
        targets = list(known.targets) if known else []
        self._attended = dict(known._attended) if known else {}
        with preserve_model_state(model), passive(model, self.settings):
            for index in range(len(targets), len(self)):
                with name_batch(number_of[index], self.loss) if number_of else nullcontext():
                    targets.append(self._target(model, index))
        finite = [torch.tensor(math.isfinite(t)) if isinstance(t, float) else self.kind.is_finite(t) for t in targets]
        known_finite = torch.stack([one.to(finite[0].device) for one in finite])  # with one wait for all
        if bad := known_finite.logical_not().nonzero().flatten().tolist():
            where = f"batch {number_of[bad[0]]} of the data or reference" if number_of else "a batch of the gauge"
            raise NonFiniteError(f"the outputs or the loss on {where} are not finite; {LEAVE_OUT}")
        self.targets = targets

    def split(self, rows: int) -> "Gauge":
        """Return the same in batches of so many samples, the first ones of all batches first."""
        if self.whole or not self.kind.splits:
            return self
        batches, targets = list[Any](), list[Stored | float]()
        for start in range(0, max(map(samples_of, self.batches)), rows):
            for batch, target in zip(self.batches, self.targets, strict=True):
                part = slice(start, min(start + rows, samples_of(batch)))
                if part.start < part.stop and not isinstance(target, float):
                    batches.append(rows_of(batch, part))
                    targets.append(_rows_of_stored(target, part, samples_of(batch)))
        parts = Gauge(batches, self.loss, self.outputs, self.kind)
        parts.targets, parts.settings = targets, self.settings
        return parts

    @torch.no_grad()
    def measure(self, model: nn.Module, indices: Sequence[int] | None = None) -> Measurement:
        """Return how far a model is from what was recorded, on all batches or on those with these indices."""
        return ratio_of_sums(*self.sums_and_counts(model, range(len(self)) if indices is None else indices).tolist())

    @torch.no_grad()
    def sums_and_counts(self, model: nn.Module, indices: Sequence[int]) -> Tensor:
        """Return the terms of some batches, (2, samples), on the model's device, without waiting for it."""
        with preserve_model_state(model), passive(model, self.settings):
            return torch.cat([torch.stack(self.terms(model, index)) for index in indices], 1)

    def terms(self, model: nn.Module, index: int) -> tuple[Tensor, Tensor]:
        """Return the sum over the predictions of each sample of a batch, and their numbers; with a gradient if enabled.

        With a loss the whole batch is one sample.
        """
        target = self.targets[index]
        if isinstance(target, float):
            rise = (scalar_loss(self.loss, model, self.batches[index], self.outputs) - target).double().reshape(1)
            return rise, torch.ones_like(rise)
        batch = self._on_device(model, index)
        outputs = self._outputs_on(model, batch)
        target = self.targets[index] = _stored_on(target, device_of(model))
        divergence = self.kind.divergence(target, outputs)
        counted = self._counted(model, index, batch, outputs)
        if counted is None:
            sums = divergence.double().sum(1)
            return sums, torch.full_like(sums, float(divergence.shape[1]))
        counted = counted.view_as(divergence)
        return torch.where(counted, divergence, 0.0).double().sum(1), counted.double().sum(1)

    @contextmanager
    def passes(self, model: nn.Module) -> Iterator[None]:
        """Prepare a model for passes on the batches that leave nothing behind: no buffers, counters or hidden states.

        Only models of which a pass was seen to change something pay for that.
        """
        if self._leaves_traces is False:
            with passive(model, self.settings):
                yield
            return
        with preserve_model_state(model), passive(model, self.settings):
            before = traces_of(model)
            yield
            self._leaves_traces = bool(self._leaves_traces) or traces_of(model) != before

    @torch.no_grad()
    def warn_of_probabilities(self, model: nn.Module) -> None:
        """Warn if the divergence is measured and the model returns probabilities instead of logits."""
        if self.loss is None and isinstance(self.kind, Classes | Labels):
            with preserve_model_state(model), passive(model, self.settings):
                outputs = self._outputs_on(model, self._on_device(model, 0))
            (warn_of_probabilities if isinstance(self.kind, Classes) else warn_of_coins)(outputs)

    def _target(self, model: nn.Module, index: int) -> Stored | float:
        if self.loss is None:
            batch = self._on_device(model, index)
            outputs = self._outputs_on(model, batch)
            self._counted(model, index, batch, outputs)
            return self.kind.store(outputs)
        return float(scalar_loss(self.loss, model, self.batches[index], self.outputs))

    def _on_device(self, model: nn.Module, index: int) -> Any:
        """Return a batch on the model's device, where it is kept if there is room."""
        device = device_of(model)
        if self._placed is None or self._placed[0] != device:
            mixed = self.batches if isinstance(self.batches, MixedBatches) else None
            own = placed(mixed.own if mixed else self.batches, device)
            self._placed = device, MixedBatches(own, mixed.rounds) if mixed else own
        return to_device(self._placed[1][index], device)

    def _outputs_on(self, model: nn.Module, batch: Any) -> Any:
        """Return the outputs on a batch; labels are left out if they change nothing but cost the model's own loss."""
        find = self.outputs or self.kind.find
        if self._drops_labels is None:
            self._drops_labels = ignores_labels(model, batch, find)
        try:
            outputs = outputs_on(model, without_labels(batch) if self._drops_labels else batch, find)
        except RuntimeError as error:
            if not self.targets or isinstance(error, torch.OutOfMemoryError):
                raise
            raise MooringError(
                f"the model does not take the data or reference any more ({first_line(error)}): change its layers or "
                "its dtype, as in model.to(dtype), before attach"
            ) from error
        self.kind.check(outputs)
        return outputs

    def _counted(self, model: nn.Module, index: int, batch: Any, outputs: Any) -> Tensor | None:
        """Return which predictions of a batch count, on the model's device; None if all do."""
        if index not in self._attended:
            counted = attended(model, batch, self.kind.predictions(outputs))
            self._attended[index] = None if counted is None or bool(counted.all()) else counted
        counted = self._attended[index]
        if counted is None:
            return None
        counted = self._attended[index] = counted.to(device_of(model))
        return counted


def _rows_of_stored(stored: Stored, part: slice, samples: int) -> Stored:
    """Return what is stored of some of so many samples, each of which has as many predictions."""
    return map_stored(stored, lambda t: t.view(samples, -1, *t.shape[1:])[part].flatten(0, 1))


def _stored_on(stored: Stored, device: torch.device) -> Stored:
    """Return what is stored on a device."""
    if isinstance(stored[0], Tensor) and stored[0].device == device:
        return stored
    return map_stored(stored, lambda t: t.to(device))


def map_stored(stored: Stored, change: Callable[[Tensor], Tensor]) -> Stored:
    """Return what is stored with each of its tensors changed."""
    return tuple(map_tensors(part, change) for part in stored)


def make_gauge(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss | None,
    outputs: Outputs | None,
    number_of: Sequence[int] = (),
    *,
    kind: OutputKind | None = None,
    whole: bool = False,
) -> Gauge:
    """Return a gauge with the present predictions: the divergence, or the rise of a loss that is given.

    Without a loss and a kind, the rise of the default one is measured if the model's outputs are not found.
    """
    gauge = Gauge(batches, loss, outputs, kind, whole=whole)
    if loss is not None or kind is not None:
        gauge.record(model, number_of=number_of)
        return gauge
    try:
        gauge.record(model, number_of=number_of)
    except MooringError as error:
        if error.__cause__ is not None:  # the model failed, and its outputs are not the reason
            raise
        labelled = []
        with preserve_model_state(model):
            for seed, batch in enumerate(batches):
                with name_batch(number_of[seed], loss) if number_of else nullcontext():
                    labelled.append(prepare_labels(model, batch, seed, outputs))
        gauge = Gauge(labelled, partial(default_loss, outputs=outputs), outputs, whole=whole)
        gauge.record(model, number_of=number_of)
    return gauge


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, whose own forward pass would prepare for a reduction."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
