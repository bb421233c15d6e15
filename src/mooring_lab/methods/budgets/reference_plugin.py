"""The reference as a plugin: samples of past tasks that are measured, distilled, or both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.hold.distil import WeightedDistillation, distilled_parts, mixture_rounds
from mooring.hold.recent_inputs import KEPT_BATCHES
from mooring.hold.repair import RepairPlan, Sides, part_of_batch
from mooring.reference.batches import split_reference
from mooring.reference.kinds import Classes
from mooring.rules import Budget
from mooring.rules.pull import per_run
from mooring_lab.fleet.learner_plugin import EpochPlan, LearnerPlugin, PluginState, Step, Tensors
from mooring_lab.fleet.method_state import rows_of
from mooring_lab.methods.budgets import ReferenceOptions
from mooring_lab.methods.budgets.kept_samples import KeptSamples
from mooring_lab.methods.budgets.run_budgets import RunBudgets
from mooring_lab.model.order import batch_sizes
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class ReferencePlugin(LearnerPlugin):
    """A memory with an equal share for each past task: its first samples in each run's order.

    With a budget the share is divided as `Mooring.consolidate(data=...)` divides data, the product's controller says
    what is done about it, and all runs have one method. Without one, one batch after the other is distilled, and the
    weight is the run's strength.

    Args:
        options: of the method.
        specs: the runs.
        fleet: of the runs.

    Attributes:
        share: the number of samples of a past task.
        distilled: the samples that are distilled.
        gauge: the samples that are measured.
        budgets: the measured budgets; None if nothing is measured.
        factors: the weight of the added gradient in the present step, float64 of shape (runs,).
    """

    options: ReferenceOptions

    def __init__(self, options: ReferenceOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        super().__init__(options, specs, fleet)
        tasks, memory = max(1, len(fleet.stream.tasks) - 1), specs[0].memory or 0
        self.share, self.batch = memory // tasks, specs[0].batch
        if not self.share:
            raise MooringError(
                f"a memory of {memory} is less than one sample for each of {tasks} past tasks: give {specs[0].method} "
                f"memory={tasks} or more"
            )
        self.gauge = KeptSamples(fleet.training_data, len(specs))
        self.distilled = KeptSamples(fleet.training_data, len(specs))
        self.budgets: RunBudgets | None = None
        self.factors = torch.zeros(0)
        self.set_strengths(specs)
        if options.measures:
            ((_, state),) = fleet.groups.moored
            if not isinstance(state.pull, Budget):
                raise MooringError(
                    f"method {state.method.name!r} measures on a reference, and {type(state.pull).__name__} has no "
                    "budget to keep: give a pull such as lambda nats: Budget(nats), or no reference"
                )
            self.budgets = RunBudgets(self.gauge, state, fleet.stack)

    # Tasks

    def end_task(self, fleet: Fleet, task: int) -> None:
        """Estimate the importance, which training does not accumulate after an `attach`, and return runs to budgets."""
        if self.budgets is None:
            return
        ((rows, state),) = fleet.groups.moored
        state.bind(rows_of(fleet.stack.parameters, rows), fleet.groups.names)
        if self.options.attached and task + 1 < len(fleet.stream.tasks):
            order = fleet.training_data.epoch_order(fleet.specs, task, 0)
            self._estimate(fleet, task, self._split(order)[1])
        if self.gauge.sizes:
            if self.distilled.sizes:
                self.budgets.make_sides = lambda: self._sides(fleet, task)
            self.budgets.finish_runs()
            self.budgets.make_sides = None

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Keep samples of a task that ended, and store the predictions of every run on all kept samples."""
        if task + 1 == len(fleet.stream.tasks):
            return
        if self.budgets is None:
            self.distilled.add([*torch.split(order[:, : self.share], self.batch, 1)])
            self.distilled.record(fleet.stack)
            return
        budget, before = self.budgets.budget, self.budgets.distillation
        held_out, others = self._split(order)
        schedule = distilled_parts(nn.Identity(), budget, [batch.T for batch in others])
        if schedule is None:
            held_out = [*torch.split(order[:, : self.share], self.batch, 1)]
        else:
            parts, every = schedule
            self.distilled.add([part.T for part in parts], mixture_rounds(budget, sum(map(len, parts))))
            self.distilled.record(fleet.stack)
            every = max(every, before.every) if before else every
            self.budgets.distillation = WeightedDistillation(self.budgets.runs, every)
        self.gauge.add(held_out)
        self.gauge.record(fleet.stack)
        self.budgets.begin()

    def _split(self, order: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the batches that are measured and the others, each of shape (runs, samples)."""
        batches = [batch.T for batch in torch.split(order[:, : self.share], self.batch, 1)]  # whose rows are samples
        return tuple([part.T for part in parts] for parts in split_reference(batches))  # type: ignore[return-value]

    def _estimate(self, fleet: Fleet, task: int, batches: Sequence[Tensor]) -> None:
        """Replace the importance of the task by that on its reference, as `mooring.reference.estimation` does."""
        ((_, state),) = fleet.groups.moored
        state.restart_importance()
        for batch in batches:
            batch = batch.to(fleet.device)
            gradients = fleet.passes.gradients(fleet.passes.losses(batch, task, evaluate=True)[1].sum())
            state.update_importance(gradients, {}, {}, batch.shape[1])

    def _sides(self, fleet: Fleet, task: int) -> Sides:
        """Return what a repair moves, as `MeasuredBudget.sides` does of one model."""
        assert self.budgets is not None
        ((_, state),) = fleet.groups.moored
        names = [name for name, own in state.states.items() if own.count or own.factors]  # a GPU counts no factors
        known = [state.states[name] for name in names]
        kept = last_batches(fleet, task)
        samples = kept[0].shape[1]
        rows = part_of_batch(samples)
        splits = [torch.split(batch, rows, 1) for batch in kept]
        parts = [part[index] for index in range(max(map(len, splits))) for part in splits if index < len(part)]
        with torch.no_grad():
            logits = (fleet.passes.losses(part, task, evaluate=True)[0].flatten(0, 1) for part in parts)
            targets = [Classes().store(part) for part in logits]
        tasks, runs = self.distilled.batches, len(fleet.specs)
        old = sum(len(ranges[0]) for ranges in tasks) / len(tasks)
        batches = max(1, round(parts[0].shape[1] / old))

        def gradients(step: int, weight: Tensor) -> list[Tensor | None]:
            with torch.enable_grad(), fleet.groups.unobserved():
                new = parts[step % len(parts)]
                outputs = fleet.passes.losses(new, task, evaluate=True)[0].flatten(0, 1)
                value = Classes().divergence(targets[step % len(parts)], outputs).view(runs, -1).double().mean(1)
                for index in range(step * batches, (step + 1) * batches):
                    turn, number = divmod(index, len(tasks))
                    entries = torch.tensor([*tasks[number][turn % len(tasks[number])]], device=fleet.device)
                    divergence = self.distilled.divergence(fleet.stack, entries).double().mean(1)
                    value = value + weight.to(fleet.device) / batches * divergence
                by_name = fleet.passes.gradients(value.sum())
            return [by_name.get(name) for name in names]

        displacements = [one.theta - one.device_anchor.to(one.theta.dtype) for one in known]
        thetas = [one.theta for one in known]
        gauge, recorded = sum(map(sum, self.gauge.sizes)), sum(batch.shape[1] for batch in kept)
        plan = RepairPlan.within_limit(samples, batches * old + parts[0].shape[1], gauge, recorded)
        return Sides(thetas, displacements, thetas, True, gradients, self.budgets.measure_runs, plan)

    # Steps

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Choose the entries that each step distils."""
        if not self.distilled.sizes:
            return
        first, tasks = plan.epoch * len(plan.sizes), self.distilled.batches
        for step in range(first, first + len(plan.sizes)):
            plan.replayed.append(torch.tensor(self._entries(tasks, step)).expand(len(fleet.specs), -1))

    def _entries(self, tasks: list[list[range]], step: int) -> list[int]:
        if self.budgets is None:
            batches = [entries for ranges in tasks for entries in ranges]
            return [*batches[step % len(batches)]]
        assert self.budgets.distillation is not None
        turn = self.budgets.distillation.turn(step, [*map(len, tasks)])
        return [] if turn is None else [*tasks[turn[0]][turn[1]]]

    def start_step(self, fleet: Fleet, number: int) -> tuple[Hashable, ...]:
        """Act on the last measurement; statistics stay as they were where a reference was attached."""
        if self.options.attached and self.gauge.sizes:
            fleet.stack.freeze_norms(True)
        if self.budgets:
            self.budgets.settle()
            if (distillation := self.budgets.distillation) is not None:
                self.factors.copy_(distillation.factors(len(self.distilled.sizes)))
                distillation.task_norm = distillation.task_norm.to(fleet.device)  # before a step is recorded
        return ()

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Add the gradients of the divergence on kept samples; the curvature of layers does not see them."""
        if step.replayed is None or not step.replayed.shape[1]:
            return
        with fleet.groups.unobserved():
            divergence = self.distilled.divergence(fleet.stack, step.replayed[0])
            own = fleet.passes.gradients(divergence.double().mean(1).sum())
        gradients = step.gradients
        if self.budgets is None:  # one loss of both
            added = _scaled(own, self.factors)
            step.gradients = {**added, **{n: g + added[n] if n in added else g for n, g in gradients.items()}}
            return
        held = {name: g for name, g in own.items() if name in fleet.groups.names and name in gradients}
        if not held:
            return
        assert self.budgets.distillation is not None
        task_norms, own_norms = _norms([gradients[name] for name in held]), _norms([*held.values()])
        step.added = _scaled(held, self.budgets.distillation.limited(self.factors, task_norms, own_norms))

    def finish_step(self, fleet: Fleet, number: int) -> None:
        """Measure if it is due."""
        if self.budgets:
            self.budgets.after_step_of_runs(number + 1)

    # Which runs are in the fleet, and checkpoints

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        self.gauge.keep(rows)
        self.distilled.keep(rows)
        self.factors = self.factors[rows]
        if self.budgets:
            self.budgets.keep(rows)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        strengths = [spec.strength or 0.0 for spec in specs]
        self.factors = torch.tensor(strengths, dtype=torch.float64, device=self.gauge.indices.device)

    def state_dict(self) -> PluginState:
        """Return the kept samples and what was measured on them."""
        state = PluginState(values={"every": 0})
        for name, samples in (("gauge", self.gauge), ("distilled", self.distilled)):
            state.tensors |= {f"{name}.indices": samples.indices, f"{name}.predictions": samples.log_probabilities}
            state.values[name] = [samples.sizes, samples.rounds]
        if self.budgets:
            state.tensors |= self.budgets.tensors()
            state.values |= self.budgets.values()
            if self.budgets.distillation:
                state.values["every"] = self.budgets.distillation.every
        return state

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from these."""
        tensors = {name: tensor.to(fleet.device) for name, tensor in state.tensors.items()}
        for name, samples in (("gauge", self.gauge), ("distilled", self.distilled)):
            sizes, rounds = state.values[name]
            samples.load(sizes, rounds, tensors[f"{name}.indices"], tensors[f"{name}.predictions"])
        if self.budgets:
            if every := state.values["every"]:
                self.budgets.distillation = WeightedDistillation(self.budgets.runs, every)
            self.budgets.load(tensors, state.values)


def last_batches(fleet: Fleet, task: int) -> list[Tensor]:
    """Return the images of the last batches of a task that is over, each of shape (runs, samples)."""
    batches: list[Tensor] = []
    for epoch in reversed(range(fleet.common.epochs)):
        order = fleet.training_data.epoch_order(fleet.specs, task, epoch)
        sizes = batch_sizes(order.shape[1], fleet.common.batch)
        batches = [*torch.split(order, sizes, 1), *batches]
        if len(batches) >= KEPT_BATCHES:
            break
    return [batch.to(fleet.device) for batch in batches[-KEPT_BATCHES:]]


def _scaled(gradients: Tensors, factors: Tensor) -> Tensors:
    return {name: per_run(factors.to(g.dtype), g) * g for name, g in gradients.items()}


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each run's gradient over all parameters, float64 of shape (runs,)."""
    squares = [tensor.double().square().flatten(1).sum(1) for tensor in tensors]
    return torch.stack(squares).sum(0).sqrt()
