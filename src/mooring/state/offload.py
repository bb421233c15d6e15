"""Anchors that are kept in the host's memory, brought to the device in time: two rooms, filled in turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["AnchorOffload", "Anchored", "is_offloaded"]

LINE = 512
"""Anchors begin at multiples of so many bytes, as torch's own tensors do."""


class Anchored(Protocol):
    """Who has an anchor, as a `ParameterState` has."""

    anchor: Tensor
    staged: Tensor | None
    parameter: Tensor


def is_offloaded(m: Anchored) -> bool:
    """Whether an anchor is not where its parameter is."""
    return m.anchor.device != m.parameter.device


@dataclass
class _Slot:
    """Memory on the device that one group of anchors after the other passes through.

    Attributes:
        bytes: the memory itself.
        holds: which group is there, or on its way.
        ready: when the copy is done.
        free: when the last reader is done.
    """

    bytes: Tensor
    holds: tuple[Any, int] | None = None
    ready: Any = None
    free: Any = None


class AnchorOffload:
    """Copies anchors to their devices on streams of its own, one group ahead of the one that is in use.

    Anchors stay as they are during a task. So when the last groups of a step are done with, the first ones are fetched
    again, and are there when the next step wants them. The host waits for nothing.

    Args:
        size: bytes of both rooms of a device together; a parameter larger than half of that has a room of its size.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rooms: dict[tuple[torch.device, int], _Slot] = {}
        self.streams: dict[torch.device, Any] = {}

    def over(self, records: Sequence[Anchored]) -> Iterator[list[int]]:
        """Places of records, group by group; while a group is handed out, its anchors are staged.

        Records whose anchors are where their parameters are come first, together.
        """
        there: dict[torch.device, list[int]] = {}
        near: list[int] = []
        for place, m in enumerate(records):
            (there.setdefault(m.parameter.device, []) if is_offloaded(m) else near).append(place)
        if near:
            yield near
        for device, places in there.items():
            yield from self._over(records, self._groups(records, places), device)

    def _over(self, records: Sequence[Anchored], groups: list[list[int]], device: torch.device) -> Iterator[list[int]]:
        """The groups of one device; the first ones were fetched when the last step ended."""
        key = tuple(id(records[place].anchor) for group in groups for place in group)
        whole = [[records[place] for place in group] for group in groups]
        sizes = [max(map(_needs, whole[which::2]), default=0) for which in (0, 1)]
        rooms = [self._room(device, which, size) for which, size in enumerate(sizes)]
        for index in range(min(2, len(groups))):
            self._fetch(rooms[index], (key, index), whole[index])
        for index, group in enumerate(groups):
            room, mine = rooms[index % 2], whole[index]
            if room.ready is not None:
                torch.cuda.current_stream(device).wait_event(room.ready)
            for m, staged in zip(mine, _views(room.bytes, mine), strict=True):
                m.staged = staged
            try:
                yield group
            finally:
                for m in mine:
                    m.staged = None
                if room.free is not None:
                    room.free.record(torch.cuda.current_stream(device))
            following = index + 2 if index + 2 < len(groups) else index % 2
            self._fetch(room, (key, following), whole[following])

    def forget(self) -> None:
        """Anchors are about to change: what was fetched is not used again, and no copy is under way any more."""
        for room in self.rooms.values():
            room.holds = None
        for device, stream in self.streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _groups(self, records: Sequence[Anchored], places: Sequence[int]) -> list[list[int]]:
        """Neighbours together, as many as half of the size holds."""
        groups: list[list[int]] = []
        for place in places:
            if groups and _needs([records[each] for each in (*groups[-1], place)]) <= self.size // 2:
                groups[-1].append(place)
            else:
                groups.append([place])
        return groups

    def _fetch(self, room: _Slot, which: tuple[Any, int], mine: Sequence[Anchored]) -> None:
        """Begin to copy a group into its room, unless it is there."""
        if room.holds == which:
            return
        room.holds = which
        stream = self.streams.get(room.bytes.device)
        if stream is None:
            _copy(room, mine)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(room.free)
            _copy(room, mine)
            room.ready.record(stream)

    def _room(self, device: torch.device, which: int, need: int) -> _Slot:
        """One of a device's two rooms, large enough."""
        room = self.rooms.get((device, which))
        if room is not None and room.bytes.numel() >= need:
            return room
        room = self.rooms[device, which] = _Slot(torch.empty(need, dtype=torch.uint8, device=device))
        if device.type == "cuda":
            stream = self.streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            room.bytes.record_stream(stream)  # it is not given away while a copy goes into it
            room.ready, room.free = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
            room.free.record(torch.cuda.current_stream(device))  # who had this memory before may still use it
        return room


def _copy(room: _Slot, records: Sequence[Anchored]) -> None:
    for m, view in zip(records, _views(room.bytes, records), strict=True):
        view.copy_(m.anchor, non_blocking=True)


def _needs(records: Sequence[Anchored]) -> int:
    return sum(_need(m.anchor) for m in records)


def _need(anchor: Tensor) -> int:
    return -(-anchor.numel() * anchor.element_size() // LINE) * LINE


def _views(room: Tensor, records: Sequence[Anchored]) -> Iterator[Tensor]:
    """Where each anchor goes, in its own order of memory."""
    begin = 0
    for m in records:
        whole = room[begin : begin + m.anchor.numel() * m.anchor.element_size()].view(m.anchor.dtype)
        yield whole.as_strided(m.anchor.shape, m.anchor.stride())
        begin += _need(m.anchor)
