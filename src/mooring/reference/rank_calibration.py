"""Calibration of a budget on several ranks: each computes the factor from the batches of all of them."""

from typing import Any

from torch import nn

from mooring.distributed.collectives import one_process, world_size
from mooring.distributed.dtensor import mesh_of
from mooring.errors import MooringError
from mooring.reference.batches import Data
from mooring.reference.calibration import calibration_factor
from mooring.reference.preserve_model_state import preserve_model_state
from mooring.reference.rank_shares import RankShare, gather_objects, stop_together
from mooring.rules.budget import Budget
from mooring.state.mooring_state import MooringState


class EqualData(list[Any]):
    """Batches that every rank has already, so that none is to be shared out."""


def check_calibratable(model: nn.Module) -> None:
    """Refuse a sharded model, whose displaced parameters no rank has whole.

    Example:
        >>> check_calibratable(nn.Linear(2, 2))
    """
    if mesh_of(model.parameters()) is not None:
        raise MooringError(
            "data cannot calibrate a Budget under fully_shard, because no rank has whole parameters: calibrate in one "
            "process and load its state_dict() on every rank, or use a Proximal or Interpolation pull"
        )


def calibrate_on_all_ranks(
    states: MooringState, budget: Budget, data: Data, *, batches: int | None = None, **options: Any
) -> float:
    """Return `calibration_factor`, on several ranks from the batches of all of them.

    Every rank evaluates all batches, as one process would. They are few, and displaced parameters are not to be sent.

    Args:
        states: the states of the moored parameters.
        budget: the budget.
        data: batches; each rank reads its share, unless they are `EqualData`.
        batches: the largest number of batches to read; None reads all.
        options: further arguments of `calibration_factor`.
    """
    if world_size() == 1:
        return calibration_factor(states, budget, data, batches=batches, **options)
    share = RankShare(states.model)
    if not isinstance(data, EqualData):
        with preserve_model_state(states.model, moves=False), share.computing(data):
            own = list(share.read(data, batches))
        data = EqualData(share.gather(own))
    error: Exception | None = None
    factor = 1.0
    try:
        with one_process():
            factor = calibration_factor(states, budget, data, **options | ({"show": False} if share.rank else {}))
    except Exception as raised:
        error = raised
    stop_together(error)
    return float(gather_objects(factor)[0])  # the same on all, although their hardware may round otherwise
