"""Reads a saved state for a model, and refuses one that does not fit, before anything is changed."""

import warnings
from typing import Any

from torch import Tensor

from mooring.errors import MooringError
from mooring.importance import State
from mooring.pulls import Pull
from mooring.state.mooring_state import MooringState, ParameterState, called
from mooring.state.selection import norm_buffers
from mooring.state.state_dict import check_keys, unpack_header, unpack_parameter

__all__ = ["read_state"]


AWAY = 0.01
"""Weights that are further from their anchors than this part of their norm are others, and not rounded ones."""


def read_state(
    state: State, states: MooringState, pull: Pull, buffers: str
) -> tuple[dict[str, Any], dict[Tensor, ParameterState], State]:
    """What a state says: its header, the records of parameters, and the anchors of normalisation statistics.

    Args:
        state: as `Mooring.state_dict` gave it.
        states: of the model that is to go on from it; it is left as it is.
        pull: what it is to go on with; one of another kind than it was made with is warned of.
        buffers: what is to become of normalisation statistics; warned of likewise.
    """
    header = unpack_header(state)
    if header["importance"] != states.importance.name:
        raise MooringError(
            f"the state was made by importance {header['importance']}, this Mooring has {states.importance.name}"
        )
    made_with, mine = header["pull"], called(pull)
    if made_with.partition("(")[0] != mine.partition("(")[0]:
        _warn_of_other("pull", made_with, mine)
    own = {**states.told(), "buffers": buffers}
    for option, name in (("options", "importance"), ("merge", "merge"), ("buffers", "buffers")):
        if header[option] != own[option]:
            _warn_of_other(name, header[option], own[option])
    states.refresh()
    by_name = {name: p for p, name in states.names.items()}
    saved = {*header["moored"], *header["counts"]}
    only_state, only_model = saved - by_name.keys(), by_name.keys() - saved
    if only_state or only_model:
        raise MooringError(
            f"the state does not fit: only in the state {sorted(only_state)}, only in the model "
            f"{sorted(only_model)}; build the model, its heads and exclude= as they were when it was saved"
        )
    records: dict[Tensor, ParameterState] = {}
    memory, unread = states.memory, set[str]()
    for name, count in header["counts"].items():
        p = by_name[name]
        fresh = states.fresh(p, header["tasks"])
        if not memory.accumulates and not fresh.factor:
            started = states.started(p, header["tasks"])
            if count and not header["steps"] and f"current.{name}" in state:
                fresh.state = started  # estimated, and not yet consolidated
            unread |= started.keys()
        accumulates = header.get("accumulates", True)
        records[p] = unpack_parameter(state, fresh, count, memory, accumulates=accumulates)
        if factor := records[p].factor:
            factor.looks, factor.tasks = header["factors"][name]
            factor.turn()
    check_keys(state, records.values(), unread)
    if header["tasks"] and not header["steps"]:
        _warn_of_other_weights(records)
    known = norm_buffers(states.model, states.exclude, states.held())
    anchored = {key.removeprefix("buffer."): t for key, t in state.items() if key.startswith("buffer.")}
    for name, tensor in anchored.items():
        if name not in known or tensor.shape != known[name].shape:
            raise MooringError(f"the state does not fit: the model has no buffer {name!r} of that shape")
    return header, records, {name: t.to(known[name], copy=True) for name, t in anchored.items()}


def _warn_of_other(option: str, made_with: str, mine: str) -> None:
    """One that training so far did not have; a state that does not say is believed."""
    if made_with:
        warnings.warn(
            f"the state was made with {made_with}, this Mooring has {mine}: "
            f"unless you mean to change that, give attach {option}={made_with}",
            stacklevel=5,
        )


def _warn_of_other_weights(records: dict[Tensor, ParameterState]) -> None:
    """Right after a task a parameter is where its anchor is; where it is not, it would be pulled to other weights."""
    for m in records.values():
        away = (m.theta.float() - m.near.float()).norm() > AWAY * m.near.float().norm()
        if not m.theta.is_meta and bool(away):
            warnings.warn(
                f"the model has other weights than those that the state was saved with ({m.name!r} differs): load the "
                "model's first, or training pulls it to the others",
                stacklevel=5,
            )
            return
