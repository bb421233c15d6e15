"""A measured value with its standard error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


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
