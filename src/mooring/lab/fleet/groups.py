"""The runs of a fleet by method: neighbours in the stack, each group with its own importance and pull."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from mooring.lab.fleet.moorings import Moorings, Tensors
from mooring.lab.fleet.sgd import SGD
from mooring.lab.methods import find
from mooring.lab.order import generator
from mooring.lab.spec import RunSpec

__all__ = ["Groups", "rows_of"]


class Groups:
    """Which rows of a stack belong to which method.

    Args:
        specs: the runs, those of a method next to each other.
        names: the parameters to moor.
        lr: of each run, of shape (runs,).

    Attributes:
        every: the rows of each method, with its moorings where it has any.

    Example:
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "explicit-ewc") for seed in (0, 1)]
        >>> [rows for rows, _ in Groups(specs, [], torch.ones(4)).moored]
        [slice(2, 4, None)]
    """

    def __init__(self, specs: Sequence[RunSpec], names: list[str], lr: Tensor) -> None:
        self.every: list[tuple[slice, Moorings | None]] = []
        begin = 0
        for name, runs in groupby(specs, key=lambda spec: find(spec.method).name):
            mine, method = list(runs), find(name)
            rows = slice(begin, begin + len(mine))
            begin = rows.stop
            moorings = None
            if method.importance is not None:
                strength = lr.new_tensor([spec.strength or 0.0 for spec in mine])
                moorings = Moorings(method, [spec.seed for spec in mine], lr[rows], strength, names)
            self.every.append((rows, moorings))

    @property
    def moored(self) -> list[tuple[slice, Moorings]]:
        """The groups whose method moors."""
        return [(rows, moorings) for rows, moorings in self.every if moorings is not None]

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
                random = torch.Generator(logits.device).manual_seed(generator(seed, "probe", step).initial_seed())
                total = total + importance.probe(outputs, random)
        return total

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

    def keep(self, kept: Tensor) -> None:
        """Go on with some of the runs only, moved up; kept is bool of shape (runs,)."""
        left: list[tuple[slice, Moorings | None]] = []
        for rows, moorings in self.every:
            mine = kept[rows].nonzero().flatten()
            if len(mine):
                if moorings is not None:
                    moorings.keep(mine.to(moorings.lr.device))
                begin = int(kept[: rows.start].sum())
                left.append((slice(begin, begin + len(mine)), moorings))
        self.every = left


def rows_of(tensors: Tensors, rows: slice) -> Tensors:
    """Some runs of each tensor, as views.

    Example:
        >>> rows_of({"weight": torch.zeros(4, 2)}, slice(1, 3))["weight"].shape
        torch.Size([2, 2])
    """
    return {name: tensor.detach()[rows] for name, tensor in tensors.items()}
