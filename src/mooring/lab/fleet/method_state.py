"""The moorings of those runs of a fleet that share a method: the core's importance and pull over a run axis."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from mooring.diagnose.stability import Verdicts, divergence_limit, interpolation_weight, tallies
from mooring.importance import Iteration, State
from mooring.importance.kronecker_factors import Factor, Factors
from mooring.lab.fleet.budget_terms import KroneckerTerm, Line, pull_back, spent
from mooring.lab.fleet.stack.stack import flatten_per_run, to_stack_layout
from mooring.lab.methods import Method
from mooring.lab.model.results import Stability
from mooring.pulls import Budget, GradientPull, ParameterPull, merges
from mooring.pulls.budget import budget_solved
from mooring.pulls.pull import acts
from mooring.pulls.run_axis import per_run
from mooring.state.selection import layer_of

__all__ = ["Moorings"]

Tensors = dict[str, Tensor]


@dataclass
class Held:
    """What is kept for one parameter of every run, each tensor with a leading run axis.

    Attributes:
        anchor: its values at the end of the last task.
        state: the importance's tensors on this task.
        previous: the importance over past tasks; None before the first consolidation.
        count: the iterations of this task in which it had a gradient.
        factor: the Kronecker factors of its curvature, where it has those instead of scores.
    """

    anchor: Tensor
    state: State
    previous: Tensor | None = None
    count: int = 0
    factor: Factor | None = None

    def slots(self) -> Tensors:
        """Every tensor by what it is."""
        kept = {"anchor": self.anchor, **self.state, **(self.factor.slots() if self.factor else {})}
        return kept if self.previous is None else {**kept, "previous": self.previous}

    @property
    def knows_the_past(self) -> bool:
        """Whether anything is known of past tasks."""
        return self.previous is not None if self.factor is None else self.factor.basis is not None


class Moorings:
    """Importance and pull of some neighbouring runs of a stack.

    The order within an iteration is that of `mooring.step.TrainingStep`; the rules are the core's own.

    Args:
        method: what the runs have in common.
        seeds: of each run.
        lr: of each run, of shape (runs,).
        strength: of each run, of shape (runs,); ignored where the method has none.
        names: the parameters to moor.
        layered: those of them whose curvature is known by its factors.
    """

    def __init__(
        self,
        method: Method,
        seeds: Sequence[int],
        lr: Tensor,
        strength: Tensor,
        names: list[str],
        layered: Collection[str] = (),
    ) -> None:
        assert method.importance is not None
        self.method = method
        self.importances = [method.importance(seed) for seed in seeds]
        self.importance = self.importances[0]
        self.kinds = [repr(importance) for importance in self.importances]  # many runs have theirs in common
        self.lr, self.strength, self.names, self.layered = lr, strength, names, layered
        self.pull = method.pull(strength)
        self.held: dict[str, Held] = {}
        self.mu = torch.zeros(len(lr), dtype=torch.float64, device=lr.device)
        self.tasks = 0
        self.steps = 0

    def __len__(self) -> int:
        return len(self.importances)

    @torch.no_grad()
    def adopt(self, parameters: Tensors, gradients: Tensors) -> None:
        """Anchor parameters that get their first gradient where they are."""
        for name in gradients:
            if name in self.names and name not in self.held:
                self.held[name] = self._fresh(name, parameters[name], self.tasks)

    @torch.no_grad()
    def forces(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        """What a penalty adds to the gradients of the parameters that have one and a past."""
        if not isinstance(self.pull, GradientPull):
            return {}
        return {
            name: self.pull.force(held.previous, parameters[name] - held.anchor, self.lr)
            for name, held in self.held.items()
            if name in gradients and held.previous is not None
        }

    def before(self, parameters: Tensors) -> Tensors:
        """The parameters before the optimizer's step, where the importance needs it."""
        return {name: parameters[name].clone() for name in self.held} if self.importance.needs_step else {}

    @torch.no_grad()
    def after(self, parameters: Tensors, gradients: Tensors, before: Tensors, probes: Tensors, samples: int) -> None:
        """Update the importance, then pull.

        Args:
            parameters: after the optimizer's step; changed in place by a pull.
            gradients: of the task's loss alone.
            before: what `before` gave.
            probes: the gradients of the importance's own function of the outputs, where it has one.
            samples: in the batch.
        """
        self.steps += 1
        due = [name for name in self.held if name in gradients]
        for name in due:
            held = self.held[name]
            if self.importance.watches == "outputs" and name not in probes:
                continue  # the outputs do not depend on it
            held.count += 1
            if held.factor:
                continue  # what it is worth was seen in its layer
            seen = Iteration(
                g=gradients[name],
                theta=parameters[name],
                anchor=held.anchor,
                before=before.get(name),
                probe=probes.get(name),
                samples=samples,
                count=held.count,
            )
            self.importance.update(held.state, seen)
        if not isinstance(self.pull, GradientPull) and self.tasks and acts(self.pull.every, self.steps):
            self.pull_back(parameters, due)

    @torch.no_grad()
    def pull_back(self, parameters: Tensors, names: Sequence[str]) -> None:
        """theta <- theta + rate * (anchor - theta) for these parameters, changed in place."""
        if isinstance(self.pull, Budget):
            self._spend(self.pull, parameters, names)
            return
        assert isinstance(self.pull, ParameterPull)
        factors = self._factors()
        for name in names:
            held = self.held.get(name)
            if held is not None and held.previous is not None:
                current = _scaled(held.state["current"], factors.get(layer_of(name)))
                parameters[name].lerp_(held.anchor, self.pull.rate(held.previous, current, self.lr))

    def _spend(self, budget: Budget, parameters: Tensors, names: Sequence[str]) -> None:
        """Keep every run within its budget; what parameters that did not move have spent is counted in."""
        known = [name for name, held in self.held.items() if held.knows_the_past]
        lines = {name: self._line(name, parameters[name]) for name in known}
        moved, rest = ([line for name, line in lines.items() if (name in names) == moves] for moves in (True, False))
        allowed: Tensor | float = budget.allowed(self.tasks)
        if rest:
            none = torch.zeros_like(self.mu)
            allowed = (allowed - spent(rest, none, none.bool())[0]).clamp(min=0)
        if moved:
            self.mu.copy_(budget_solved(lambda mu, done: spent(moved, mu, done), allowed, self.mu))
            pull_back(budget, moved, self.mu)

    def _line(self, name: str, theta: Tensor) -> Line:
        held = self.held[name]
        if held.factor is not None:
            return KroneckerTerm(theta, held.anchor, held.factor)
        assert held.previous is not None
        return Line(flatten_per_run(theta), flatten_per_run(held.anchor), flatten_per_run(held.previous))

    @torch.no_grad()
    def look(self, seen: Mapping[str, Factors]) -> None:
        """Add what layers showed in one iteration, to be counted by `looked`."""
        for layer, (inputs, outputs, sums) in seen.items():
            for name, told in ((f"{layer}.weight", (inputs, outputs)), (f"{layer}.bias", (None, sums))):
                if (held := self.held.get(name)) and held.factor:
                    held.factor.look(*told)

    def looked(self) -> None:
        """Count an iteration in which layers were looked at."""
        for held in self.held.values():
            if held.factor:
                held.factor.looks += 1

    @torch.no_grad()
    def consolidate(self, parameters: Tensors) -> None:
        """anchor <- parameter; previous <- merge(previous, current); a new task begins."""
        for name in self.names:
            if name not in self.held:
                self.held[name] = self._fresh(name, parameters[name], self.tasks)
        if isinstance(self.pull, ParameterPull) and self.pull.every == "task" and self.tasks:
            self.pull_back(parameters, [name for name, held in self.held.items() if held.count])
        factors = self._factors()
        self.tasks += 1
        self.steps = 0
        for name, held in list(self.held.items()):
            if held.factor:
                held.factor.consolidate()
                self.held[name] = replace(held, anchor=parameters[name].detach().clone(), count=0)
                continue
            previous = self._merged(held, factors.get(layer_of(name)))
            self.held[name] = replace(self._fresh(name, parameters[name], self.tasks), previous=previous)

    def _merged(self, held: Held, factor: Tensor | None) -> Tensor | None:
        if not held.count and self.importance.merges:
            return held.previous  # it had no gradient: what was known of it stands
        current = _scaled(held.state["current"], factor)
        if not self.importance.merges:
            return current
        merge = merges.resolve(self.method.merge)
        return merge(torch.zeros_like(current) if held.previous is None else held.previous, current)

    def _fresh(self, name: str, theta: Tensor, task: int) -> Held:
        """Anchored here. What an importance draws at random, each run draws by its own seed."""
        anchor = theta.detach().clone()
        if name in self.layered:
            none = torch.zeros(len(theta), *(1,) * (theta.ndim - 1), dtype=theta.dtype, device=theta.device)
            return Held(anchor, {"current": none}, factor=Factor.fresh(anchor, theta.dtype, runs=True))
        made: dict[str, State] = {}
        for kind, importance in zip(self.kinds, self.importances, strict=True):  # a start hangs on nothing else
            if kind not in made:
                made[kind] = importance.start(anchor[0], name=name, task=task)
        each = [made[kind] for kind in self.kinds]
        state = {slot: torch.stack([told[slot] for told in each]) for slot in each[0]}
        ones = (1,) * (theta.ndim - 1)  # a score that is one number for a whole parameter goes on doing so
        return Held(
            anchor, {slot: t.reshape(-1, *ones) if t.ndim == 1 else to_stack_layout(t) for slot, t in state.items()}
        )

    def _factors(self) -> Tensors:
        """A factor for the scores of each layer and run, where the importance is balanced."""
        if not self.importance.balances or not self.held:
            return {}
        sums: Tensors = {}
        sizes: dict[str, int] = {}
        for name, held in self.held.items():
            layer, score = layer_of(name), held.state["current"].expand_as(held.anchor).abs()
            score = score.reshape(len(self), -1).sum(1)
            sums[layer] = sums[layer] + score if layer in sums else score
            sizes[layer] = sizes.get(layer, 0) + held.anchor[0].numel()
        return dict(zip(sums, self.importance.factors(list(sums.values()), list(sizes.values())), strict=True))

    def keep(self, rows: Tensor) -> None:
        """Go on with these runs only."""
        self.importances = [self.importances[row] for row in rows.tolist()]
        self.kinds = [self.kinds[row] for row in rows.tolist()]
        self.lr, self.mu = self.lr[rows], self.mu[rows]
        self.strengthen(self.strength[rows])
        for held in self.held.values():
            held.anchor = to_stack_layout(held.anchor[rows])
            held.state = {slot: to_stack_layout(tensor[rows]) for slot, tensor in held.state.items()}
            held.previous = None if held.previous is None else to_stack_layout(held.previous[rows])
            if held.factor:
                held.factor.keep(rows)

    def strengthen(self, strength: Tensor) -> None:
        """Go on with these strengths, of shape (runs,)."""
        self.strength = strength
        self.pull = self.method.pull(strength)

    # What the results tell

    def importance_by_layer(self) -> list[dict[str, float]]:
        """The mean importance over past tasks of each layer, for each run."""
        known = {name: held for name, held in self.held.items() if held.previous is not None}
        sums = _rows([_wide(held).sum(1, dtype=torch.float64) for held in known.values()], len(self))
        sizes: dict[str, int] = {}
        for name, held in known.items():
            sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + held.anchor[0].numel()
        found = []
        for mine in sums:
            total = dict.fromkeys(sizes, 0.0)
            for name, each in zip(known, mine, strict=True):
                total[layer_of(name)] += each
            found.append({layer: total[layer] / size for layer, size in sizes.items()})
        return found

    def stability(self, momenta: Sequence[float]) -> list[Stability | None]:
        """What the penalty of each run will do from here on; None where there is no penalty, or nothing to moor.

        Args:
            momenta: of the runs.
        """
        known = [held for held in self.held.values() if held.previous is not None]
        if not isinstance(self.pull, GradientPull) or not known:
            return [None] * len(self)
        limits = self.lr.new_tensor([_limit(momentum) for momentum in momenta])
        both = (self.lr.double() * self.strength.double()).to(self.lr.dtype)
        counts = torch.zeros(len(self), 5, dtype=torch.int64, device=self.lr.device)
        largest, per_strength = [], []
        for held in known:
            scores = _wide(held)
            p = interpolation_weight(both, 1.0, scores)
            counts += tallies(p, limits)
            largest.append(p.amax(1))
            per_strength.append((per_run(self.lr, scores) * scores).amax(1))
        most = torch.stack([torch.stack(each).amax(0) for each in (largest, per_strength)], 1).tolist()
        return [
            Stability(
                task=self.tasks,
                largest=p,
                safe_strength=1 / each if each > 0 else float("inf"),
                **asdict(Verdicts(*mine)),
            )
            for (p, each), mine in zip(most, counts.tolist(), strict=True)
        ]


def _limit(momentum: float) -> float:
    """From which p on a penalty alone makes SGD diverge."""
    sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=momentum)
    return divergence_limit(sgd, sgd.param_groups[0])


def _wide(held: Held) -> Tensor:
    """The importance over past tasks with a score for each weight, of shape (runs, weights)."""
    assert held.previous is not None
    return held.previous.expand_as(held.anchor).reshape(len(held.anchor), -1)


def _rows(columns: list[Tensor], runs: int) -> list[list[float]]:
    """The numbers of each run, from those of all runs."""
    return torch.stack(columns, 1).tolist() if columns else [[]] * runs


def _scaled(score: Tensor, factor: Tensor | None) -> Tensor:
    """A score times its layer's factor of each run."""
    return score if factor is None else score * factor.reshape(-1, *(1,) * (score.ndim - 1))
