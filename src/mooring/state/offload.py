"""Anchors kept in host memory and copied to the device ahead of their use, through two buffers in turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 512
"""Anchors begin at multiples of this many bytes, as torch's own tensors do."""


class Anchored(Protocol):
    """An owner of an anchor, such as `ParameterState`."""

    anchor: Tensor
    staged: Tensor | None
    parameter: Tensor


def is_offloaded(state: Anchored) -> bool:
    """Return whether an anchor is on another device than its parameter."""
    return state.anchor.device != state.parameter.device


@dataclass
class _Slot:
    """A device buffer reused for successive groups of anchors.

    Attributes:
        bytes: the memory itself.
        holds: the group that is there, or on its way.
        ready: recorded when the copy is done.
        free: recorded when the last reader is done.
    """

    bytes: Tensor
    holds: tuple[Any, int] | None = None
    ready: Any = None
    free: Any = None


class AnchorOffload:
    """Copies of offloaded anchors on their devices, made on separate streams one group ahead of the group in use.

    Anchors do not change during a task. So when the last groups of a step are done, the first ones are fetched again,
    and are there when the next step needs them. The host never waits.

    Args:
        size: bytes of both slots of a device together; a parameter larger than half of that gets a slot of its size.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: dict[tuple[torch.device, int], _Slot] = {}
        self.streams: dict[torch.device, Any] = {}

    def groups(self, states: Sequence[Anchored]) -> Iterator[list[int]]:
        """Yield indices of states, group by group; while a group is in use, its anchors are staged on the device.

        States whose anchors are not offloaded come first, together.
        """
        offloaded: dict[torch.device, list[int]] = {}
        on_device: list[int] = []
        for index, state in enumerate(states):
            (offloaded.setdefault(state.parameter.device, []) if is_offloaded(state) else on_device).append(index)
        if on_device:
            yield on_device
        for device, indices in offloaded.items():
            yield from self._stage(states, self._group_by_size(states, indices), device)

    def _stage(self, states: Sequence[Anchored], groups: list[list[int]], device: torch.device) -> Iterator[list[int]]:
        """Yield the groups of one device; the first ones were fetched at the end of the last step."""
        key = tuple(id(states[index].anchor) for group in groups for index in group)
        members = [[states[index] for index in group] for group in groups]
        sizes = [max(map(_bytes_of, members[parity::2]), default=0) for parity in (0, 1)]
        slots = [self._slot(device, parity, size) for parity, size in enumerate(sizes)]
        for number in range(min(2, len(groups))):
            self._fetch(slots[number], (key, number), members[number])
        for number, group in enumerate(groups):
            slot = slots[number % 2]
            if slot.ready is not None:
                torch.cuda.current_stream(device).wait_event(slot.ready)
            for state, staged in zip(members[number], _views(slot.bytes, members[number]), strict=True):
                state.staged = staged
            try:
                yield group
            finally:
                for state in members[number]:
                    state.staged = None
                if slot.free is not None:
                    slot.free.record(torch.cuda.current_stream(device))
            following = number + 2 if number + 2 < len(groups) else number % 2
            self._fetch(slot, (key, following), members[following])

    def invalidate(self) -> None:
        """Discard fetched copies and wait for running ones, before anchors change."""
        for slot in self.slots.values():
            slot.holds = None
        for device, stream in self.streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _group_by_size(self, states: Sequence[Anchored], indices: Sequence[int]) -> list[list[int]]:
        """Group neighbours, as many as half of the size holds."""
        groups: list[list[int]] = []
        for index in indices:
            if groups and _bytes_of([states[i] for i in (*groups[-1], index)]) <= self.size // 2:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _fetch(self, slot: _Slot, group: tuple[Any, int], members: Sequence[Anchored]) -> None:
        """Start to copy a group into its slot, unless it is there."""
        if slot.holds == group:
            return
        slot.holds = group
        stream = self.streams.get(slot.bytes.device)
        if stream is None:
            _copy(slot, members)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(slot.free)
            _copy(slot, members)
            slot.ready.record(stream)

    def _slot(self, device: torch.device, parity: int, size: int) -> _Slot:
        """Return one of a device's two slots, large enough."""
        slot = self.slots.get((device, parity))
        if slot is not None and slot.bytes.numel() >= size:
            return slot
        slot = self.slots[device, parity] = _Slot(torch.empty(size, dtype=torch.uint8, device=device))
        if device.type == "cuda":
            stream = self.streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            slot.bytes.record_stream(stream)  # the allocator must not reuse it while a copy goes into it
            slot.ready, slot.free = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
            slot.free.record(torch.cuda.current_stream(device))  # the previous owner of this memory may still use it
        return slot


def _copy(slot: _Slot, members: Sequence[Anchored]) -> None:
    for state, view in zip(members, _views(slot.bytes, members), strict=True):
        view.copy_(state.anchor, non_blocking=True)


def _bytes_of(states: Sequence[Anchored]) -> int:
    return sum(_aligned_bytes(state.anchor) for state in states)


def _aligned_bytes(anchor: Tensor) -> int:
    return -(-anchor.numel() * anchor.element_size() // ALIGNMENT) * ALIGNMENT


def _views(memory: Tensor, states: Sequence[Anchored]) -> Iterator[Tensor]:
    """Yield the place of each anchor in a slot's memory, with the anchor's own strides."""
    begin = 0
    for state in states:
        anchor = state.anchor
        flat = memory[begin : begin + anchor.numel() * anchor.element_size()].view(anchor.dtype)
        yield flat.as_strided(anchor.shape, anchor.stride())
        begin += _aligned_bytes(anchor)
