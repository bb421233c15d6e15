"""`ParameterState`, the state of one moored parameter."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mooring.curvature.kronecker_factors import KroneckerFactors
from mooring.distributed.dtensor import local_tensor, sharded
from mooring.rules import State
from mooring.state.quantization import QuantizedImportance


def compute_dtype_of(tensor: Tensor) -> torch.dtype:
    """Return float32, or the tensor's own dtype if wider.

    Example:
        >>> compute_dtype_of(torch.ones(1, dtype=torch.bfloat16))
        torch.float32
    """
    return torch.promote_types(tensor.dtype, torch.float32)


@dataclass
class ParameterState:
    """The state of one moored parameter; of a sharded one, of the part on this rank.

    In a fleet the parameter is that of many runs, and every tensor has a leading run axis.

    Attributes:
        name: the parameter's name in the model.
        parameter: the live parameter.
        anchor: its value at the end of the last task, or where this one began; in host memory if so configured.
        importance_state: the importance's tensors on this task, `current` among them; empty where none are kept.
        previous: the importance over past tasks; None before the first consolidation, which counts as 0.
        count: the iterations of this task in which the parameter had a gradient.
        factors: the Kronecker factors of its curvature, where it has those instead of scores.
        runs: whether there is a leading run axis.
        held_with: the state of the other factor, where a low-rank product is held and not the parameter by itself; that
            of B has the factors of both.
        unheld_reason: why nothing holds the parameter, where that is known; read only while nothing does.
        outputs: the number of rows that are in use, if a fleet's head has further ones for later tasks; None for all.
        staged: the anchor on the parameter's device, while an offloaded anchor is there.
        dtype, shape: those of the parameter when the dtype to compute in was chosen.
        compute_dtype: the dtype to compute in: the wider of the parameter's and the anchor's, at least float32.
    """

    name: str
    parameter: Tensor
    anchor: Tensor
    importance_state: State
    previous: Tensor | QuantizedImportance | None = None
    count: int = 0
    factors: KroneckerFactors | None = None
    runs: bool = False
    unheld_reason: str = ""
    outputs: int | None = None
    held_with: "ParameterState | None" = field(default=None, repr=False)
    staged: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.choose_dtype()

    def choose_dtype(self) -> None:
        """Choose the dtype to compute in."""
        self.dtype, self.shape = self.parameter.dtype, self.parameter.shape
        dtype = torch.promote_types(self.parameter.dtype, self.anchor.dtype)
        self.compute_dtype = torch.promote_types(dtype, torch.float32)

    @property
    def theta(self) -> Tensor:
        """The part of the parameter on this rank, which the rules change."""
        return local_tensor(self.parameter)

    @property
    def device_anchor(self) -> Tensor:
        """The anchor on the parameter's device."""
        return self.anchor.to(self.theta.device, non_blocking=True) if self.staged is None else self.staged

    @property
    def displacement(self) -> Tensor:
        """theta - anchor, in the dtype that scores are computed in."""
        return self.theta.to(self.compute_dtype) - self.device_anchor.to(self.compute_dtype)

    @property
    def has_previous(self) -> bool:
        """Whether anything is known of past tasks."""
        if self.is_product_input:
            assert self.held_with is not None
            return self.held_with.has_previous
        return self.previous is not None if self.factors is None else self.factors.tasks > 0

    @property
    def is_product_input(self) -> bool:
        """Whether this is the A of a product that is held; its B has the factors."""
        return self.held_with is not None and self.factors is None

    @property
    def has_scores(self) -> bool:
        """Whether this task is known by scores: of a parameter with factors, while its layer was not observed."""
        if self.factors is None:
            return self.held_with is None  # the A of a product has none
        return not self.runs and "current" in self.importance_state and self.importance_state["current"].ndim > 0

    @property
    def knows_task(self) -> bool:
        """Whether an importance of the present task is kept."""
        return bool(self.importance_state if self.factors is None or self.has_scores else self.factors.count)

    @property
    def size(self) -> int:
        """The number of weights, of one run."""
        return self.parameter.numel() // (len(self.parameter) if self.runs else 1)

    def previous_tensors(self) -> State:
        """Return the importance over past tasks as it is stored, by slot."""
        if isinstance(self.previous, QuantizedImportance):
            return self.previous.slots()
        return {} if self.previous is None else {"previous": self.previous}

    def pull_tensors(self) -> State:
        """Return the tensors that a pull reads, without the importance on this task."""
        return {"theta": self.theta, "anchor": self.device_anchor, **self.previous_tensors()}

    def slots(self) -> State:
        """Return every tensor that is kept, by slot."""
        factors = self.factors.slots() if self.factors else {}
        return {"anchor": self.anchor, **self.importance_state, **factors, **self.previous_tensors()}

    def full(self, score: Tensor | QuantizedImportance | None) -> Tensor:
        """Return a score in the parameter's shape: 0 for None, a single number expanded."""
        if score is None:
            return torch.zeros_like(self.theta, dtype=self.compute_dtype)
        values = score.values() if isinstance(score, QuantizedImportance) else score
        return values.expand_as(self.anchor)  # after `select_runs` the parameter has its old runs until it is bound

    def take_rows(self, old: "ParameterState") -> None:
        """Take over the rows of a state whose parameter had another number of rows; further rows stay free."""
        rows = len(self.anchor)
        copy_rows(old.anchor, self.anchor)
        self.count, self.unheld_reason = old.count, old.unheld_reason
        if old.factors:
            self.factors, self.importance_state = _resized_factors(old.factors, rows), old.importance_state
        for slot in () if old.factors else self.importance_state.keys() & old.importance_state.keys():
            copy_rows(old.importance_state[slot], self.importance_state[slot])
        if isinstance(old.previous, QuantizedImportance):
            self.previous = QuantizedImportance(*(_resized(tensor, rows) for tensor in old.previous.slots().values()))
        elif old.previous is not None:
            self.previous = _resized(old.previous.expand(old.anchor.shape), rows)

    def select_runs(self, rows: Tensor, arrange: Callable[[Tensor], Tensor]) -> None:
        """Keep only the runs in these rows, in this order.

        Args:
            rows: int64, on the device.
            arrange: puts a tensor into the memory format of the fleet.
        """
        assert not isinstance(self.previous, QuantizedImportance)
        self.anchor = arrange(self.anchor[rows])
        self.importance_state = {slot: arrange(tensor[rows]) for slot, tensor in self.importance_state.items()}
        self.previous = None if self.previous is None else arrange(self.previous[rows])
        if self.factors:
            self.factors.select_runs(rows)


def keeps_rows(old: Tensor, new: Tensor) -> bool:
    """Return whether a parameter that replaces another one begins with its values, as a resized embedding does.

    Example:
        >>> old = torch.arange(6.0).view(3, 2)
        >>> keeps_rows(old, torch.cat([old, torch.ones(2, 2)])), keeps_rows(old, torch.ones(3, 2))
        (True, False)
    """
    if sharded(old) or sharded(new) or old.ndim != new.ndim or not new.ndim:
        return False
    if old.shape[1:] != new.shape[1:] or (old.dtype, old.device) != (new.dtype, new.device):
        return False
    rows = min(len(old), len(new))
    return torch.equal(old[:rows], new[:rows])


def copy_rows(source: Tensor, target: Tensor) -> Tensor:
    """Copy the rows that both have into `target`, and return it; a single number is copied as it is.

    Example:
        >>> copy_rows(torch.tensor([1.0, 2.0]), torch.zeros(3))
        tensor([1., 2., 0.])
    """
    if source.ndim:
        rows = min(len(source), len(target))
        target[:rows] = source[:rows]
    else:
        target.copy_(source)
    return target


def _resized(tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor with another number of rows; new rows are 0."""
    return copy_rows(tensor, tensor.new_zeros(rows, *tensor.shape[1:]))


def _resized_factors(factors: KroneckerFactors, rows: int) -> KroneckerFactors:
    """Return factors for another number of outputs."""
    outputs, past_outputs = (
        _resized(_resized(matrix, rows).mT, rows).mT.contiguous() for matrix in (factors.outputs, factors.past_outputs)
    )
    new = replace(factors, outputs=outputs, past_outputs=past_outputs, basis=None)
    new.update_eigenbasis()
    return new
