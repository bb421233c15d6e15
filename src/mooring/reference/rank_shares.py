"""Data on several ranks: each reads its share, and the estimates of all are combined into that of one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from mooring.distributed.collectives import all_reduce_many
from mooring.distributed.dtensor import is_fully_sharded, mesh_of, one_process, rank, world_size
from mooring.errors import MooringError
from mooring.reference.batches import Data, device_of, iter_batches, to_device
from mooring.reference.preserve_model_state import preserve_model_state
from mooring.reference.reading import own_memory, spread, warn_of_order
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import ParameterState

SHARED_SAMPLES = (
    "tensor parallel ranks share samples, so they cannot each read a share of the data: estimate in one process, and "
    "load its state_dict() on every rank"
)


class RankShare:
    """The batches that this rank reads: each world-th one, or all of a loader that gives each rank its own.

    Without shards, each rank computes on its batches as one process would, and `combine_ranks` adds the results up. The
    ranks of a model under `fully_shard` compute together: a batch of each rank is a part of one larger batch.

    Args:
        model: the model.

    Attributes:
        together: whether ranks compute together, so that all need the same number of batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rank, self.world = model, rank(), world_size()
        self.together = self.world > 1 and mesh_of(model.parameters()) is not None
        if self.together and not is_fully_sharded(model):
            raise MooringError(SHARED_SAMPLES)

    def length(self, total: int | None) -> int | None:
        """Return how many of `total` batches this rank reads; None if the number is unknown."""
        if total is None:
            return None
        return total // self.world if self.together else len(range(self.rank, total, self.world))

    def read(self, data: Data, batches: int | None) -> Iterator[Any]:
        """Yield this rank's share of at most `batches` batches."""
        own: Iterator[Any] = iter_batches(data, self.model, batches)
        if self.world > 1 and (callable(data) or gives_each_rank_its_own(data)):
            own = islice(own, self.length(batches))
        elif self.world > 1:
            own = islice(own, self.rank, None, self.world)
        if not self.together:
            yield from own
            return
        while all(gather_objects((batch := next(own, None)) is not None)):  # as long as every rank has one
            yield batch

    @contextmanager
    def computing(self, data: Data) -> Iterator[None]:
        """Compute alone on this rank's batches if ranks do not compute together; an error on one stops all of them.

        Random numbers are seeded: alike, so that all ranks shuffle alike, or apart, for data that each rank generates.
        """
        if self.world > 1:
            seed = gather_objects(torch.initial_seed())[0]
            torch.manual_seed((seed + self.rank if callable(data) else seed) % 2**63)
        if self.world == 1 or self.together:
            yield
            return
        error: Exception | None = None
        try:
            with one_process():
                yield
        except Exception as raised:
            error = raised
        stop_together(error)

    def gather(self, batches: list[Any]) -> list[Any]:
        """Return the batches of all ranks in the order in which one process would read them."""
        if self.world == 1:
            return batches
        device = device_of(self.model)
        shares = gather_objects([to_device(batch, torch.device("cpu")) for batch in batches])
        missing = object()
        rounds = zip_longest(*shares, fillvalue=missing)
        return [to_device(batch, device) for share in rounds for batch in share if batch is not missing]


def read_batches(model: nn.Module, data: Data, batches: int | None) -> list[Any]:
    """Read data, or call a function that makes it, and return the batches; the model does not change.

    On several ranks each reads its share, and all get the batches of all, in the order in which one process reads them.
    """
    share = RankShare(model)
    with preserve_model_state(model), share.computing(data):
        source = spread(data, batches)
        own = [own_memory(batch, data) for batch in share.read(source, batches)]
    read = share.gather(own)
    if source is data and not isinstance(data, list | tuple):
        warn_of_order(read, batches)
    return read


def stop_together(error: Exception | None, failed: str = "could not use its share of the data") -> None:
    """Raise this rank's error, or say which other rank has one; every rank must call this.

    Args:
        error: the error of this rank, if it has one.
        failed: what the rank with the error did, for the message on the others.
    """
    messages = gather_objects(str(error) if error else None)
    if error:
        raise error
    for number, message in enumerate(messages):
        if message is not None:
            raise MooringError(f"rank {number} {failed}: {message}")


def gives_each_rank_its_own(data: Any) -> bool:
    """Return whether a loader gives each rank other batches: with a `DistributedSampler`, or prepared by Accelerate.

    Example:
        >>> gives_each_rank_its_own(DataLoader([1, 2]))
        False
    """
    if type(data).__module__.partition(".")[0] == "accelerate":
        return True
    return isinstance(data, DataLoader) and isinstance(data.sampler, DistributedSampler)


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def combine_ranks(states: MooringState) -> None:
    """Combine what each rank estimated alone: the sums of factors, and the mean of scores over all iterations.

    Every rank must call this. A parameter that one rank knows by scores has scores on all.

    Args:
        states: the states that this rank estimated; they are changed to those of all ranks.
    """
    parameters = states.trained()
    counts = gather_objects([_counts(states.records.get(p)) for p in parameters])
    known = [(p, own) for p, *own in zip(parameters, *counts, strict=True) if any(own)]
    sums, targets = list[Tensor](), list[tuple[ParameterState, str]]()
    for p, own in known:
        state = states.get_or_create(p)
        assert state is not None
        total = sum(count for count, _, _ in filter(None, own))
        if any(scored for _, _, scored in filter(None, own)):
            states.to_scores(state)
        if state.has_scores:
            share = state.count / max(1, total)
            sums += [tensor * share for tensor in state.importance_state.values()]
            targets += [(state, slot) for slot in state.importance_state]
        elif state.factors:
            state.factors.count = sum(count for _, count, _ in filter(None, own))
            sums += [state.factors.inputs.contiguous(), state.factors.outputs.contiguous()]
            targets += [(state, "inputs"), (state, "outputs")]
        state.count = total
    for (state, slot), tensor in zip(targets, all_reduce_many(sums), strict=True):
        if state.has_scores:
            state.importance_state[slot] = tensor.clone()  # its bucket can be freed
        else:
            setattr(state.factors, slot, tensor.clone())
    states.records = {p: states.records[p] for p in states.names if p in states.records}  # in the same order


def _counts(state: ParameterState | None) -> tuple[int, int, bool] | None:
    """Return the iterations that a state has seen, those in its factors, and whether it has scores; None for None."""
    if state is None:
        return None
    return state.count, state.factors.count if state.factors else 0, state.has_scores
