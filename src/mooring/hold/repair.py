"""The repair at the end of a task: back within the budget, while the model stays what it has become on the new task.

Where more is measured than the budget allows, both sides are trained against each other for a short time:

    v * KL(original || model) on distilled inputs of past tasks + KL(trained || model) on inputs of the last batches,

where `trained` is the model as training left it. No labels are needed. The optimizer is an Adam of its own, and v rises
while more than the budget is measured. Every run of a fleet has its own v and its own steps; a model is one run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.distributed.dtensor import reduce_over_shards
from mooring.hold.finish import move
from mooring.rules.pull import per_run
from mooring.state.parameter_state import compute_dtype_of

PLAIN_STEPS = 60
"""A repair passes at most as many samples through the model as so many plain training steps."""

MOST_STEPS = 100
"""The largest number of steps of a repair."""

ROUNDS = 5
"""The number of times that a repair measures, and adjusts v."""

PART_OF_BATCH = 1 / 4
"""The part of a training batch that each side of a step passes: more and noisier steps come farther than fewer."""

AIM = 0.85
"""The part of the budget that a repair aims at."""

LARGEST_CHANGE = 2.0
"""The largest factor by which one measurement changes v."""

FREEDOM = 4.0
"""How many times as far as a straight return to the budget a weight may go in a repair."""

WARM_UP = 5
"""The number of steps in which the rate rises, until the means of Adam are over several gradients."""

BETAS = 0.9, 0.98
"""The decays of the two means of Adam."""

EPSILON = 1e-8
"""What Adam adds to the root of the mean square, so that rounding errors of gradients that are 0 move nothing."""


@dataclass(frozen=True)
class RepairPlan:
    """How long a repair is.

    Attributes:
        rounds: how often it measures.
        steps: the number of steps in each round.
    """

    rounds: int
    steps: int

    @classmethod
    def within_limit(cls, batch: float, passed: float, gauge: int, recorded: int) -> "RepairPlan":
        """Return the longest repair within PLAIN_STEPS training steps, by the samples that pass through the model.

        A backward pass costs two forward passes.

        Args:
            batch: the samples of a training batch.
            passed: those of both sides of a step.
            gauge: those of all gauges.
            recorded: those whose outputs are recorded before.

        Example:
            >>> RepairPlan.within_limit(batch=32, passed=24, gauge=64, recorded=512)
            RepairPlan(rounds=5, steps=13)
        """
        forward = (recorded + ROUNDS * gauge) / (3 * batch)
        steps = (PLAIN_STEPS - forward) * batch / max(passed, 1)
        return cls(ROUNDS, max(1, min(int(steps), MOST_STEPS) // ROUNDS))

    def rate(self, step: int) -> float:
        """Return the factor of a step: rising during WARM_UP, falling linearly; its mean is about 1 / 2."""
        return min(1.0, (step + 1) / WARM_UP) * (1 - step / (self.rounds * self.steps))


@dataclass(frozen=True)
class Sides:
    """What a repair moves, and what it asks of a model or of the runs of a fleet.

    Attributes:
        parameters: what is moved: the parameters, or the parts on this rank.
        displacements: what training moved them.
        placed_like: the parameters, which say over which ranks they are sharded.
        runs: whether there is a leading run axis.
        gradients: (step, v of each run) -> the gradient of both sides, one for each parameter; None for 0.
        measure: returns what is measured now, (values, runs); the first row is limited.
        plan: how long it may take.
    """

    parameters: Sequence[Tensor]
    displacements: Sequence[Tensor]
    placed_like: Sequence[Tensor]
    runs: bool
    gradients: Callable[[int, Tensor], Sequence[Tensor | None]]
    measure: Callable[[], Tensor]
    plan: RepairPlan


def part_of_batch(samples: int) -> int:
    """Return the number of samples that the new side of a step passes.

    Example:
        >>> part_of_batch(32), part_of_batch(1)
        (8, 1)
    """
    return math.ceil(PART_OF_BATCH * samples)


def repair(sides: Sides, over: Tensor, named: Tensor, measured: Tensor, weight: Tensor) -> Tensor:
    """Move runs to where their budget is kept, or as near to it as the plan allows.

    After each round a run that is worse than before goes back, and continues with half of the rate.

    Args:
        sides: what to move.
        over: which runs to repair, bool of shape (runs,).
        named: the budget of each run.
        measured: what was measured before, (values, runs).
        weight: the first v of each run.

    Returns:
        What is measured at the end.
    """
    first = measured[0].nan_to_num(math.inf, posinf=math.inf)
    best, kept, step = [p.clone() for p in sides.parameters], ~over, 0
    optimizer, plan = RepairOptimizer(sides), sides.plan
    distance = 1 - (AIM * named / first).sqrt().clamp(0, 1)
    rate = torch.where(over, 2 * FREEDOM * distance / (plan.rounds * plan.steps), 0.0)
    for _ in range(plan.rounds):
        for _ in range(plan.steps):
            optimizer.step(sides.gradients(step, weight), plan.rate(step) * rate)
            step += 1
        now = sides.measure()
        value, least = (row.nan_to_num(math.inf, posinf=math.inf) for row in (now[0], measured[0]))
        keeps = over & (value <= named)
        better = keeps | (over & ~kept & (value < least))
        move(best, sides.parameters, better)
        measured, kept = torch.where(better, now, measured), kept | keeps
        change = (value / (AIM * named)).sqrt().clamp(1 / LARGEST_CHANGE, LARGEST_CHANGE)
        weight = torch.where(named > 0, weight * change, weight)
        if bool((worse := over & ~better & ~kept).any()):
            optimizer.go_back(best, worse)
            rate = torch.where(worse, rate / 2, rate)
    move(sides.parameters, best, over)
    return measured


class RepairOptimizer:
    """Adam, whose steps are parts of the root mean square of what training moved each tensor in each run."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        dtypes = [compute_dtype_of(p) for p in sides.parameters]
        self.values = [p.to(dtype) for p, dtype in zip(sides.parameters, dtypes, strict=True)]
        self.means, self.squares = ([torch.zeros_like(value) for value in self.values] for _ in range(2))
        self.sizes, self.count = self._root_mean_squares(), 0

    def _root_mean_squares(self) -> list[Tensor]:
        """Return the root mean square of each displacement, of shape () or (runs,)."""
        sums = []
        for d in self.sides.displacements:
            total = d.double().square().flatten(1).sum(1) if self.sides.runs else d.double().square().sum()
            sums.append(torch.stack([total, torch.full_like(total, d.numel() / max(1, total.numel()))]))
        totals = reduce_over_shards(sums, self.sides.placed_like)
        return [(total / numbers.clamp(min=1)).sqrt() for total, numbers in totals]

    def step(self, gradients: Sequence[Tensor | None], rate: Tensor) -> None:
        """Take a step; `rate` multiplies the steps of each run."""
        self.count += 1
        first, second = BETAS
        corrections = 1 - first**self.count, 1 - second**self.count
        rate = rate if self.sides.runs else rate.squeeze()
        for index, g in enumerate(gradients):
            if g is None:
                continue
            value, mean, square = self.values[index], self.means[index], self.squares[index]
            g = g.to(value.dtype)
            mean.lerp_(g, 1 - first)
            square.mul_(second).addcmul_(g, g, value=1 - second)
            size = (self.sizes[index] * rate.to(value.device)).to(value.dtype)
            value.sub_(per_run(size, value) * (mean / corrections[0]) / ((square / corrections[1]).sqrt() + EPSILON))
            if value is not self.sides.parameters[index]:
                self.sides.parameters[index].copy_(value)

    def go_back(self, places: Sequence[Tensor], runs: Tensor) -> None:
        """Set the parameters of these runs, and forget their means of gradients."""
        move(self.sides.parameters, places, runs)
        move(self.values, self.sides.parameters, runs)
        for means in (self.means, self.squares):
            move(means, [torch.zeros_like(mean) for mean in means], runs)
