"""Reads a saved state for a model, and refuses one that does not fit, before anything is changed."""

import warnings
from typing import Any

from torch import Tensor

from mooring.checkpoint import check_keys, unpack_header, unpack_parameter
from mooring.errors import MooringError
from mooring.importance import State
from mooring.ledger import Ledger, Moored
from mooring.pulls import Pull
from mooring.selection import norm_buffers

__all__ = ["called", "read_state"]


def called(pull: Pull) -> str:
    """A pull with its options, where it says them; else the name of its class.

    Example:
        >>> from mooring.pulls import Proximal
        >>> called(Proximal(3.0))
        'Proximal(strength=3.0)'
    """
    name = type(pull).__name__
    return repr(pull) if repr(pull).startswith(f"{name}(") else name


def read_state(state: State, ledger: Ledger, pull: Pull) -> tuple[dict[str, Any], dict[Tensor, Moored], State]:
    """What a state says: its header, the records of parameters, and the anchors of normalisation statistics.

    Args:
        state: as `Mooring.state_dict` gave it.
        ledger: of the model that is to go on from it; it is left as it is.
        pull: what it is to go on with; one of another kind than it was made with is warned of.
    """
    header = unpack_header(state)
    if header["importance"] != ledger.importance.name:
        raise MooringError(
            f"the state was made by importance {header['importance']}, this Mooring has {ledger.importance.name}"
        )
    made_with, mine = header.get("pull", ""), called(pull)
    if made_with and made_with.partition("(")[0] != mine.partition("(")[0]:
        warnings.warn(
            f"the state was made with {made_with}, this Mooring has {mine}: "
            f"unless you mean to change that, give attach pull={made_with}",
            stacklevel=3,
        )
    ledger.refresh()
    by_name = {name: p for p, name in ledger.names.items()}
    saved = {*header["moored"], *header["counts"]}
    only_state, only_model = saved - by_name.keys(), by_name.keys() - saved
    if only_state or only_model:
        raise MooringError(
            f"the state does not fit: only in the state {sorted(only_state)}, only in the model "
            f"{sorted(only_model)}; build the model, its heads and exclude= as they were when it was saved"
        )
    records: dict[Tensor, Moored] = {}
    memory, unread = ledger.memory, set[str]()
    for name, count in header["counts"].items():
        p = by_name[name]
        fresh = ledger.fresh(p, header["tasks"])
        if not memory.accumulates and not fresh.factor:
            started = ledger.started(p, header["tasks"])
            if count and not header["steps"] and f"current.{name}" in state:
                fresh.state = started  # estimated, and not yet consolidated
            unread |= started.keys()
        accumulates = header.get("accumulates", True)
        records[p] = unpack_parameter(state, fresh, count, memory, accumulates=accumulates)
        if factor := records[p].factor:
            factor.looks, factor.tasks = header["factors"][name]
            factor.turn()
    check_keys(state, records.values(), unread)
    known = norm_buffers(ledger.model, ledger.exclude, ledger.held())
    buffers = {key.removeprefix("buffer."): t for key, t in state.items() if key.startswith("buffer.")}
    for name, tensor in buffers.items():
        if name not in known or tensor.shape != known[name].shape:
            raise MooringError(f"the state does not fit: the model has no buffer {name!r} of that shape")
    return header, records, {name: t.to(known[name], copy=True) for name, t in buffers.items()}
