"""Measuring: gauges are batches with predictions of the original model, and a measurement is the distance from them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mooring.backends.eager import autocast_disabled
from mooring.distributed.dtensor import reshard
from mooring.errors import MooringError, NonFiniteError
from mooring.observe.output_observer import OutputObserver, class_dimension, find_outputs
from mooring.reference.batches import (
    LEAVE_OUT,
    Data,
    Loss,
    Outputs,
    default_loss,
    device_of,
    is_pair,
    name_batch,
    placed,
    rows_of,
    samples_of,
    scalar_loss,
    to_device,
)
from mooring.reference.divergence import StoredPredictions
from mooring.reference.mixtures import MixedBatches
from mooring.reference.preserve_model_state import (
    Settings,
    applied_settings,
    preserve_model_state,
    read_settings,
    without_caches,
)
from mooring.reference.rank_shares import RankShare
from mooring.reference.reference_labels import IGNORED_LABEL, prepare_labels, warn_of_probabilities

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

    def __str__(self) -> str:
        unit, counted = ("units of the loss", "batches") if self.by_loss else ("nats", "samples")
        return f"{self.nats:.3g} +- {self.standard_error:.2g} {unit} on {self.samples} {counted}"


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

    Without a loss a batch is measured by the divergence from the stored predictions; with one, by its rise.

    Args:
        batches: the batches, with labels where the loss needs them.
        loss: the mean loss on a batch; None for the divergence.
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.
    """

    def __init__(self, batches: Sequence[Any], loss: Loss | None = None, outputs: Outputs | None = None) -> None:
        self.batches = batches if isinstance(batches, MixedBatches) else list(batches)
        self.loss, self.outputs = loss, outputs
        self.targets: list[StoredPredictions | float] = []
        self.settings: Settings | None = None
        self._placed: tuple[torch.device, Sequence[Any]] | None = None
        self._drops_labels: bool | None = None

    def __len__(self) -> int:
        return len(self.batches)

    @torch.no_grad()
    def record(
        self,
        model: nn.Module,
        known: Sequence[StoredPredictions | float] = (),
        number_of: Sequence[int] = (),
    ) -> None:
        """Store what the model gives now; from here on the measured value is 0 until it moves.

        The model's settings, such as its head, are those that it had when this gauge was first recorded.

        Args:
            model: the model.
            known: what it gives for the first batches, if that was recorded elsewhere.
            number_of: the number of each batch in what the user gave, for error messages.
        """
        if self.settings is None:
            self.settings = read_settings(model)
        targets = list(known)
        with preserve_model_state(model), passive(model, self.settings):
            for index in range(len(known), len(self)):
                with name_batch(number_of[index], self.loss) if number_of else nullcontext():
                    targets.append(self._target(model, index))
        sums = [torch.tensor(t) if isinstance(t, float) else t.log_probabilities.sum() for t in targets]
        totals = torch.stack([total.to(sums[0].device, torch.float64) for total in sums])  # with one wait for all
        if bad := (totals.isnan() | totals.isposinf()).nonzero().flatten().tolist():
            where = f"batch {number_of[bad[0]]} of the data or reference" if number_of else "a batch of the gauge"
            raise NonFiniteError(f"the outputs or the loss on {where} are not finite; {LEAVE_OUT}")
        self.targets = targets

    def split(self, rows: int) -> "Gauge":
        """Return the same in batches of so many samples, the first ones of all batches first."""
        batches, targets = list[Any](), list[StoredPredictions | float]()
        for start in range(0, max(map(samples_of, self.batches)), rows):
            for batch, target in zip(self.batches, self.targets, strict=True):
                part = slice(start, min(start + rows, samples_of(batch)))
                if part.start < part.stop and isinstance(target, StoredPredictions):
                    batches.append(rows_of(batch, part))
                    targets.append(target.rows(part, samples_of(batch)))
        parts = Gauge(batches, self.loss, self.outputs)
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
        target = self.targets[index] = target.to(outputs.device)
        divergence = target.divergence(outputs).view(len(outputs), -1)
        counted = _counted(batch, outputs)
        if counted is None:
            sums = divergence.double().sum(1)
            return sums, torch.full_like(sums, float(divergence.shape[1]))
        counted = counted.to(divergence.device).view_as(divergence)
        return torch.where(counted, divergence, 0.0).double().sum(1), counted.double().sum(1)

    @torch.no_grad()
    def warn_of_probabilities(self, model: nn.Module) -> None:
        """Warn if the divergence is measured and the model returns probabilities instead of logits."""
        if self.loss is None:
            with preserve_model_state(model), passive(model, self.settings):
                warn_of_probabilities(self._outputs_on(model, self._on_device(model, 0)))

    def _target(self, model: nn.Module, index: int) -> StoredPredictions | float:
        if self.loss is None:
            return StoredPredictions.of(self._outputs_on(model, self._on_device(model, index)))
        return float(scalar_loss(self.loss, model, self.batches[index], self.outputs))

    def _on_device(self, model: nn.Module, index: int) -> Any:
        """Return a batch on the model's device, where it is kept if there is room."""
        device = device_of(model)
        if self._placed is None or self._placed[0] != device:
            mixed = self.batches if isinstance(self.batches, MixedBatches) else None
            own = placed(mixed.own if mixed else self.batches, device)
            self._placed = device, MixedBatches(own, mixed.rounds) if mixed else own
        return to_device(self._placed[1][index], device)

    def _outputs_on(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the outputs on a batch; labels are left out if they change nothing but cost the model's own loss."""
        if self._drops_labels is None:
            self._drops_labels = _ignores_labels(model, batch, self.outputs)
        return _outputs(model, _without_labels(batch) if self._drops_labels else batch, self.outputs)


def read_batches(model: nn.Module, data: Data, batches: int | None) -> list[Any]:
    """Read data, or call a function that makes it, and return the batches; the model does not change.

    On several ranks each reads its share, and all get the batches of all, in the order in which one process reads them.
    """
    share = RankShare(model)
    with preserve_model_state(model), share.computing(data):
        own = list(share.read(data, batches))
    return share.gather(own)


def make_gauge(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss | None,
    outputs: Outputs | None,
    number_of: Sequence[int] = (),
) -> Gauge:
    """Return a gauge with the present predictions: the divergence, or the rise of a loss that is given.

    Without a loss, the rise of the default one is measured if the model's outputs are no distribution.
    """
    gauge = Gauge(batches, loss, outputs)
    if loss is not None:
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
        gauge = Gauge(labelled, partial(default_loss, outputs=outputs), outputs)
        gauge.record(model, number_of=number_of)
    return gauge


@contextmanager
def passive(model: nn.Module, settings: Settings | None) -> Iterator[None]:
    """Put a model into eval mode, with these settings, for passes that are no part of training; restore both.

    Parameters that a pass left gathered are sharded again, because the next pass would not see that shards moved. The
    modules are listed once, and their modes are written as they are stored: there may be a thousand, in every step.
    """
    modules = dict(model.named_modules())
    training = [module.__dict__ for module in modules.values() if module.training]
    probing, OutputObserver.probing = OutputObserver.probing, True
    for attributes in training:
        attributes["training"] = False
    try:
        with autocast_disabled(), without_caches(modules.values()), applied_settings(modules, settings or {}):
            yield
    finally:
        reshard(modules.values())
        OutputObserver.probing = probing
        for attributes in training:
            attributes["training"] = True


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, whose own forward pass would prepare for a reduction."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _outputs(model: nn.Module, batch: Any, outputs: Outputs | None) -> Tensor:
    """Return the model's outputs on the inputs of a batch on its device."""
    inputs = batch[0] if is_pair(batch) or (isinstance(batch, tuple | list) and len(batch) == 1) else batch
    if not isinstance(inputs, Tensor | Mapping):
        raise MooringError(
            f"a batch of type {type(batch).__name__} cannot be measured: give (inputs, labels), inputs alone, or a "
            "loss(model, batch)"
        )
    returned = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    logits = (outputs or find_outputs)(returned)
    if logits.ndim < 2 or logits.shape[class_dimension(logits)] < 2:
        raise MooringError(
            f"outputs of shape {tuple(logits.shape)} are no distribution over classes, so their divergence cannot be "
            "measured: give a loss(model, batch), whose rise is measured instead"
        )
    return logits


def _without_labels(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    return {name: value for name, value in batch.items() if name != "labels"}


@torch.no_grad()
def _ignores_labels(model: nn.Module, batch: Any, outputs: Outputs | None) -> bool:
    """Return whether a mapping's labels change nothing but the loss; decoders of some models read them."""
    if not isinstance(batch, Mapping) or "labels" not in batch:
        return False
    with preserve_model_state(model):
        expected = _outputs(model, batch, outputs)
        try:
            return torch.equal(_outputs(model, _without_labels(batch), outputs), expected)
        except Exception:  # whatever a model raises that needs its labels
            return False


def _counted(batch: Any, outputs: Tensor) -> Tensor | None:
    """Return which predictions count: not those whose label is -100, or, if there are none, not padding."""
    parts = batch if isinstance(batch, Mapping) else batch[0] if is_pair(batch) else None
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch[1] if is_pair(batch) else None
    mask = parts.get("attention_mask") if isinstance(parts, Mapping) else None
    shape = outputs.select(class_dimension(outputs), 0).shape
    labelled = labels != IGNORED_LABEL if isinstance(labels, Tensor) and labels.shape == shape else None
    present = mask != 0 if isinstance(mask, Tensor) and mask.shape == shape else None
    if labelled is None or present is None:
        return present if labelled is None else labelled
    return torch.where(labelled.all(), present, labelled)
