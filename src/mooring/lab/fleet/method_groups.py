"""The runs of a fleet by method: neighbours in the stack, each group with its own importance and pull."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from mooring.importance.kronecker_factors import Factors
from mooring.lab.fleet.method_state import Moorings, Tensors
from mooring.lab.fleet.record import RunRecord
from mooring.lab.fleet.sgd import SGD
from mooring.lab.methods import find_method
from mooring.lab.model.order import seeded_generator
from mooring.lab.model.spec import RunSpec

__all__ = ["Groups", "rows_of"]


class Groups:
    """Which rows of a stack belong to which method.

    Args:
        specs: the runs, those of a method next to each other.
        names: the parameters to moor.
        lr: of each run, of shape (runs,).
        layered: the parameters whose curvature is known by its factors, where a method keeps those.

    Attributes:
        every: the rows of each method, with its moorings where it has any.

    Example:
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "explicit-ewc") for seed in (0, 1)]
        >>> [rows for rows, _ in Groups(specs, [], torch.ones(4)).moored]
        [slice(2, 4, None)]
    """

    def __init__(self, specs: Sequence[RunSpec], names: list[str], lr: Tensor, layered: Collection[str] = ()) -> None:
        self.every: list[tuple[slice, Moorings | None]] = []
        begin = 0
        for name, runs in groupby(specs, key=lambda spec: find_method(spec.method).name):
            mine, method = list(runs), find_method(name)
            rows = slice(begin, begin + len(mine))
            begin = rows.stop
            moorings = None
            if method.importance is not None:
                seeds, strength = [spec.seed for spec in mine], _strengths(mine, lr)
                moorings = Moorings(method, seeds, lr[rows], strength, names, layered)
            self.every.append((rows, moorings))

    @property
    def moored(self) -> list[tuple[slice, Moorings]]:
        """The groups whose method moors."""
        return [(rows, moorings) for rows, moorings in self.every if moorings is not None]

    def set_out(self, parameters: Tensors) -> None:
        """Before the first task: who holds on to the start drops anchor there, and never again."""
        for rows, moorings in self.moored:
            if moorings.method.anchors == "start":
                moorings.consolidate(rows_of(parameters, rows))

    def consolidate(self, parameters: Tensors) -> None:
        """A task is over: the others drop anchor here."""
        for rows, moorings in self.moored:
            if moorings.method.anchors == "last":
                moorings.consolidate(rows_of(parameters, rows))

    def asked(self, logits: Tensor, seeds: Sequence[int], step: int) -> Tensor:
        """What the importances ask of the outputs, of all runs together: the gradient of one does not reach another.

        Args:
            logits: of the whole stack, of shape (runs, batch, outputs).
            seeds: of the runs.
            step: the iteration, for importances that draw random numbers.
        """
        total = logits.new_zeros(())
        for rows, moorings in self.moored:
            if not moorings.importance.draws:  # a sum over samples, of whichever run
                total = total + moorings.importance.probe(logits[rows].flatten(0, 1), torch.Generator())
                continue
            for outputs, seed, importance in zip(logits[rows], seeds[rows], moorings.importances, strict=True):
                random = torch.Generator(logits.device).manual_seed(
                    seeded_generator(seed, "probe", step).initial_seed()
                )
                total = total + importance.probe(outputs, random)
        return total

    def look(self, seen: Mapping[str, Factors], fine: Tensor | None) -> None:
        """Tell those who ask what layers showed; their runs are then the whole stack.

        Args:
            seen: the factors of every layer.
            fine: which of the runs that they are of are still there; None for all.
        """
        if fine is not None:
            seen = {layer: (a[fine], g[fine], sums[fine]) for layer, (a, g, sums) in seen.items()}
        for _, moorings in self.moored:
            if moorings.importance.by_layer:
                moorings.look(seen)

    def looked(self) -> None:
        """Count an iteration in which layers were looked at."""
        for _, moorings in self.moored:
            moorings.looked()

    @torch.no_grad()
    def penalized(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        """The gradients that the optimizer gets: the task's, with penalties on the rows that have one."""
        loaded = dict(gradients)
        for rows, moorings in self.moored:
            own = rows_of(parameters, rows)
            moorings.adopt(own, gradients)
            for name, force in moorings.forces(own, gradients).items():
                if loaded[name] is gradients[name]:
                    loaded[name] = gradients[name].clone()
                loaded[name][rows].add_(force)
        return loaded

    @torch.no_grad()
    def advance(
        self, parameters: Tensors, gradients: Tensors, loaded: Tensors, probes: Tensors, samples: int, sgd: SGD
    ) -> None:
        """The optimizer's step, then each group's importance and pull.

        Args:
            parameters: of the whole stack; changed in place.
            gradients: of the task's loss alone.
            loaded: what `penalized` made of them.
            probes: the gradients of the importances' own functions of the outputs.
            samples: in the batch.
            sgd: of the whole stack.
        """
        before = [moorings.before(rows_of(parameters, rows)) for rows, moorings in self.moored]
        sgd.step(parameters, loaded)
        for (rows, moorings), kept in zip(self.moored, before, strict=True):
            own, seen = rows_of(gradients, rows), rows_of(probes, rows)
            moorings.after(rows_of(parameters, rows), own, kept, seen, samples)

    def keep(self, rows: Tensor) -> list[int]:
        """Go on with these runs, moved up, those of a method next to each other.

        Args:
            rows: where they are now, int64 on the CPU; a run may be there several times.

        Returns:
            Which groups are left, by their numbers until now.
        """
        left: dict[int, tuple[slice, Moorings | None]] = {}
        begin = 0
        for number, (span, moorings) in enumerate(self.every):
            mine = rows[(rows >= span.start) & (rows < span.stop)] - span.start
            if len(mine):
                if moorings is not None:
                    moorings.keep(mine.to(moorings.lr.device))
                left[number] = (slice(begin, begin + len(mine)), moorings)
                begin += len(mine)
        self.every = list(left.values())
        return list(left)

    def strengthen(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength that its spec says."""
        for rows, moorings in self.moored:
            moorings.strengthen(_strengths(specs[rows], moorings.lr))

    # What the results tell

    def judge(self, records: Sequence[RunRecord]) -> Tensor:
        """Write down what each penalty will do from here on.

        Args:
            records: of the runs.

        Returns:
            For each run whether its penalty extrapolates somewhere; bool of shape (runs,).
        """
        too_strong = torch.zeros(len(records), dtype=torch.bool)
        for rows, moorings in self.moored:
            found = moorings.stability([record.spec.momentum for record in records[rows]])
            for run, (record, verdict) in enumerate(zip(records[rows], found, strict=True), rows.start):
                if verdict:
                    record.stability.append(verdict)
                    too_strong[run] = bool(verdict.warning) and moorings.method.can_extrapolate
        return too_strong

    def importance_by_layer(self) -> list[dict[str, float]]:
        """The mean importance over past tasks of each layer, for each run; nothing where it moors nothing."""
        found: list[dict[str, float]] = []
        for rows, moorings in self.every:
            found += [{}] * (rows.stop - rows.start) if moorings is None else moorings.importance_by_layer()
        return found


def _strengths(specs: Sequence[RunSpec], like: Tensor) -> Tensor:
    return like.new_tensor([spec.strength or 0.0 for spec in specs])


def rows_of(tensors: Tensors, rows: slice) -> Tensors:
    """Some runs of each tensor, as views.

    Example:
        >>> rows_of({"weight": torch.zeros(4, 2)}, slice(1, 3))["weight"].shape
        torch.Size([2, 2])
    """
    return {name: tensor.detach()[rows] for name, tensor in tensors.items()}
