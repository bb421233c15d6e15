"""An estimate of the memory that a reference takes, and a refusal before the work if there is too little."""

import torch
from torch import Tensor

from mooring.curvature.kronecker_factors import factor_shape
from mooring.curvature.low_rank import Product
from mooring.curvature.product_factors import factor_shapes
from mooring.distributed.dtensor import world_size
from mooring.errors import MooringError
from mooring.reference.rank_shares import stop_together
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import compute_dtype_of


def estimated_bytes(states: MooringState) -> dict[torch.device, int]:
    """Return the bytes on each device that an estimate of importance will allocate, without activations.

    These are gradients, anchors, the importance on the data and that over past tasks, and Kronecker factors with their
    eigenbases. Of parameters whose state exists, only what is new counts.
    """
    total: dict[torch.device, int] = {}
    for p in states.trained():
        total[p.device] = total.get(p.device, 0) + _bytes(states, p)
    return total


def _bytes(states: MooringState, p: Tensor) -> int:
    size, width = p.numel(), compute_dtype_of(p).itemsize
    gradient = 0 if p.grad is not None else size * p.itemsize
    known = states.records.get(p)
    anchor = 0 if states.memory.host or known else size * (states.memory.anchor or p.dtype).itemsize
    if p in states.products:
        return gradient + anchor + _product_bytes(states, p, width)
    if p in states.with_factors and not (known and known.factors is None):
        groups = states.groups_of(p)
        outs, ins, blocks = len(p) // groups, size // max(1, len(p)), states.importance.blocks
        squares = sum(torch.Size(factor_shape(side, blocks, groups)).numel() for side in (ins, outs))
        factors = 3 * squares + size  # of this task, of past tasks, and the eigenbasis with its curvature
        return gradient + anchor + width * factors
    return gradient + anchor + width * size * (1 if known and known.previous is not None else 2)


def _product_bytes(states: MooringState, p: Tensor, width: int) -> int:
    """Return the bytes of the factors of a low-rank product; its B has those of both parameters."""
    if p not in states.products.by_b or not isinstance(states.adapters, Product):
        return 0
    shapes = factor_shapes(states.products.by_b[p], states.adapters.largest)
    inputs, outputs = (torch.Size(shape).numel() for shape in shapes)
    dtype = states.adapters.dtype
    previous, vectors = (1, 2) if dtype == "8bit" else (dtype.itemsize if dtype else width,) * 2
    return (width + previous) * (inputs + outputs) + vectors * (outputs if len(shapes[1]) > 1 else 0)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None if that is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_memory(states: MooringState) -> None:
    """Refuse an estimate that does not fit into memory, before anything is read; every rank must call this.

    GPUs differ in free memory. If one rank refused alone, the others would wait for it to read its share.
    """
    error = _too_little_memory(states)
    if world_size() > 1:
        stop_together(error, "has too little memory")
    elif error:
        raise error


def _too_little_memory(states: MooringState) -> MooringError | None:
    """Return an error if an estimate does not fit into the memory of this rank's devices."""
    for device, needed in estimated_bytes(states).items():
        if (free := free_bytes(device)) is not None and needed > free:
            remedy = "exclude some parameters, or give memory=Memory(host=True)"
            if states.products:
                remedy = 'give adapters=Product(largest=512) or Product(dtype="8bit"), or exclude some parameters'
            elif states.importance.by_layer:
                remedy = f"give {states.importance.name}(blocks=512), or exclude some parameters"
            return MooringError(
                f"the reference needs {needed / 1e9:.1f} GB on {device} besides activations, and {free / 1e9:.1f} GB "
                f"are free: {remedy}"
            )
    return None
